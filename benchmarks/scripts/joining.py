"""What it is worth that a waiting prompt takes the row of an answer that has ended.

    python benchmarks/scripts/joining.py --against /path/to/another/checkout --json FILE.json

Prompts whose answers have 16 to 256 tokens are answered at one batch size: by this checkout, by this one in slices of
the batch size (all of a slice end before the next begins), and by another checkout. With one row it shows what a round
costs. Each worker is a process that loads its engine once; they take turns, so that all meet the same machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

from rich.progress import track
from worker import Worker

SHORTEST, LONGEST = 16, 256


def work(target: str, drafter: str, k: int, batch_size: int, prompts: int, sliced: bool) -> None:
    """A worker: answers all prompts for each line of its input, and prints its tokens per second.

    Args:
        target: a model name.
        drafter: "none" for plain decoding.
        k: tokens drafted per round.
        batch_size: rows that are answered together.
        prompts: how many there are.
        sliced: answer them in slices of the batch size.
    """
    import paradraft
    from paradraft.bench.synthetic import without_ends

    engine = paradraft.load(target, drafter=drafter, k=k)
    without_ends(engine.target)
    chooser = random.Random(0)
    texts = [f"def function_{number}(values):" for number in range(prompts)]
    lengths = [chooser.randint(SHORTEST, LONGEST) for _ in texts]
    slices = (
        [slice(first, first + batch_size) for first in range(0, prompts, batch_size)] if sliced else [slice(prompts)]
    )
    engine.generate(texts[:batch_size], max_new_tokens=SHORTEST, batch_size=batch_size)
    print("ready", flush=True)
    for _ in sys.stdin:
        begun, tokens = time.perf_counter(), 0
        for part in slices:
            results = engine.generate(texts[part], max_new_tokens=lengths[part], batch_size=batch_size)
            tokens += sum(len(result.tokens) for result in results)
        assert tokens == sum(lengths)
        print(tokens / (time.perf_counter() - begun), flush=True)


def main() -> None:
    """Reads the options, measures, prints a table and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="pocket")
    parser.add_argument("--drafter", default="none")
    parser.add_argument("--k", type=int, default=6)
    parser.add_argument("--batch_size", "--batch-size", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--against", type=Path, help="another checkout to measure beside this one")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--sliced", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(given.target, given.drafter, given.k, given.batch_size, given.prompts, bool(given.sliced))
        return
    from paradraft.bench.report.summary import write_json
    from paradraft.environment import describe_machine

    here = Path(__file__).resolve().parents[2] / "src"
    settings = {name: getattr(given, name) for name in ("target", "drafter", "k", "batch_size", "prompts")}
    workers = {"joining": Worker(__file__, here, settings)}
    if given.batch_size > 1:
        workers["slices"] = Worker(__file__, here, settings | {"sliced": 1})
    if given.against:
        workers["other checkout"] = Worker(__file__, given.against / "src", settings)
    speeds: dict[str, list[float]] = {name: [] for name in workers}
    for _ in track(range(given.turns), "turns"):
        for name, worker in workers.items():
            speeds[name].append(float(worker.ask()))
    for worker in workers.values():
        worker.end()
    figures = {}
    for name, found in speeds.items():
        ratios = [ours / theirs for ours, theirs in zip(speeds["joining"], found, strict=True)]
        figures[name] = {"median": statistics.median(found), "turns": found, "ratio": statistics.median(ratios)}
        print(
            f"{name:16} {figures[name]['median']:7.0f} tokens/s; joining is {figures[name]['ratio']:.2f} times as fast"
        )
    if given.json:
        write_json(given.json, {"machine": describe_machine("cpu"), **settings, "workers": figures})


if __name__ == "__main__":
    main()
