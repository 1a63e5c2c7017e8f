"""What choosing tokens costs: filters and noise of nine positions, by the size of the vocabulary.

    python benchmarks/scripts/sampling_cost.py --json FILE.json

"whole" sorts and draws noise for the whole vocabulary, "cut" is what the library does. They take turns. Logits fall
like Zipf's law with noise on it, so that a nucleus has some ten tokens, as those of language models have.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from paradraft.bench.summary import write_json
from paradraft.environment import describe_machine
from paradraft.sampling import distribution, noise
from paradraft.sampling_params import Sampling

SETTINGS = {
    "temperature": Sampling(temperature=0.8),
    "top-p": Sampling(temperature=0.8, top_p=0.95),
    "top-k, top-p": Sampling(temperature=0.7, top_k=20, top_p=0.8),
}
WAYS = {"whole": (2**31, 0.0), "cut": (distribution.LIKELIEST, noise.SPARSE)}
"""How many tokens are sorted at most, and up to which share noise is drawn one by one."""
POSITIONS = 9


def logits_like_text(vocab_size: int, device: str) -> torch.Tensor:
    """`[1, POSITIONS, V]`."""
    generator = torch.Generator().manual_seed(0)
    ranks = torch.stack([torch.randperm(vocab_size, generator=generator) + 1.0 for _ in range(POSITIONS)])
    return (torch.randn(ranks.shape, generator=generator) - 2.2 * ranks.log())[None].to(device)


def seconds(logits: torch.Tensor, setting: Sampling, way: str, seed: int) -> float:
    """How long one choice of tokens takes; with a seed that was not used before, or noise would be there already."""
    distribution.LIKELIEST, noise.SPARSE = WAYS[way]
    positions = torch.arange(POSITIONS, device=logits.device)[None]
    if logits.device.type == "cuda":
        torch.cuda.synchronize(logits.device)
    began_s = time.perf_counter()
    noise.with_noise(distribution.filtered_logits(logits, setting), seed, positions).argmax(-1).tolist()
    return time.perf_counter() - began_s


def main() -> None:
    """Measures and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-sizes", type=int, nargs="+", default=[4096, 32000, 151936])
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found: dict[str, dict[str, Any]] = {}
    seeds = itertools.count()
    for vocab_size in args.vocab_sizes:
        logits = logits_like_text(vocab_size, args.device)
        for name, setting in SETTINGS.items():
            runs: dict[str, list[float]] = {way: [] for way in WAYS}
            for _ in range(args.runs + 1):
                for way in WAYS:
                    runs[way].append(seconds(logits, setting, way, next(seeds)))
            medians = {way: statistics.median(each[1:]) for way, each in runs.items()}
            found.setdefault(str(vocab_size), {})[name] = {"median_s": medians, "runs_s": runs}
            text = ", ".join(f"{way} {median * 1e3:.2f} ms" for way, median in medians.items())
            print(f"{vocab_size} tokens, {name}: {text}", flush=True)
    if args.json:
        arguments = {key: value for key, value in vars(args).items() if key != "json"}
        write_json(args.json, {"machine": describe_machine(args.device), "arguments": arguments, "vocabularies": found})


if __name__ == "__main__":
    main()
