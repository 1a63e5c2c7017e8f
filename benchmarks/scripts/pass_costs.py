"""Cost of a pass over several tokens, chains and trees, in several dtypes, which take turns.

python benchmarks/scripts/pass_costs.py --target shape:smollm2-360m --json FILE.json

The first token of a pass is the last committed one, the others are drafted. In a tree every node has two children.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from paradraft.bench.report.summary import write_json
from paradraft.environment import describe_machine
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward.cpu.build import kernel_names
from paradraft.models.runtime import Runtime
from paradraft.sources.target_loading import load_target

CONTEXT, PASSES = 128, 3
"""Tokens that a row has before a pass, and passes of a turn."""


def ready(target: str, dtype: str) -> CausalLM:
    """A model that has read a prompt."""
    lm = load_target(target, Runtime(device="cpu", dtype=dtype)).lm
    lm.start()
    lm.cache.join(1)
    lm.prefill([list(range(1, CONTEXT + 2))])
    return lm


def turn_ms(lm: CausalLM, size: str) -> float:
    """The time of a pass in milliseconds; `size` is its number of tokens, and " tree" after that of a tree."""
    count, _, shape = size.partition(" ")
    tokens_1N = torch.arange(1, int(count) + 1)[None]
    parents_1N = (tokens_1N - 2).div(2, rounding_mode="floor") if shape else None
    begun_s = time.perf_counter()
    for _ in range(PASSES):
        lm.forward(tokens_1N, parents_1N)
    return (time.perf_counter() - begun_s) / PASSES * 1000


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="shape:smollm2-360m")
    parser.add_argument("--dtypes", default="bfloat16,int8,int4")
    parser.add_argument("--tokens", default="1,5,9,16")
    parser.add_argument("--trees", action="store_true", help="trees of three tokens or more, too")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    lms = {dtype: ready(given.target, dtype) for dtype in given.dtypes.split(",")}
    sizes = given.tokens.split(",")
    if given.trees:
        sizes = [size + shape for size in sizes for shape in ("", " tree")[: 1 + (int(size) > 2)]]
    turns = [
        {dtype: {size: turn_ms(lm, size) for size in sizes} for dtype, lm in lms.items()}
        for _ in range(given.turns + 1)
    ][1:]  # the first one warms up
    median = {dtype: {size: statistics.median(turn[dtype][size] for turn in turns) for size in sizes} for dtype in lms}
    for dtype, times in median.items():
        print(dtype, *(f"{size}: {ms:.2f} ms ({ms / times[sizes[0]]:.2f})" for size, ms in times.items()))
    if given.json:
        machine = describe_machine("cpu") | {"kernels": kernel_names()}
        write_json(given.json, {"target": given.target, "median_ms": median, "turns_ms": turns, "machine": machine})


if __name__ == "__main__":
    main()
