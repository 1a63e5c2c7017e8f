"""Latencies as servers report them: TTFT, TPOT and ITL, as `vllm bench serve` defines them.

An answer arrives in chunks, the tokens of a round each. For an answer with n tokens whose chunks arrive t_1, …, t_r
seconds after the request:

- TTFT, time to first token: t_1.
- TPOT, time per output token after the first: (t_r - TTFT) / (n - 1), for answers of at least two tokens.
- ITL, inter-token latency: t_2 - t_1, t_3 - t_2, …: between chunks, however many tokens each has.

All requests of a batch start at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from paradraft.bench.result import BatchResult

LATENCIES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL"}
"""Labels by the keys of result files."""
TERMS = (
    "TTFT: time to first token · TPOT: time per output token after the first, (latency - TTFT) / (tokens - 1) of each "
    "answer · ITL: inter-token latency, between the rounds that deliver tokens, several at once if drafted · p50, p99: "
    "percentiles; as in vllm bench serve"
)
"""Their definitions, for reports."""
Spread = dict[str, float]
"""`p50`, `p99` and `count`."""


def latencies(answers: Iterable[BatchResult]) -> dict[str, Spread | None]:
    """The latencies of a method over all runs, in milliseconds, by the keys of `LATENCIES`.

    None where there are no values, or the method does not report when tokens came.
    """
    first, per_token, between = list[float](), list[float](), list[float]()
    for answer in answers:
        for tokens, chunks_s in zip(answer.tokens, answer.delivered_s or (), strict=answer.delivered_s is not None):
            if not chunks_s:
                continue
            first.append(chunks_s[0])
            if len(tokens) > 1:
                per_token.append((chunks_s[-1] - chunks_s[0]) / (len(tokens) - 1))
            between += [later - earlier for earlier, later in pairwise(chunks_s)]
    return {key: _spread(values) for key, values in zip(LATENCIES, (first, per_token, between), strict=True)}


def _spread(values_s: Sequence[float]) -> Spread | None:
    if not values_s:
        return None
    p50, p99 = (1e3 * float(value) for value in np.percentile(values_s, (50, 99)))
    return {"p50": p50, "p99": p99, "count": len(values_s)}


def have_latencies(summary: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether any method of a summary has latencies; files of earlier versions do not."""
    return any(figures.get(key) for figures in summary.values() for key in LATENCIES)


def milliseconds(value: float) -> str:
    """A value for tables, with three digits or all those before the point.

    >>> [milliseconds(value) for value in (0.98765, 12.3456, 1234.56)]
    ['0.99', '12.3', '1235']
    """
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"
