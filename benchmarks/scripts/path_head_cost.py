"""What share of a round a head takes that draws the tokens of one pass one by one, beside drawing without it.

    python benchmarks/scripts/path_head_cost.py --target FILE --drafter dflash --drafts markov=FOLDER,selector=FOLDER \\
        --json benchmarks/FILE.json

One row decodes prompts. In every round the tokens are drawn with the head and, beside that, from the same logits
without it; the cost of a head is the difference, and the round is that of decoding with the head alone. Drafters take
turns from prompt to prompt.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sampled_answers import batches, loaded, options, write
from torch import Tensor

from paradraft.core import Draft
from paradraft.drafters import load_drafter
from paradraft.drafters.parts.one_pass import draft_of_pass
from paradraft.drafters.parts.path_heads.head import PathHead
from paradraft.engine.engine import Engine
from paradraft.engine.speculation import Speculation
from paradraft.models.runtime import Runtime
from paradraft.sampling.sampler import Sampler
from paradraft.tree import Tree


class Timed:
    """In place of a head: notes how long it takes, and how long drawing without it."""

    def __init__(self, head: PathHead) -> None:
        self.head = head
        self.with_s: list[float] = []
        self.without_s: list[float] = []

    def draft(
        self, sampler: Sampler, tree: Tree | None, logits_BKV: Tensor, states_BKD: Tensor, anchors: Sequence[int]
    ) -> Draft:
        """See `PathHead.draft`."""
        plain = logits_BKV.clone()
        start = time.perf_counter()
        draft_of_pass(sampler, tree, plain)
        middle = time.perf_counter()
        draft = self.head.draft(sampler, tree, logits_BKV, states_BKD, anchors)
        self.with_s.append(time.perf_counter() - middle)
        self.without_s.append(middle - start)
        return draft


def main() -> None:
    """Measures and writes the file."""
    parser = options(__doc__, drafter="dflash", prompts=8)
    parser.add_argument("--drafts", required=True, help="NAME=FOLDER, separated by commas")
    parser.add_argument("-k", type=int, default=6)
    args = parser.parse_args()
    args.rows = 1
    folders = dict(item.split("=", 1) for item in args.drafts.split(","))
    args.draft = next(iter(folders.values()))
    target, _, prompts = loaded(args)
    runtime = Runtime(device="cpu", capacity=1024 if args.data else None)
    speculation = Speculation(drafter=args.drafter, k=args.k, lengths="fixed")
    engines, heads = {}, {}
    for name, folder in folders.items():
        drafter: Any = load_drafter(args.drafter, target, draft=folder, runtime=runtime)
        heads[name] = drafter._path_head = Timed(drafter._path_head)
        engines[name] = Engine(target, drafter, speculation)
    found = {
        temperature: measured(engines, heads, prompts, args, float(temperature))
        for temperature in args.temperatures.split(",")
    }
    args.drafts, args.draft = list(folders), None
    write(args, {"temperatures": found}, "drafter", "drafts", "k", "prompts", "tokens")


def measured(
    engines: dict[str, Engine],
    heads: dict[str, Timed],
    prompts: list[str],
    args: argparse.Namespace,
    temperature: float,
) -> dict[str, Any]:
    """Medians over all rounds in microseconds, and the head's share of a round."""
    rounds_s: dict[str, list[float]] = defaultdict(list)
    for head in heads.values():
        head.with_s, head.without_s = [], []
    for (prompt,), (sampling,) in batches(prompts, 1, 1, {"temperature": temperature}):
        for name, engine in engines.items():
            stats = engine.generate(prompt, max_new_tokens=args.tokens, sampling=sampling).stats
            rounds_s[name].append((stats.total_s - stats.prefill_s) / stats.rounds)
    found = {}
    for name, head in heads.items():
        with_us, without_us = (1e6 * statistics.median(times) for times in (head.with_s, head.without_s))
        round_us = 1e6 * statistics.median(rounds_s[name]) - without_us
        found[name] = {
            "with_us": with_us,
            "without_us": without_us,
            "round_us": round_us,
            "share_of_round": (with_us - without_us) / round_us,
        }
        print(f"T = {temperature:g}, {name}: {found[name]}", flush=True)
    return found


if __name__ == "__main__":
    main()
