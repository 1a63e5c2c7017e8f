"""Reads the files that `paradraft bench --json` writes, those of earlier versions too."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from paradraft.bench.answer import accepted_share_of_rounds, first_length
from paradraft.bench.speedups import speedups

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
    `by_round`, and are None for methods without it (vLLM's, and those of the first files).
    """
    methods = result["methods"]
    ratios = speedups(methods)
    found = {}
    for spec, figures in methods.items():
        rounds = result.get("answers", {}).get(spec, {}).get("by_round")
        derived = {
            "acceptance_length_first_32": first_length(rounds) if rounds else None,
            "accepted_share_of_rounds": accepted_share_of_rounds(rounds) if rounds else None,
        }
        found[spec] = {**derived, **figures, **ratios[spec]}
    return {**result, "methods": found}


def selected(result: dict[str, Any], specs: Sequence[str]) -> dict[str, Any]:
    """A result with some of its methods, in the order asked for; their figures stay those of the whole run.

    Raises:
        ValueError: it has no such method.
    """
    methods = result["methods"]
    for spec in specs:
        if spec not in methods:
            raise ValueError(f"--methods: the result has no method {spec!r}; use some of {', '.join(methods)}")
    found = {**result, "methods": {spec: methods[spec] for spec in specs}}
    if result.get("example"):
        answers = {spec: pieces for spec, pieces in result["example"]["answers"].items() if spec in specs}
        found["example"] = {**result["example"], "answers": answers}
    return found
