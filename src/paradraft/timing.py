"""Typical times of repeated measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def typical(times_s: Sequence[float]) -> float:
    """The median; the minimum of fewer than three times, because disturbances only add time; 0 of none.

    >>> typical([1.0, 9.0, 1.1]), typical([9.0, 1.0]), typical([])
    (1.1, 1.0, 0.0)
    """
    return statistics.median(times_s) if len(times_s) > 2 else min(times_s, default=0.0)
