"""Reads the files that `paradraft bench --json` writes, those of earlier versions too, and computes speedups.

The baseline of a method is the AR+ (decoding without a drafter) of the same dtype and batch size in the same run: the
ratio says what the drafter gains. Where a run has AR+ in several dtypes, a second ratio is against the fastest of
them, for a reader who only wants the fastest way to decode.
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


ADVICE = "name a file that `paradraft bench --json` wrote"


def read_result_file(file: Path, parts: Collection[str]) -> dict[str, Any]:
    """A result of one task or of prompts.

    Args:
        file: where it is.
        parts: the objects that it must have.

    Raises:
        ValueError: it cannot be read, or lacks a part.
    """
    try:
        found = json.loads(file.read_bytes())
    except OSError as error:
        raise ValueError(f"{str(file)!r} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(file)!r} holds no JSON ({error}): {ADVICE}") from None
    if isinstance(found, dict) and isinstance(found.get("tasks"), dict):
        raise ValueError(f"{str(file)!r} holds the results of several tasks: run `paradraft bench` with one --task")
    if not isinstance(found, dict) or not all(isinstance(found.get(part), dict) for part in parts):
        raise ValueError(f"{str(file)!r} is no result of a benchmark: {ADVICE}")
    return found


def completed(result: dict[str, Any]) -> dict[str, Any]:
    """A result with the figures that this version writes, computed from its raw numbers where it lacks them.

    Speedups are always computed anew: until 2026-11-22 `speedup_vs_ar` was against the fastest AR+ of any dtype, and is
    against that of the method's own dtype now. `acceptance_length_first_32` and `accepted_share_of_rounds` come from
    `by_round`, and are None for methods without it (vLLM's, and those of the first files). Latencies are None where
    the file has none.
    """
    methods = result["methods"]
    ratios = speedups(methods)
    found = {}
    for spec, figures in methods.items():
        rounds = result.get("answers", {}).get(spec, {}).get("by_round")
        derived = {
            "acceptance_length_first_32": first_length(rounds) if rounds else None,
            "accepted_share_of_rounds": accepted_share_of_rounds(rounds) if rounds else None,
            **dict.fromkeys(LATENCIES),
        }
        found[spec] = {**derived, **figures, **ratios[spec]}
    return {**result, "methods": found}


def selected(result: dict[str, Any], specs: Sequence[str]) -> dict[str, Any]:
    """A result with some of its methods, in the order asked for; their figures stay those of the whole run.

    Args:
        result: of one work.
        specs: the methods, as they were given or as tables call them.

    Raises:
        ValueError: it has no such method.
    """
    methods = result["methods"]
    names = {label: spec for spec, label in labels(methods).items()}
    specs = [spec if spec in methods else names.get(spec, spec) for spec in specs]
    for spec in specs:
        if spec not in methods:
            raise ValueError(f"--methods: the result has no method {spec!r}; use some of {', '.join(methods)}")
    found = {**result, "methods": {spec: methods[spec] for spec in specs}}
    if result.get("example"):
        answers = {spec: pieces for spec, pieces in result["example"]["answers"].items() if spec in specs}
        found["example"] = {**result["example"], "answers": answers}
    return found
