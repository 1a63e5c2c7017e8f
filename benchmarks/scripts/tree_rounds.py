"""What a round with a token tree costs beside a round with a chain of as many tokens, and where its time goes.

    python benchmarks/scripts/tree_rounds.py --json FILE.json

For N nodes three kinds of rounds take turns on the same prompts: a chain of N tokens, a tree of N nodes over the
positions that users draft (`-k`), and a tree of N nodes over N positions, whose draft pass is the chain's. All are
rounds of real decoding, by one target and one drafter. A turn is one prompt (or batch of prompts) of which each kind
decodes the same number of rounds; the ratios are those of one turn's medians, and their median is reported.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

from rich.progress import track

from paradraft.bench.report.summary import write_json
from paradraft.bench.synthetic import rounds as rounds_of
from paradraft.data.prompts import read_prompts
from paradraft.drafters import load_drafter
from paradraft.engine.engine import Engine
from paradraft.engine.speculation import Speculation
from paradraft.environment import describe_machine
from paradraft.models.forward.cpu.threads import one_torch_thread
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import Sampling
from paradraft.sources.loading import locate
from paradraft.sources.target_loading import load_target
from paradraft.tree import Tree

SETTINGS = {
    "match, greedy": ("match", 0.0),
    "match, T = 0.8": ("match", 0.8),
    "rejection, T = 0.8": ("rejection", 0.8),
}
"""By name, a verification rule and a temperature."""
PARTS = ("draft", "verify", "other")
SKIPPED = 2
"""First rounds of an answer: in them the drafter reads the prompt, and memory is allocated."""


def round_times_ms(
    engine: Engine, prompts: list[str], temperature: float, *, rounds: int, seed: int
) -> list[dict[str, float]]:
    """Milliseconds of the parts of some rounds of one answer (or batch of answers), by part."""
    tokenizer, lm = engine.target.tokenizer, engine.target.lm
    longest = max(len(tokenizer(prompt)["input_ids"]) for prompt in prompts)
    samplings = [Sampling(temperature=temperature, seed=seed + row) for row in range(len(prompts))]
    batch, times = engine.new_batch(), []
    steps = rounds_of(batch, prompts, lm.capacity - longest - 1, samplings)
    with one_torch_thread() if lm.is_native else nullcontext():  # as `Engine.generate` does
        before = batch.clock.stats
        for _ in islice(steps, SKIPPED + rounds):
            after = batch.clock.stats
            times.append({part: 1e3 * (getattr(after, f"{part}_s") - getattr(before, f"{part}_s")) for part in PARTS})
            before = after
    return times[SKIPPED:]


def medians_ms(times: list[dict[str, float]]) -> dict[str, float]:
    """The median of each part and of whole rounds."""
    parts = {part: statistics.median(time[part] for time in times) for part in PARTS}
    return parts | {"round": statistics.median(sum(time.values()) for time in times)}


def compare(
    kinds: dict[str, Engine], prompts: list[str], temperature: float, args: argparse.Namespace
) -> dict[str, Any]:
    """Times all kinds of rounds in turns.

    Returns:
        By kind `ms`, the medians of each part of its rounds, and `ratio`, how long a round takes relative to the
        first kind's; of this the quartiles over all turns.
    """
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    batch = len(prompts) // args.turns
    for turn in range(args.turns):
        some = prompts[turn * batch : (turn + 1) * batch]
        for kind in [*kinds][turn % len(kinds) :] + [*kinds][: turn % len(kinds)]:
            times = round_times_ms(kinds[kind], some, temperature, rounds=args.rounds, seed=turn * batch)
            found[kind].append(medians_ms(times))
    result: dict[str, Any] = {}
    first = found[next(iter(kinds))]
    for kind, turns in found.items():
        ratios = [turn["round"] / reference["round"] for turn, reference in zip(turns, first, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        result[kind] = {
            "ms": {part: statistics.median(turn[part] for turn in turns) for part in (*PARTS, "round")},
            "ratio": {"median": middle, "quartiles": [low, high], "turns": ratios},
        }
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="pocket")
    parser.add_argument("--drafter", default="pard")
    parser.add_argument("--draft", help="the draft model; the pocket target brings its own")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=Path, help='JSONL file with one {"prompt": ...} per line; the family\'s own')
    parser.add_argument("-k", type=int, default=8, help="positions that a user's tree is drafted over")
    parser.add_argument("--nodes", type=int, nargs="+", default=[12, 32, 64])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--settings", nargs="+", choices=[*SETTINGS], default=[*SETTINGS])
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--rounds", type=int, default=12, help="of an answer that are timed")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    if args.turns < 2 or args.rounds < 1 or min(args.nodes) < 1 or min(args.batches) < 1 or args.k < 1:
        parser.error("ask for two turns or more, and for at least one round, node, row and position")
    runtime = Runtime(device=args.device, dtype=args.dtype, width=max(*args.nodes, args.k) + 16)
    target = load_target(args.target, runtime)
    drafter = load_drafter(args.drafter, target, draft=args.draft, runtime=runtime)
    file = args.prompts or Path(locate("pocket", "target")).parent / "prompts.jsonl"
    known = [record["prompt"] for record in read_prompts(file)]
    results: list[dict[str, Any]] = []
    cases = list(itertools.product(args.settings, args.batches, args.nodes))
    for setting, batch, nodes in track(cases, "rounds"):
        rule, temperature = SETTINGS[setting]
        prompts = list(islice(itertools.cycle(known), batch * args.turns))
        tree = Tree(budget=nodes)
        kinds = {
            "chain": Engine(target, drafter, Speculation(k=nodes, verify=rule)),
            f"tree, k = {args.k}": Engine(target, drafter, Speculation(k=args.k, verify=rule, tree=tree)),
            "tree, k = N": Engine(target, drafter, Speculation(k=nodes, verify=rule, tree=tree)),
        }
        found = compare(kinds, prompts, temperature, args)
        results.append({"setting": setting, "batch": batch, "nodes": nodes, "kinds": found})
        print(f"{setting}, batch {batch}, {nodes} nodes:")
        for kind, figures in found.items():
            parts = ", ".join(f"{part} {figures['ms'][part]:6.2f}" for part in (*PARTS, "round"))
            print(f"  {kind:12} {parts} ms; {figures['ratio']['median']:.2f} of the chain's", flush=True)
    if args.json:
        named = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
        named.pop("json")
        write_json(args.json, {"machine": describe_machine(args.device), "arguments": named, "results": results})


if __name__ == "__main__":
    main()
