"""Times one decoding pass of the pocket target and drafts by width: what bounds the speed of a round.

python recipes/pass_times.py --json benchmarks/FILE.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from paradraft.bench.report import write_json
from paradraft.core import GREEDY, Prompt
from paradraft.machine import describe_machine
from paradraft.models.causal_lm import CausalLM
from paradraft.models.loading import POCKET, Runtime, load_draft_lm, load_target, locate

WIDTHS = (1, 2, 4, 8, 9, 16)
PROMPT_TOKENS = 160


def pass_times_ms(lm: CausalLM, repeats: int) -> dict[int, float]:
    """Median milliseconds of a pass of each width behind a prompt; widths take turns."""
    tokens = torch.randint(1, lm.vocab_size, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    lm.start(Prompt(tokens=tokens, sampling=(GREEDY,)))
    times: dict[int, list[float]] = {width: [] for width in WIDTHS}
    for repeat in range(repeats + 3):
        for width in WIDTHS:
            began_s = time.perf_counter()
            lm.forward(tokens[:, :width])
            if repeat >= 3:
                times[width].append((time.perf_counter() - began_s) * 1e3)
    return {width: statistics.median(values) for width, values in times.items()}


def main() -> None:
    """Measures target and draft in each way that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument(
        "--ways",
        nargs="+",
        default=["float32", "bfloat16", "float32:compiled", "bfloat16:compiled"],
        metavar="WAY",
        help="dtypes, with :compiled behind those to compile",
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found: dict[str, dict[int, float]] = {}
    for way in args.ways:
        dtype, _, compiled = way.partition(":")
        runtime = Runtime(dtype=dtype, compiled=bool(compiled))
        target = load_target(POCKET, runtime)
        draft = load_draft_lm(locate(POCKET, "draft"), target, runtime)
        for name, lm in (("target", target.lm), ("draft", draft)):
            found[f"{name}:{way}"] = pass_times_ms(lm, args.repeats)
            times = (f"{width}: {ms:.2f} ms" for width, ms in found[f"{name}:{way}"].items())
            print(f"{name}:{way}".ljust(26), *times, sep="  ", flush=True)
    write_json(args.json, {"machine": describe_machine("cpu"), "pass_ms_by_width": found})


if __name__ == "__main__":
    main()
