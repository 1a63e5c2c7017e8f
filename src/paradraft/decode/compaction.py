"""Compaction: when finished requests leave a batch, and which rows fill their places."""

from __future__ import annotations

from collections.abc import Collection


def should_compact(finished: int, rows: int) -> bool:
    """Whether enough rows have finished for compaction to pay.

    >>> should_compact(3, 16), should_compact(4, 16), should_compact(0, 2)
    (False, True, False)
    """
    return finished * 4 >= rows


def rows_without(holes: Collection[int], rows: int) -> list[int]:
    """Row order of a compaction: the last rows fill the holes, and all others stay.

    >>> rows_without([1, 4], 5)
    [0, 3, 2]
    """
    leaving = set(holes)
    staying = [row for row in range(rows) if row not in leaving]
    last = staying[::-1]
    return [row if row not in leaving else last.pop(0) for row in range(len(staying))]
