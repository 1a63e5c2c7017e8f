"""Reads the files that `paradraft bench --json` writes, those of earlier versions too, and computes speedups.

The baseline of a method is the AR+ (decoding without a drafter) of the same dtype and batch size in the same run: the
ratio is the gain of the drafter. Where a run has AR+ in several dtypes, a second ratio is against the fastest of
them, for readers who only want the fastest way to decode.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from paradraft.bench.baselines import HF
from paradraft.bench.labels import labels
from paradraft.bench.latency import LATENCIES
from paradraft.bench.result import accepted_share_of_rounds, first_length
from paradraft.bench.spec import AR
from paradraft.models.runtime import QUANTIZED

KEYS = ("speedup_vs_hf", "speedup_vs_ar", "speedup_vs_fastest_ar", "baseline", "fastest_baseline")


def speedups(methods: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The speedups of each method of a run, by its spec.

    Args:
        methods: the figures of each by spec, of which `method`, `dtype`, `batch` and `tokens_per_s` are read.

    Returns:
        By spec:

        - `speedup_vs_hf`: against the fastest `hf` of the same batch size, or of any if there is none.
        - `speedup_vs_ar`: against `baseline`, the AR+ of the same dtype and batch size.
        - `speedup_vs_fastest_ar`: against `fastest_baseline`, the fastest AR+ of the same batch size with whole
          weights. Rounded weights (int8, int4) are another target, whose AR+ is the baseline of its own dtype alone; it
          is used where the run has no AR+ with whole weights.

        `baseline` and `fastest_baseline` are specs. Methods without an AR+ to be compared with have None.
    """

    def fastest(specs: list[str]) -> str | None:
        return max(specs, key=lambda spec: _speed(methods[spec]), default=None)

    def ratio(spec: str, baseline: str | None) -> float | None:
        return None if baseline is None else _speed(methods[spec]) / _speed(methods[baseline])

    ratios = {}
    for spec, entry in methods.items():
        hf = [other for other, figures in methods.items() if figures["method"] == HF]
        ar = [
            other for other, figures in methods.items() if figures["method"] == AR and _batch(figures) == _batch(entry)
        ]
        own = fastest([other for other in ar if methods[other]["dtype"] == entry["dtype"]])
        best = fastest([other for other in ar if methods[other]["dtype"] not in QUANTIZED]) or own
        peer = fastest([other for other in hf if _batch(methods[other]) == _batch(entry)]) or fastest(hf)
        values = (ratio(spec, peer), ratio(spec, own), ratio(spec, best), own, best)
        ratios[spec] = dict(zip(KEYS, values, strict=True))
    return ratios


def _speed(figures: Mapping[str, Any]) -> float:
    return float(figures["tokens_per_s"]["median"])


def _batch(figures: Mapping[str, Any]) -> int:
    return int(figures.get("batch") or 1)  # the first files have no batch sizes


def without_baseline(methods: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """The methods without `speedup_vs_ar`, by the AR+ that the run lacks.

    >>> pard = {"method": "pard", "dtype": "bfloat16", "batch": 4, "baseline": None}
    >>> without_baseline({"pard:k=4:dtype=bfloat16:batch=4": pard})
    {'AR+ in bfloat16 and batches of 4': ['pard:k=4:dtype=bfloat16:batch=4']}
    """
    specs: dict[str, list[str]] = {}
    for spec, figures in methods.items():
        if figures["baseline"] is None:
            batch = _batch(figures)
            lacking = f"AR+ in {figures['dtype']}" + (f" and batches of {batch}" if batch > 1 else "")
            specs.setdefault(lacking, []).append(spec)
    return specs


def has_faster_baselines(methods: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a method's two speedups differ: the run has a faster AR+ than that of its dtype."""
    return any(figures["baseline"] != figures["fastest_baseline"] for figures in methods.values())


def mark(spec: str, methods: Mapping[str, Mapping[str, Any]]) -> str:
    """The mark of a baseline in tables: `*` that of a dtype, `**` also the fastest with whole weights, else nothing.

    >>> f32 = {"baseline": "ar", "fastest_baseline": "ar:dtype=bfloat16"}
    >>> bf16 = {"baseline": "ar:dtype=bfloat16", "fastest_baseline": "ar:dtype=bfloat16"}
    >>> run = {"ar": f32, "ar:dtype=bfloat16": bf16, "pard": f32}
    >>> [mark(spec, run) for spec in run]
    ['*', '**', '']
    """
    if methods[spec]["baseline"] != spec:
        return ""
    return "**" if has_faster_baselines(methods) and methods[spec]["fastest_baseline"] == spec else "*"


ADVICE = "name a file that `paradraft bench --json` wrote"


def read_result_file(file: Path, parts: Collection[str]) -> dict[str, Any]:
    """A result of one task or of prompts.

    Raises:
        ValueError: it cannot be read, or lacks a part.
    """
    try:
        result = json.loads(file.read_bytes())
    except OSError as error:
        raise ValueError(f"{str(file)!r} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(file)!r} holds no JSON ({error}): {ADVICE}") from None
    if isinstance(result, dict) and isinstance(result.get("tasks"), dict):
        raise ValueError(f"{str(file)!r} holds the results of several tasks: run `paradraft bench` with one --task")
    if not isinstance(result, dict) or not all(isinstance(result.get(part), dict) for part in parts):
        raise ValueError(f"{str(file)!r} is no result of a benchmark: {ADVICE}")
    return result


def completed(result: dict[str, Any]) -> dict[str, Any]:
    """A result with the figures that this version writes, computed from its raw numbers where it lacks them.

    Speedups are always recomputed: until 2026-11-22 `speedup_vs_ar` was against the fastest AR+ of any dtype, and is
    against that of the method's own dtype now. `acceptance_length_first_32` and `accepted_share_of_rounds` come from
    `by_round`, and are None for methods without it (vLLM's, and those of the first files). Latencies are None where
    the file has none.
    """
    methods = result["methods"]
    ratios = speedups(methods)
    complete = {}
    for spec, figures in methods.items():
        rounds = result.get("answers", {}).get(spec, {}).get("by_round")
        derived = {
            "acceptance_length_first_32": first_length(rounds) if rounds else None,
            "accepted_share_of_rounds": accepted_share_of_rounds(rounds) if rounds else None,
            **dict.fromkeys(LATENCIES),
        }
        complete[spec] = {**derived, **figures, **ratios[spec]}
    return {**result, "methods": complete}


def selected(result: dict[str, Any], specs: Sequence[str]) -> dict[str, Any]:
    """A result with some of its methods, in the order of `specs`; their figures stay those of the whole run.

    Args:
        specs: of the methods, or their labels.

    Raises:
        ValueError: it has no such method.
    """
    methods = result["methods"]
    names = {label: spec for spec, label in labels(methods).items()}
    specs = [spec if spec in methods else names.get(spec, spec) for spec in specs]
    for spec in specs:
        if spec not in methods:
            raise ValueError(f"--methods: the result has no method {spec!r}; use some of {', '.join(methods)}")
    selection = {**result, "methods": {spec: methods[spec] for spec in specs}}
    if result.get("example"):
        answers = {spec: pieces for spec, pieces in result["example"]["answers"].items() if spec in specs}
        selection["example"] = {**result["example"], "answers": answers}
    return selection
