"""How fast plain decoding is while other programs, or other engines of this one, use the same CPUs.

    python benchmarks/scripts/busy_machine.py --json FILE.json
    python benchmarks/scripts/busy_machine.py --against /path/to/another/checkout --json FILE.json

Each worker is a process of its own that loads an engine once and then decodes for a moment whenever its turn comes, so
that all settings meet the same machine. A turn is run twice: on the machine as it is, and while programs that do
nothing but compute take some of its CPUs.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import track
from worker import Worker

TOKENS = 64
"""Tokens of an answer; its prefill and its first draft are part of the time."""
PROMPT = "def read_lines(path):"
PROGRAM = "while True: pass"
"""What takes a CPU."""


def work(target: str, dtype: str, drafter: str, k: int, batch_size: int, threads: int, engines: int) -> None:
    """A worker: answers for as many seconds as each line of its input says, and prints its tokens per second.

    Args:
        target: a model name.
        dtype: of its weights.
        drafter: "none" for plain decoding.
        k: tokens drafted per round.
        batch_size: rows that are answered together.
        threads: of each engine; 0 for as many as there are CPUs.
        engines: decode at once, each in a Python thread.
    """
    import torch

    import paradraft
    from paradraft.models.runtime import Runtime

    if threads:
        torch.set_num_threads(threads)
    granted = torch.get_num_threads()
    runtime = Runtime(dtype=dtype)
    loaded = [paradraft.load(target, drafter=drafter, k=k, runtime=runtime) for _ in range(engines)]
    counts = [0] * engines

    def answer_until(number: int, end: float) -> None:
        torch.set_num_threads(granted)  # OpenMP has a number for each thread
        while time.perf_counter() < end:
            answers = loaded[number].generate([PROMPT] * batch_size, max_new_tokens=TOKENS, batch_size=batch_size)
            counts[number] += sum(len(answer.tokens) for answer in answers)

    answer_until(0, time.perf_counter() + 1)
    print("ready", flush=True)
    for line in sys.stdin:
        counts[:] = [0] * engines
        begun = time.perf_counter()
        others = [threading.Thread(target=answer_until, args=(n, begun + float(line))) for n in range(engines)]
        for other in others:
            other.start()
        for other in others:
            other.join()
        print(sum(counts) / (time.perf_counter() - begun), flush=True)


@contextmanager
def busy(programs: int) -> Iterator[None]:
    """As many programs that compute while the body runs."""
    running = [subprocess.Popen([sys.executable, "-c", PROGRAM]) for _ in range(programs)]
    try:
        yield
    finally:
        for program in running:
            program.kill()
            program.wait()


def measure(workers: dict[str, Worker], loads: Sequence[int], turns: int, seconds: float) -> dict[str, Any]:
    """Tokens per second of each worker, turn by turn, for each number of busy programs.

    Returns:
        By number of programs and by worker: `turns` of tokens per second, their `median` and `worst`.
    """
    found: dict[int, dict[str, list[float]]] = {load: {name: [] for name in workers} for load in loads}
    for _, load in track(list(itertools.product(range(turns), loads)), "turns"):
        with busy(load):
            for name, worker in workers.items():
                found[load][name].append(float(worker.ask(str(seconds))))
    return {
        str(load): {
            name: {"median": statistics.median(speeds), "worst": min(speeds), "turns": speeds}
            for name, speeds in by_worker.items()
        }
        for load, by_worker in found.items()
    }


def main() -> None:
    """Reads the options, measures, prints a table and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="pocket")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--drafter", default="none")
    parser.add_argument("--k", type=int, default=6)
    parser.add_argument("--batch_size", "--batch-size", type=int, default=1)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn")
    parser.add_argument("--loads", default="0,1", help="numbers of other programs, with commas")
    parser.add_argument("--against", type=Path, help="another checkout to measure beside this one")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--engines", type=int, default=1, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(given.target, given.dtype, given.drafter, given.k, given.batch_size, given.threads, given.engines)
        return
    from paradraft.bench.report.summary import write_json
    from paradraft.environment import describe_machine

    here = Path(__file__).resolve().parents[2] / "src"
    settings = {name: getattr(given, name) for name in ("target", "dtype", "drafter", "k", "batch_size")}
    workers = {
        "one thread": Worker(__file__, here, settings | {"threads": 1}),
        "all threads": Worker(__file__, here, settings | {"threads": 0}),
        "two engines": Worker(__file__, here, settings | {"threads": 0, "engines": 2}),
    }
    if given.against:
        workers["all threads, other checkout"] = Worker(__file__, given.against / "src", settings | {"threads": 0})
    loads = [int(load) for load in given.loads.split(",")]
    found = measure(workers, loads, given.turns, given.seconds)
    for worker in workers.values():
        worker.end()
    for load, by_worker in found.items():
        one = by_worker["one thread"]["median"]
        print(f"{load} other programs:")
        for name, speeds in by_worker.items():
            median, worst = speeds["median"], speeds["worst"]
            print(f"  {name:28} {median:6.0f} tokens/s, worst turn {worst:6.0f}; {median / one:.2f} of one thread")
    if given.json:
        write_json(
            given.json, {"machine": describe_machine("cpu"), **settings, "seconds": given.seconds, "loads": found}
        )


if __name__ == "__main__":
    main()
