"""Checks that the machine was equally fast in all runs: figures of a busy machine say little about the methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paradraft.bench.labels import labels

UNSTEADY = 0.15
"""Largest spread of a steady machine. In the results that this project ships the runs of a method differ by 2 to
11 % on idle machines, and by 15 to 70 % on machines that others used too. Two lengths of drafts often differ by less
than 15 %, so on an unsteady machine chance decides between them."""
ADVICE = "run it again when it is idle"


def spread(values: Sequence[float]) -> float:
    """Excess of the largest value over the smallest, as a share of the smallest.

    >>> spread([2.0, 2.5, 2.25])
    0.25
    """
    return max(values) / min(values) - 1


def percent(share: float) -> str:
    """Such as `37 %`."""
    return f"{share:.0%}".replace("%", " %")


def steadiness(methods: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """The spread of the runs of the method in which they differ most; None where nothing was run twice."""
    spreads = {
        spec: spread(runs) for spec, figures in methods.items() if len(runs := _runs(figures)) > 1 and min(runs) > 0
    }
    if not spreads:
        return None
    worst = max(spreads, key=lambda spec: spreads[spec])
    return {"method": worst, "spread": spreads[worst], "is_steady": spreads[worst] <= UNSTEADY}


def unsteady_runs(methods: Mapping[str, Mapping[str, Any]]) -> str | None:
    """A line for a method whose runs differ too much; None if there is none."""
    worst = steadiness(methods)
    if worst is None or worst["is_steady"]:
        return None
    figures = methods[worst["method"]]
    slow, fast = min(_runs(figures)), max(_runs(figures))
    name = labels(methods)[worst["method"]]
    difference = percent(worst["spread"])
    return f"unsteady machine: runs of {name} gave {slow:.0f} to {fast:.0f} tokens/s ({difference}); {ADVICE}"


def _runs(figures: Mapping[str, Any]) -> list[float]:
    return list(figures["tokens_per_s"].get("runs", ()))
