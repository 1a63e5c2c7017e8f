"""Isotonic regression: the monotone values nearest to given ones, by pooling adjacent violators."""

from __future__ import annotations

from collections.abc import Sequence


def increasing(values: Sequence[tuple[float, float]]) -> list[float]:
    """Isotonic (non-decreasing) fit of values with weights: where a later value is smaller, both become their mean.

    >>> increasing([(1.0, 12), (9.0, 1), (2.0, 6), (3.0, 1)])
    [1.0, 3.0, 3.0, 3.0]
    """
    means: list[tuple[float, float, int]] = []
    for value, weight in values:
        mean, count = value, 1
        while means and means[-1][0] > mean:
            before, before_weight, before_count = means.pop()
            total = before_weight + weight
            mean, weight, count = (before * before_weight + mean * weight) / total, total, before_count + count
        means.append((mean, weight, count))
    return [mean for mean, _, count in means for _ in range(count)]


def decreasing(values: Sequence[float]) -> list[float]:
    """Non-increasing fit of values of equal weight: where a later value is larger, both become their mean.

    >>> decreasing([0.6, 0.1, 0.4, 0.2])
    [0.6, 0.25, 0.25, 0.2]
    """
    return [-value for value in increasing([(-value, 1.0) for value in values])]
