"""Which share of the memory floor plain decoding reaches on a machine whose memory is now fast and now slow.

    python benchmarks/scripts/floor_in_turns.py --json FILE.json

`paradraft bench` holds a method against the best bandwidth that it has seen, which on a shared machine may be that of
another minute. Here bandwidth is measured before and after every few rounds of AR+, and each share is of the mean of
the two: reading the weights and the cache at that speed takes that share of the rounds' time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rich.progress import track

from paradraft.bench.hardware.bandwidth import Speeds
from paradraft.bench.hardware.roofline import Size
from paradraft.bench.report.summary import write_json
from paradraft.bench.setup import random_prompts
from paradraft.bench.synthetic import rounds as rounds_of
from paradraft.drafters.none import NoDrafter
from paradraft.engine.engine import Engine
from paradraft.engine.speculation import Speculation
from paradraft.environment import describe_machine
from paradraft.models.runtime import PRECISIONS, Runtime
from paradraft.sampling_params import GREEDY
from paradraft.sources.target_loading import load_target


def shares(target: str, dtype: str, *, turns: int, rounds: int, prompt_tokens: int) -> dict[str, Any]:
    """Measures one dtype.

    Args:
        target: a shape.
        dtype: of its weights.
        turns: how often bandwidth and rounds are measured.
        rounds: of AR+, in each turn.
        prompt_tokens: tokens before the first round.

    Returns:
        `shares` of the turns, `share` their median, `bytes_per_s` and `tokens_per_s` of each, `weight_bytes`.
    """
    # The first round reads the prompt.
    new_tokens = turns * rounds + 1
    runtime = Runtime(dtype=dtype, capacity=prompt_tokens + new_tokens)
    engine = Engine(load_target(target, runtime), NoDrafter(), Speculation(k=1))
    lm = engine.target.lm
    size = Size.of(lm.model, lm.weight_bytes)
    speeds = Speeds(lm.device, {size.weight_bytes}, {size.dtype})
    speeds.measure()
    prompts = random_prompts(target, 1, prompt_tokens)
    steps = rounds_of(engine.new_batch(), prompts, new_tokens, [GREEDY])
    next(steps)
    found: dict[str, list[float]] = {"shares": [], "bytes_per_s": [], "tokens_per_s": []}
    for _ in track(range(turns), dtype):
        before = lm.passes.copy()
        bandwidths = [speeds.bytes_per_s_now(size.weight_bytes)]
        began_s = time.perf_counter()
        if len(list(islice(steps, rounds))) < rounds:
            raise ValueError(f"{target} has ended its answer: ask for fewer turns")
        seconds = time.perf_counter() - began_s
        bandwidths.append(speeds.bytes_per_s_now(size.weight_bytes))
        read = sum(number * size.cost(one, speeds).bytes for one, number in (lm.passes - before).items())
        found["shares"].append(read / statistics.mean(bandwidths) / seconds)
        found["bytes_per_s"].append(statistics.mean(bandwidths))
        found["tokens_per_s"].append(rounds / seconds)
    return {"share": statistics.median(found["shares"]), "weight_bytes": size.weight_bytes} | found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="shape:smollm2-135m", help="a shape that no cache holds")
    parser.add_argument("--dtypes", nargs="+", choices=PRECISIONS, default=["float32", "bfloat16", "int8"])
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    if args.turns < 2 or args.rounds < 1 or args.prompt_tokens < 1:
        parser.error("ask for two turns or more, of a round or more, behind a token or more")
    results: dict[str, Any] = {}
    for dtype in dict.fromkeys(args.dtypes):
        try:
            found = shares(args.target, dtype, turns=args.turns, rounds=args.rounds, prompt_tokens=args.prompt_tokens)
        except ValueError as error:
            raise SystemExit(f"floor_in_turns: {error}") from None
        low, _, high = statistics.quantiles(found["shares"], n=4)
        slowest, fastest = (end(found["bytes_per_s"]) / 1e9 for end in (min, max))
        print(
            f"{dtype}: {found['share']:.0%} of the floor (half of all turns {low:.0%} to {high:.0%}), "
            f"{statistics.median(found['tokens_per_s']):.0f} tokens/s at {slowest:.0f} to {fastest:.0f} GB/s"
        )
        results[dtype] = found
    if args.json:
        named = {key: value for key, value in vars(args).items() if key != "json"}
        write_json(args.json, {"machine": describe_machine("cpu"), "arguments": named, "results": results})


if __name__ == "__main__":
    main()
