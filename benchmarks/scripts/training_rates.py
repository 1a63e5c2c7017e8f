"""Rows per second of training, of several versions of the code and several settings, each in a process, step by step in
turns: so all of them meet the same states of a shared machine.

git worktree add build/before COMMIT
python benchmarks/scripts/training_rates.py eagle_parallel RECIPE.yaml --json FILE.json \
    --cases before:build/before 'now:.' 'trimmed:.:draft_vocab_size=8192'

A case is NAME:TREE or NAME:TREE:OVERRIDES, with several overrides joined by "+". Samples of all steps come in two
epochs: in the second one the target's states are kept from the first.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SAMPLES = 8
"""Samples of a step."""


def take_steps(drafter: str, recipe_file: Path, overrides: list[str]) -> None:
    """In the process of a case: takes the steps whose numbers it reads, and writes their rows and seconds."""
    import torch

    from paradraft.train import recipe_class, trainee_module
    from paradraft.train.objectives.losses import row_weights
    from paradraft.train.recipe_file import load_recipe
    from paradraft.train.run.setup import prepare

    module = trainee_module(drafter)
    states = tempfile.TemporaryDirectory()
    recipe = load_recipe(recipe_class(module), recipe_file, [*overrides, "held_out=0", f"out={states.name}/out"])
    prepared = prepare(recipe, module.build, torch.device("cpu"), processes=1)
    trainee = prepared.trainee
    objective = trainee.objective.train()
    trained = [weight for weight in objective.parameters() if weight.requires_grad]
    optimizer, importance_K = torch.optim.AdamW(trained, lr=1e-4), torch.tensor(recipe.weights_by_depth)
    print("ready", flush=True)
    for line in sys.stdin:
        first = int(line) * SAMPLES
        began_s, cpu_s, rows, loss = time.perf_counter(), time.process_time(), 0, 0.0
        for batch in prepared.batches(prepared.samples[first : first + SAMPLES], range(first, first + SAMPLES)):
            weights_K = row_weights(batch.labels_by_depth(trainee.depths).float(), recipe.average, importance_K)
            part = objective(batch, weights_K)[0]
            part.backward()
            rows, loss = rows + batch.tokens.numel(), loss + part.item()
        optimizer.step()
        optimizer.zero_grad()
        step = {"rows": rows, "s": time.perf_counter() - began_s, "cpu_s": time.process_time() - cpu_s, "loss": loss}
        step["most_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(json.dumps(step), flush=True)


class Case:
    """A process that trains.

    Args:
        named: NAME:TREE or NAME:TREE:OVERRIDES.
        arguments: drafter and recipe.
    """

    def __init__(self, named: str, arguments: list[str]) -> None:
        self.name, tree, *overrides = named.split(":", 2)
        self.overrides = overrides[0].split("+") if overrides else []
        self._process = subprocess.Popen(
            [sys.executable, __file__, *arguments, "--steps-of", *self.overrides],
            env={**os.environ, "PYTHONPATH": str(Path(tree).resolve() / "src")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.steps: list[dict[str, float]] = []
        self._read()

    def step(self, number: int) -> None:
        """Takes a step."""
        assert self._process.stdin is not None
        print(number, file=self._process.stdin, flush=True)
        self.steps.append(json.loads(self._read()))

    def _read(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"{self.name}: its process ended with code {self._process.wait()}")
        return line

    def summary(self, epoch_steps: int) -> dict[str, Any]:
        """Medians of rows per second by epoch, without the first step, and all steps."""
        parts = {"first epoch": self.steps[1:epoch_steps], "second epoch": self.steps[epoch_steps:]}
        rates = {
            name: {
                "rows_per_s": round(statistics.median(step["rows"] / step["s"] for step in steps), 1),
                "rows_per_cpu_s": round(statistics.median(step["rows"] / step["cpu_s"] for step in steps), 1),
            }
            for name, steps in parts.items()
        }
        most_gb = round(max(step["most_gb"] for step in self.steps), 2)
        return {"case": self.name, "overrides": self.overrides, **rates, "most_gb": most_gb, "steps": self.steps}


def main() -> None:
    """Runs all cases in turns, prints their rates, and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--cases", nargs="+", default=[])
    parser.add_argument("--steps", type=int, default=4, help="of an epoch")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps-of", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps_of is not None:
        take_steps(args.drafter, args.recipe, args.steps_of)
        return
    from paradraft.bench.report.summary import write_json
    from paradraft.environment import describe_machine

    cases = [Case(named, [args.drafter, str(args.recipe)]) for named in args.cases]
    for _ in range(2):
        for number in range(args.steps):
            for case in cases:
                case.step(number)
    found = [case.summary(args.steps) for case in cases]
    for summary in found:
        print({key: value for key, value in summary.items() if key != "steps"})
    if args.json is not None:
        settings = {"drafter": args.drafter, "recipe": args.recipe.read_text(encoding="utf-8")}
        write_json(args.json, {"machine": describe_machine("cpu"), "settings": settings, "cases": found})


if __name__ == "__main__":
    main()
