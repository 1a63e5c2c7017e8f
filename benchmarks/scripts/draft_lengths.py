"""Tokens per pass of several drafters on the same prompts, as chains and as trees of several sizes.

    python benchmarks/scripts/draft_lengths.py --target FILE --drafter dflash --drafts none=FOLDER,selector=FOLDER \\
        --data humaneval=FILE --data gsm8k=FILE --nodes 0,8,16,32 --json benchmarks/FILE.json

Every round drafts K tokens (0 nodes) or a tree of as many nodes. By default all drafters give the same text; another
rule (`--verify`) samples each drafter's, so that a pair shares the prompt alone. Prompts are compared in pairs: a
standard error is that of the mean of the prompts' lengths, or of their differences from the first drafter's with as
many nodes.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from sampled_answers import batches, loaded, options, standard_error, write

from paradraft.drafters import load_drafter
from paradraft.engine.answers import Result
from paradraft.engine.engine import Engine
from paradraft.engine.speculation import Speculation
from paradraft.models.runtime import Runtime
from paradraft.tree import Tree


def answered(engine: Engine, prompts: list[str], args: argparse.Namespace, temperature: float) -> list[Result]:
    """The answers to all prompts, each with its own seed."""
    answers: list[Result] = []
    for some, samplings in batches(prompts, 1, args.rows, {"temperature": temperature}):
        answers += engine.generate(some, max_new_tokens=args.tokens, sampling=samplings)
    return answers


def figures_of(lengths: list[float], of_first: list[float]) -> dict[str, float]:
    """Means of the prompts' lengths."""
    gains = [mine - other for mine, other in zip(lengths, of_first, strict=True)]
    return {
        "tokens_per_pass": statistics.mean(lengths),
        "standard_error": standard_error(lengths),
        "gain": statistics.mean(gains),
        "gain_standard_error": standard_error(gains),
    }


def main() -> None:
    """Measures and writes the file."""
    parser = options(__doc__, drafter="dflash", prompts=48)
    parser.add_argument("--drafts", required=True, help="NAME=FOLDER, separated by commas")
    parser.add_argument("-k", type=int, default=6)
    parser.add_argument("--nodes", default="0")
    parser.add_argument("--verify", default="match", help="the rule of verification")
    args = parser.parse_args()
    folders = dict(item.split("=", 1) for item in args.drafts.split(","))
    args.draft = next(iter(folders.values()))
    args.width = max(32, *map(int, args.nodes.split(","))) + args.k + 1  # 32: for shapes that drafters set
    target, _, prompts = loaded(args)
    runtime = Runtime(device="cpu", capacity=1024 if args.data else None)
    drafters = {
        name: load_drafter(args.drafter, target, draft=folder, runtime=runtime) for name, folder in folders.items()
    }
    found: dict[str, Any] = {}
    for temperature in args.temperatures.split(","):
        texts, found[temperature] = None, {}
        for nodes in args.nodes.split(","):
            tree = Tree(budget=int(nodes)) if int(nodes) else None
            speculation = Speculation(drafter=args.drafter, k=args.k, tree=tree, verify=args.verify, lengths="fixed")
            of_first, found[temperature][nodes] = None, {}
            for name, drafter in drafters.items():
                answers = answered(Engine(target, drafter, speculation), prompts, args, float(temperature))
                texts = texts or [answer.tokens for answer in answers]
                is_same = args.verify == "match" or not float(temperature)
                assert not is_same or [answer.tokens for answer in answers] == texts, "another text"
                lengths = [answer.stats.acceptance_length for answer in answers]
                of_first = of_first or lengths
                found[temperature][nodes][name] = figures = figures_of(lengths, of_first)
                print(f"T = {temperature}, {nodes} nodes, {name}: {figures}", flush=True)
    args.drafts, args.draft = list(folders), None
    write(args, {"temperatures": found}, "drafter", "drafts", "k", "verify", "prompts", "tokens", "rows")


if __name__ == "__main__":
    main()
