"""Trims a draft model to several sizes, and measures each in and out of the domain whose answers were counted.

python benchmarks/scripts/trim_sizes.py --target TARGET --draft DRAFT --counts ANSWERS.jsonl --json FILE.json \
    --prompts humaneval.jsonl benchmarks/prompts/languages.jsonl

All sizes and plain decoding take turns on every prompt, greedily. Coverage is of the target's answers to these prompts:
the share of their tokens that have a row. A draft pass reads the whole draft with the head that is left.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from paradraft.bench.report.summary import table, write_json
from paradraft.bench.run import run_benchmark
from paradraft.bench.setup import ChatFormat, Workload, prompts_for
from paradraft.bench.spec import Benchmark, Method
from paradraft.engine.loader import load
from paradraft.engine.speculation import Speculation
from paradraft.files import check_outputs
from paradraft.formats.vocab_map import VocabMap
from paradraft.models.runtime import STORED, Runtime
from paradraft.sampling_params import GREEDY
from paradraft.train.init.trim import Untrimmed, count, write_trimmed


def trimmed(args: argparse.Namespace, folder: Path) -> dict[int, VocabMap]:
    """The maps of the sizes, whose drafts are written into the folder unless they are there."""
    draft = Untrimmed.find(args.draft)
    counted = count(draft, args.counts).counted
    maps = {size: VocabMap.of_counts(counted, size=size, always=draft.always) for size in args.sizes}
    for size, rows in maps.items():
        if not (folder / str(size)).exists():
            write_trimmed(draft, rows, folder / str(size))
    return maps


def coverages(args: argparse.Namespace, texts: list[str], maps: dict[int, VocabMap]) -> dict[int, float]:
    """The share of the answers' tokens that have a row, by size."""
    engine = load(args.target, drafter="none")
    answers = engine.generate(texts, max_new_tokens=args.tokens)
    tokens = torch.tensor([token for answer in answers for token in answer.tokens])
    return {size: (rows.rows_of(tokens) >= 0).float().mean().item() for size, rows in maps.items()}


def measured(args: argparse.Namespace, file: Path, folder: Path, maps: dict[int, VocabMap]) -> dict[str, Any]:
    """The figures of all sizes for the prompts of a file."""
    texts = prompts_for(args.target, args.num_prompts, tokens=0, file=file, chat=ChatFormat())
    work = Workload.of(texts, args.tokens, file.name)
    names = {size: f"autoregressive:k={args.k}:draft={folder / str(size)}" for size in maps}
    whole = f"autoregressive:k={args.k}:draft={args.draft}"
    benchmark = Benchmark(
        target=args.target,
        methods=[Method.parse(spec, Speculation(), dtype=STORED) for spec in ["ar", whole, *names.values()]],
        sampling=GREEDY,
        runs=args.runs,
        runtime=Runtime(device="cpu", draft_dtype=args.draft_dtype),
    )
    console = Console(highlight=False)
    (found,) = run_benchmark(benchmark, [work], console.print)
    console.print(table(found["methods"], file.name))
    covered = coverages(args, texts, maps)
    rows = {"all": (whole, 1.0)} | {str(size): (name, covered[size]) for size, name in names.items()}
    sizes = {}
    for size, (name, share) in rows.items():
        figures = found["methods"][name]
        passes = figures["floor_of"]["draft"]["passes"]
        sizes[size] = {
            "coverage": share,
            "acceptance_length": figures["acceptance_length"],
            "draft_pass_ms": 1000 * figures["draft_s"] / passes,
            "speedup_vs_ar": figures["speedup_vs_ar"],
        }
        console.print(f"{size:>8}  " + "  ".join(f"{key} {value:.3f}" for key, value in sizes[size].items()))
    return found | {"sizes": sizes}


def main() -> None:
    """Trims, measures and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True, help="a folder")
    parser.add_argument("--counts", type=Path, nargs="+", required=True)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8192, 16384, 32768, 65536])
    parser.add_argument("--draft-dtype", default="int8")
    parser.add_argument("-k", type=int, default=4)
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("build/trimmed"), help="of the drafts")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    try:
        check_outputs(args.json)
        maps = trimmed(args, args.folder)
        results = {file.name: measured(args, file, args.folder, maps) for file in args.prompts}
    except ValueError as error:
        raise SystemExit(f"trim_sizes: {error}") from None
    write_json(args.json, results)


if __name__ == "__main__":
    main()
