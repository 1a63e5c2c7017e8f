"""Whether the machine was as fast at the end as at the beginning: figures of a busy one say little of the methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paradraft.bench.labels import labels

UNSTEADY = 0.15
"""Largest spread that a steady machine has. In the results that this project ships the runs of a method differ by 2 to
11 % on idle machines, and by 15 to 70 % on machines that others used too. Two lengths of drafts often differ by less
than 15 %, so on an unsteady machine chance decides between them."""
ADVICE = "run it again when it is idle"


def spread(values: Sequence[float]) -> float:
    """By how much the largest value exceeds the smallest, as a share of the smallest.

    >>> spread([2.0, 2.5, 2.25])
    0.25
    """
    return max(values) / min(values) - 1


def percent(share: float) -> str:
    """As `37 %`."""
    return f"{share:.0%}".replace("%", " %")


def steadiness(methods: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """How far the runs of one method differ, of the method in which they differ most.

    Args:
        methods: the figures of a result, by spec; `tokens_per_s` has the speed of each run.

    Returns:
        `method`, `spread`, and `is_steady`; None where nothing was run twice.
    """
    spreads = {spec: spread(runs) for spec, one in methods.items() if len(runs := _runs(one)) > 1 and min(runs) > 0}
    if not spreads:
        return None
    worst = max(spreads, key=lambda spec: spreads[spec])
    return {"method": worst, "spread": spreads[worst], "is_steady": spreads[worst] <= UNSTEADY}


def unsteady_runs(methods: Mapping[str, Mapping[str, Any]]) -> str | None:
    """A line that says that the runs of a method differ too much; None where they do not."""
    found = steadiness(methods)
    if found is None or found["is_steady"]:
        return None
    one = methods[found["method"]]
    slow, fast = min(_runs(one)), max(_runs(one))
    name = labels(methods)[found["method"]]
    apart = percent(found["spread"])
    return f"unsteady machine: runs of {name} gave {slow:.0f} to {fast:.0f} tokens/s ({apart}); {ADVICE}"


def _runs(figures: Mapping[str, Any]) -> list[float]:
    return list(figures["tokens_per_s"].get("runs", ()))
