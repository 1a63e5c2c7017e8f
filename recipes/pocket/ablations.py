"""The paper's ablations on the pocket family: `python recipes/pocket/ablations.py --json FILE.json`.

Every run adapts the family's draft for the same number of steps with one setting changed, and decodes
held-out prompts greedily with several K. So short a training leaves the deep masks worthless, so the
table of K goes on from the family's PARD drafter instead. Runs that are done are skipped, and a stopped one goes on.
`--steps` makes all of them longer or shorter; `--family` takes another family than the shipped one,
such as what `build.py` leaves in `build/pocket`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

import corpus
from build import POCKET
from paradraft.bench.report.summary import write_json
from paradraft.cli.commands.train import run_with_display
from paradraft.environment import describe_machine
from paradraft.models.runtime import Runtime
from paradraft.train.drafters.pard import build
from paradraft.train.drafters.pard_recipe import PardRecipe
from paradraft.train.run.acceptance import AcceptanceMeter, DrafterLoader
from paradraft.train.run.curves import read_history
from paradraft.train.run.progress import Progress

TAUGHT = {"teacher": "target"}
ADAPTED = {"model": "pard"}
TABLES: dict[str, dict[str, dict[str, Any]]] = {
    "loss": {
        "cross_entropy": {},
        "cross_entropy, per_depth": {"average": "per_depth"},
        "forward_kl": {**TAUGHT, "loss": "forward_kl"},
        "reverse_kl": {**TAUGHT, "loss": "reverse_kl"},
        "jensen_shannon": {**TAUGHT, "loss": "jensen_shannon"},
        "total_variation": {**TAUGHT, "loss": "total_variation"},
    },
    "drop (Fig. 6a)": {
        "r=1": {"r": 1.0},
        "r=0.7, r_min=0.2": {},
        "r=0.7, r_min=0": {"r_min": 0.0},
        "r=0.5, r_min=0.2": {"r": 0.5},
        "r=0.5, r_min=0": {"r": 0.5, "r_min": 0.0},
    },
    "K in training (Fig. 6b)": {f"K={k}": {**ADAPTED, "k": k} for k in (4, 8, 12)},
    "masks": {"shared": {}, "distinct": {"distinct_masks": True}},
    "answers": {"regenerated": {}, "original": {"data": ["original.jsonl"]}},
}
DECODED = (2, 4, 8, 12, 16)
"""K in decoding."""
PROMPTS, ANSWER_TOKENS = 24, 96


def write_original(family: Path, file: Path) -> None:
    """The prompts of the family's texts with what the library really goes on with, as long as the target's answer."""
    library = [document.text for document in corpus.read_library()[0]]
    records = [json.loads(line) for line in (family / "text.jsonl").read_text(encoding="utf-8").splitlines()]
    with file.open("w", encoding="utf-8") as lines:
        for record in records:
            whole = next((text for text in library if record["prompt"] in text), None)
            if whole is None:
                continue  # an excerpt that goes over the end of a module
            start = whole.index(record["prompt"]) + len(record["prompt"])
            answer = whole[start : start + len(record["response"])]
            if answer:
                lines.write(json.dumps({**record, "response": answer}, ensure_ascii=False) + "\n")


def recipe_of(changes: dict[str, Any], family: Path, folder: Path, steps: int) -> PardRecipe:
    """`pard.yaml` without a teacher and with some settings changed; the drafter goes where only this recipe's goes."""
    settings: dict[str, Any] = {
        "model": str(family / "draft"), "data": [family / "text.jsonl"], "out": folder, "steps": steps,
        "average": "token_mean", "samples_per_step": 3, "max_length": 384, "optimizer": "muon", "muon_lr": 1e-2,
        "lr": 1e-3, "warmup_steps": 20, "max_grad_norm": None, "held_out": 0, "save_every": 50, "device": "cpu",
    }  # fmt: skip
    if "data" in changes:
        changes = {**changes, "data": [folder / name for name in changes["data"]]}
    changes = {**changes, **{name: str(family / changes[name]) for name in ("model", "teacher") if name in changes}}
    recipe = PardRecipe.model_validate(settings | changes)
    return recipe.model_copy(update={"out": folder / recipe.fingerprint})


def measure(recipe: PardRecipe, family: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """Acceptance length by K in decoding, and what the training cost; kept beside the drafter."""
    kept = recipe.out / "measured.json"
    if kept.exists():
        return dict(json.loads(kept.read_text(encoding="utf-8")))
    lengths = {}
    for k in DECODED:
        runtime = Runtime(device="cpu", dtype="float32")
        loader = DrafterLoader(str(family / "target"), drafter="pard", k=k, runtime=runtime)
        lengths[k] = AcceptanceMeter(loader, prompts, answer_tokens=ANSWER_TOKENS).of(recipe.out).length
    rows = [report.rows_per_s for report in read_history(recipe.out) if isinstance(report, Progress)]
    measured = {"acceptance_length": lengths, "rows_per_s": sorted(rows)[len(rows) // 2]}
    write_json(kept, measured)
    return measured


def main() -> None:
    """Trains and measures whatever is missing, and writes the file after every run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--family", type=Path, default=POCKET)
    parser.add_argument("--out", type=Path, default=Path("build/ablations"))
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--tables", nargs="*", default=list(TABLES), choices=TABLES)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if not (args.out / "original.jsonl").exists():
        write_original(args.family, args.out / "original.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(args.family / "target", trust_remote_code=False)
    records = [json.loads(line) for line in (args.family / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    prompts = [tokenizer(record["prompt"])["input_ids"] for record in records[:PROMPTS]]
    done: dict[str, dict[str, Any]] = {}
    tables: dict[str, dict[str, Any]] = {}
    for title in args.tables:
        tables[title] = {}
        for name, changes in TABLES[title].items():
            key = json.dumps(changes, sort_keys=True)
            if key not in done:
                recipe = recipe_of(changes, args.family, args.out, args.steps)
                print(f"{title}: {name}", flush=True)
                run_with_display(recipe, build)
                done[key] = measure(recipe, args.family, prompts)
            tables[title][name] = done[key]
            print(title, name, done[key]["acceptance_length"], flush=True)
            settings = {
                "family": args.family.name,
                "steps": args.steps,
                "prompts": PROMPTS,
                "answer_tokens": ANSWER_TOKENS,
            }
            write_json(args.json, {"machine": describe_machine("cpu"), "arguments": settings, "tables": tables})


if __name__ == "__main__":
    main()
