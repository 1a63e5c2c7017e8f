"""Speedups, and the runs of AR+ that they are against.

The baseline of a method is the AR+ (decoding without a drafter) of the same dtype and batch size in the same run: the
ratio says what the drafter gains. Where a run has AR+ in several dtypes, a second ratio is against the fastest of them,
for a reader who only wants the fastest way to decode.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paradraft.bench.methods import AR
from paradraft.bench.peers import HF
from paradraft.models.runtime import QUANTIZED

KEYS = ("speedup_vs_hf", "speedup_vs_ar", "speedup_vs_fastest_ar", "baseline", "fastest_baseline")


def speedups(methods: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The speedups of each method of a run, by its spec.

    Args:
        methods: by spec the figures of each, of which `method`, `dtype`, `batch` and `tokens_per_s` are read.

    Returns:
        By spec:

        - `speedup_vs_hf`: against the fastest `hf` of the same batch size, or of any if there is none.
        - `speedup_vs_ar`: against `baseline`, the AR+ of the same dtype and batch size.
        - `speedup_vs_fastest_ar`: against `fastest_baseline`, the fastest AR+ of the same batch size with whole
          weights. Rounded weights (int8, int4) are another target, whose AR+ is the baseline of its own dtype alone; it
          stands in where the run has no AR+ with whole weights.

        `baseline` and `fastest_baseline` are specs. What has no AR+ to be compared with is None.
    """

    def fastest(specs: list[str]) -> str | None:
        return max(specs, key=lambda spec: _speed(methods[spec]), default=None)

    def ratio(spec: str, baseline: str | None) -> float | None:
        return None if baseline is None else _speed(methods[spec]) / _speed(methods[baseline])

    found = {}
    for spec, one in methods.items():
        hf = [other for other, figures in methods.items() if figures["method"] == HF]
        ar = [other for other, figures in methods.items() if figures["method"] == AR and _batch(figures) == _batch(one)]
        own = fastest([other for other in ar if methods[other]["dtype"] == one["dtype"]])
        best = fastest([other for other in ar if methods[other]["dtype"] not in QUANTIZED]) or own
        peer = fastest([other for other in hf if _batch(methods[other]) == _batch(one)]) or fastest(hf)
        values = (ratio(spec, peer), ratio(spec, own), ratio(spec, best), own, best)
        found[spec] = dict(zip(KEYS, values, strict=True))
    return found


def _speed(figures: Mapping[str, Any]) -> float:
    return float(figures["tokens_per_s"]["median"])


def _batch(figures: Mapping[str, Any]) -> int:
    return int(figures.get("batch") or 1)  # the first files have no batch sizes


def without_baseline(methods: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Which methods have no `speedup_vs_ar`, by what the run lacks.

    >>> pard = {"method": "pard", "dtype": "bfloat16", "batch": 4, "baseline": None}
    >>> without_baseline({"pard:k=4:dtype=bfloat16:batch=4": pard})
    {'AR+ in bfloat16 and batches of 4': ['pard:k=4:dtype=bfloat16:batch=4']}
    """
    found: dict[str, list[str]] = {}
    for spec, one in methods.items():
        if one["baseline"] is None:
            batch = _batch(one)
            lacking = f"AR+ in {one['dtype']}" + (f" and batches of {batch}" if batch > 1 else "")
            found.setdefault(lacking, []).append(spec)
    return found


def has_faster_baselines(methods: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a method's two speedups differ: the run has an AR+ that is faster than that of its own dtype."""
    return any(one["baseline"] != one["fastest_baseline"] for one in methods.values())


def mark(spec: str, methods: Mapping[str, Mapping[str, Any]]) -> str:
    """How a table marks a baseline: `*` that of a dtype, `**` also the fastest with whole weights, else nothing.

    >>> f32 = {"baseline": "ar", "fastest_baseline": "ar:dtype=bfloat16"}
    >>> bf16 = {"baseline": "ar:dtype=bfloat16", "fastest_baseline": "ar:dtype=bfloat16"}
    >>> run = {"ar": f32, "ar:dtype=bfloat16": bf16, "pard": f32}
    >>> [mark(spec, run) for spec in run]
    ['*', '**', '']
    """
    if methods[spec]["baseline"] != spec:
        return ""
    return "**" if has_faster_baselines(methods) and methods[spec]["fastest_baseline"] == spec else "*"
