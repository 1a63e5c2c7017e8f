"""What one GPU makes of PARD: AR+ on the Llama-3.1-8B shape, PARD with the 1B shape, at the paper's HumanEval rates.

    python benchmarks/scripts/shapes_on_gpu.py --json benchmarks/FILE.json
    python benchmarks/scripts/shapes_on_gpu.py --json build/try.json --target shape:tiny-target \
        --draft shape:tiny-draft --device cpu --dtype float32 --no-compile --batch-sizes 1 2 --prompts 2 --tokens 24

Weights are random and verdicts are drawn (`--synthetic-acceptance`), so it shows costs, not texts. The paper (An et al.
2025, K = 12, one A100-40GB) prints no rates by position. Two lists are derived from what it prints, see `RATES`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from paradraft.bench.report.summary import marked, table, write_json
from paradraft.bench.run import run_benchmark
from paradraft.bench.setup import Workload, random_prompts
from paradraft.bench.spec import Benchmark, Method
from paradraft.bench.synthetic import SyntheticAcceptance
from paradraft.engine.speculation import Speculation
from paradraft.files import check_outputs
from paradraft.models.runtime import PRECISIONS, Runtime
from paradraft.sampling_params import GREEDY

AR_PER_S, DRAFT_AR_PER_S, PARD_PER_S = 76.4, 314.4, 311.5
"""HumanEval, tokens per second: AR+ of Llama-3.1-8B and PARD on it (Table 1), AR+ of Llama-3.2-1B (Table 2)."""
ONE_ALPHA, FOUR_ALPHA = 0.90, 0.88
"""HumanEval, PARD on Llama-3-8B: average acceptance rates with drafts of one and of four tokens (Table 5)."""
GOAL = PARD_PER_S / AR_PER_S
FLOOR_GOAL = 0.85


def falling(first: float, ratio: float, k: int) -> tuple[float, ...]:
    """Rates by position when each token behind an accepted one is accepted with the same chance.

    >>> falling(0.9, 0.5, 3)
    (0.9, 0.45, 0.225)
    """
    return tuple(first * ratio**place for place in range(k))


def from_speed(k: int) -> tuple[float, ...]:
    """The rates behind the paper's speed, if a round takes no longer than AR+ takes for a token of both models.

    That is 1 / 76.4 + 1 / 314.4 s, so 311.5 tokens/s need 5.07 tokens per target pass. The first rate is
    the paper's 0.90; the ratio of the later ones is what makes the sum right for 12 tokens.

    >>> [round(rate, 2) for rate in from_speed(12)]
    [0.9, 0.71, 0.56, 0.45, 0.35, 0.28, 0.22, 0.18, 0.14, 0.11, 0.09, 0.07]
    """
    length = PARD_PER_S * (1 / AR_PER_S + 1 / DRAFT_AR_PER_S)
    low, high = 0.0, 1.0
    for _ in range(60):
        ratio = (low + high) / 2
        low, high = (ratio, high) if 1 + sum(falling(ONE_ALPHA, ratio, 12)) < length else (low, ratio)
    return falling(ONE_ALPHA, low, k)


def from_table(k: int) -> tuple[float, ...]:
    """The rates of Table 5, read as the mean chance of a token behind accepted ones, the later ones all alike.

    The first is 0.90 and the mean of four is 0.88, so the others are 0.873. The paper says nothing of
    positions behind the fourth: 6.7 tokens per target pass with K = 12 is more than its speed needs.

    >>> [round(rate, 2) for rate in from_table(12)]
    [0.9, 0.79, 0.69, 0.6, 0.52, 0.46, 0.4, 0.35, 0.3, 0.27, 0.23, 0.2]
    """
    return falling(ONE_ALPHA, (4 * FOUR_ALPHA - ONE_ALPHA) / 3, k)


RATES = {"speed": from_speed, "table": from_table}


def measure(args: argparse.Namespace, acceptance: SyntheticAcceptance, console: Console) -> dict[str, Any]:
    """All batch sizes in one run, AR+ and PARD in turns."""
    specs = [f"{name}:batch={size}" for size in args.batch_sizes for name in ("ar", f"pard:k={args.k}")]
    capacity = args.prompt_tokens + args.tokens
    benchmark = Benchmark(
        target=args.target,
        methods=[Method.parse(spec, Speculation(draft=args.draft), dtype=args.dtype) for spec in specs],
        sampling=GREEDY,
        runtime=Runtime(
            device=args.device,
            dtype=args.dtype,
            compiled=args.compile,
            capacity=capacity,
            cuda_graphs=args.cuda_graphs,
        ),
        runs=args.runs,
        acceptance=acceptance,
        profiled=args.profile,
    )
    prompts = random_prompts(args.target, args.prompts, args.prompt_tokens)
    (found,) = run_benchmark(benchmark, [Workload.of(prompts, args.tokens)], console.print)
    return found


def verdict(name: str, methods: dict[str, dict[str, Any]]) -> str:
    """The figures of the first batch size against the goals, in a sentence."""
    ar, pard = (next(one for one in methods.values() if one["method"] == kind) for kind in ("ar", "pard"))
    peaks = ((one["peak_gpu_bytes"] or one["peak_rss_bytes"]) / 2**30 for one in (ar, pard))
    return (
        f"{name}: AR+ reaches {ar['decode_share_of_floor']:.0%} of the floor without prefill (goal {FLOOR_GOAL:.0%}); "
        f"PARD is {pard['speedup_vs_ar']:.2f} times as fast (goal {GOAL:.2f}) at {pard['acceptance_length']:.2f} "
        f"tokens a pass; batches of {ar['batch']}. Before that the first answers took {ar['warm_up_s']:.0f} and "
        f"{pard['warm_up_s']:.0f} s. Peak memory: " + " and ".join(f"{peak:.1f} GiB" for peak in peaks)
    )


def main(arguments: list[str] | None = None) -> None:
    """Measures with each list of rates and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--target", default="shape:llama-3.1-8b")
    parser.add_argument("--draft", default="shape:llama-3.2-1b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=PRECISIONS, default="bfloat16")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--cuda-graphs", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("-k", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256, help="new tokens of each answer")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--profile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--rates", choices=RATES, nargs="+", default=list(RATES))
    args = parser.parse_args(arguments)
    console = Console(highlight=False)
    found: dict[str, dict[str, Any]] = {}
    try:
        check_outputs(args.json)
        for name in args.rates:
            acceptance = SyntheticAcceptance(rates=RATES[name](args.k))
            report = measure(args, acceptance, console)
            title = f"{args.target} with {args.draft}, {args.dtype}, rates from the paper's {name}"
            title = marked(title, report["arguments"])
            found[name] = {"title": title} | report
            console.print(table(report["methods"], title))
            write_json(args.json, {"title": "SYNTHETIC ACCEPTANCE", "rates": found})
    except ValueError as error:
        raise SystemExit(f"shapes_on_gpu: {error}") from None
    for name, report in found.items():
        console.print(verdict(name, report["methods"]))


if __name__ == "__main__":
    main()
