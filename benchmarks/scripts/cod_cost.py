"""What COD saves: rows, time and memory of a training step with and without dropping.

    python benchmarks/scripts/cod_cost.py --tokens 1024 --json FILE.json
    python benchmarks/scripts/cod_cost.py --tokens 2048 --shape qwen2.5-0.5b --device cuda --json FILE.json

Every setting runs in a process of its own, so that its peak memory is its own; the settings take turns.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from paradraft.bench.report.summary import write_json
from paradraft.data.samples import Sample
from paradraft.environment import describe_machine
from paradraft.models.devices import computes_bf16
from paradraft.models.names import PREFIX
from paradraft.sources.presets import SHAPES, random_model
from paradraft.train.objectives.batch import Drop, collate
from paradraft.train.objectives.losses import row_weights
from paradraft.train.objectives.objective import Objective
from paradraft.train.objectives.rows import FLEX
from paradraft.train.optimizers import Optimizers

SETTINGS = {"without drop": (1.0, 1.0), "COD": (0.7, 0.2)}
K = 8


def measure(setting: str, args: argparse.Namespace) -> dict[str, Any]:
    """Takes a few steps with one sample each."""
    device = torch.device(args.device)
    model = random_model(PREFIX + args.shape, dtype=torch.float32, device=args.device, positions=args.tokens)
    on_gpu = device.type == "cuda"
    model.set_attn_implementation(FLEX if on_gpu else "sdpa")
    objective = Objective(model, bf16=computes_bf16(device)).train()
    optimizers = Optimizers(model, muon_lr=None, lr=1e-5, weight_decay=0.0, warmup_steps=0, steps=args.steps + 1)
    r, r_min = SETTINGS[setting]
    drop = Drop(k=K, r=r, r_min=r_min, mask_id=model.config.vocab_size - 1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size - 1, (args.tokens + 1,), generator=generator).tolist()
    sample = Sample(tokens=tokens, is_label=[True] * len(tokens))
    seconds = []
    for step in range(args.steps + 1):
        began_s = time.perf_counter()
        batch = collate([[sample]], drop, [[torch.Generator().manual_seed(step)]]).to(device)
        labels_K = batch.labels_by_depth(K)
        loss, *_ = objective(batch, row_weights(labels_K, "per_depth", torch.ones(K, device=device)))
        loss.backward()
        optimizers.step(step)
        if on_gpu:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began_s)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else resident
    return {"rows": batch.tokens.numel(), "step_s": seconds[1:], "peak_bytes": peak}


def main() -> None:
    """Measures both settings in turns and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="pocket-draft")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--setting", choices=SETTINGS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.setting:
        print(json.dumps(measure(args.setting, args)))
        return
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SETTINGS}
    for turn in range(args.turns):
        for name in SETTINGS:
            print(f"turn {turn + 1}/{args.turns}: {name}", flush=True)
            command = [sys.executable, *sys.argv, "--setting", name]
            found[name].append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    summary = {
        name: {
            "rows": turns[0]["rows"],
            "step_s": statistics.median(s for turn in turns for s in turn["step_s"]),
            "peak_bytes": max(turn["peak_bytes"] for turn in turns),
            "turns": turns,
        }
        for name, turns in found.items()
    }
    plain, cod = summary["without drop"], summary["COD"]
    ratios = {key: plain[key] / cod[key] for key in ("rows", "step_s", "peak_bytes")}
    print(", ".join(f"{key} {ratio:.2f} times as much without drop" for key, ratio in ratios.items()))
    if args.json:
        arguments = {key: value for key, value in vars(args).items() if key not in ("json", "setting")}
        machine = describe_machine(args.device)
        write_json(args.json, {"machine": machine, "arguments": arguments, "settings": summary, "ratios": ratios})


if __name__ == "__main__":
    main()
