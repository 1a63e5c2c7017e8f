"""Says how good the shipped family is: `python recipes/pocket/quality.py --bench FILE.json … --json FILE.json`.

Held-out loss of every model, and of others with the same tokenizer (`--models build/pocket/wide/target`), and how much
the target repeats itself in the answers that benchmark files hold.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoTokenizer

import corpus
from build import POCKET, tokenized
from paradraft.bench.harness import distinct_share
from paradraft.bench.report.summary import write_json
from paradraft.environment import describe_machine
from paradraft.models.runtime import Runtime
from paradraft.sources.loading import load_model
from pretrain import evaluate

WINDOWS = 256


def main() -> None:
    """Measures and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", type=Path, nargs="*", default=[], help="files of `paradraft bench` with `ar`")
    parser.add_argument("--models", nargs="*", default=[], help="further folders with the family's tokenizer")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(POCKET / "target", trust_remote_code=False)
    _, held_out = corpus.read_library()
    stream: torch.Tensor = tokenized(tokenizer, [document.text for document in held_out])
    losses = {}
    folders = {name: str(POCKET / name) for name in ("target", "draft", "pard")}
    for name, folder in (folders | {folder: folder for folder in args.models}).items():
        losses[name] = evaluate(load_model(folder, Runtime(device="cpu", dtype="float32")), stream, most=WINDOWS)
        print(f"{name}: held-out loss {losses[name]:.3f} nats per token", flush=True)
    repetition = {}
    for file in args.bench:
        answers = json.loads(file.read_text(encoding="utf-8"))["answers"]["ar"]["tokens"]
        repetition[file.name] = distinct_share(answers)
        print(f"{file.name}: {repetition[file.name]:.0%} of the 4-grams of an answer are new")
    figures = {"held_out_loss": losses, "windows_of_256_tokens": WINDOWS, "distinct_4_grams": repetition}
    write_json(args.json, {"machine": describe_machine("cpu"), **figures})


if __name__ == "__main__":
    main()
