"""Measured times of a part of a union: of drafts, and of the texts that it reads before its first draft of a row."""

from __future__ import annotations

import bisect
from collections import defaultdict, deque

from paradraft.timing import typical

LAST = 8
"""Times kept; the median counts, because single times mislead."""
FEW = 8
"""Fewer tokens are read in a time that cannot be told from that of the draft."""


class DraftTimes:
    """Times in seconds. A drafter that has just drafted reads only the tokens committed since: that belongs to a draft.

    >>> times = DraftTimes()
    >>> for seconds, unread in [(1.3, 100), (0.3, 0), (0.3, 0), (0.3, 0)]:
    ...     times.add(seconds, rows=1, depth=4, unread=unread)
    >>> times.add(0.2, rows=1, depth=2, unread=0)
    >>> times.draft_s(1, 4), round(times.draft_s(1, 3), 2), round(times.reading_s, 3)
    (0.3, 0.25, 0.01)
    """

    def __init__(self) -> None:
        self._drafts: dict[int, dict[int, deque[float]]] = defaultdict(lambda: defaultdict(lambda: deque(maxlen=LAST)))
        """By number of drafting rows, in powers of two, and by depth."""
        self._readings: deque[tuple[float, int, int, int]] = deque(maxlen=LAST)
        """Of rounds in which texts were read: time, drafting rows, depth, and tokens."""

    def add(self, seconds: float, *, rows: int, depth: int, unread: int) -> None:
        """Adds a round.

        Args:
            rows: number of drafting rows.
            depth: of the deepest draft.
            unread: tokens that were read for those that did not draft in the round before.
        """
        if not unread:
            self._drafts[_group(rows)][depth].append(seconds)
        elif unread >= FEW:
            self._readings.append((seconds, rows, depth, unread))

    @property
    def are_known(self) -> bool:
        """Whether a draft was timed for which no text was read."""
        return bool(self._drafts)

    def depth_to_measure(self, most: int) -> int | None:
        """A depth up to `most` to measure next, so that it is known how time grows with it; None if that is known."""
        known = {depth for by_depth in self._drafts.values() for depth in by_depth}
        wanted = {most, (most + 1) // 2} if len(known) < 2 else set()
        return max(wanted - known, default=None)

    def draft_s(self, rows: int, depth: int) -> float:
        """The time of drafts of a number of rows, that of the nearest measured one; requires `are_known`.

        It is linear between measured depths, and beyond them as between the nearest two.
        """
        by_depth = self._drafts[min(self._drafts, key=lambda group: abs(group - _group(rows)))]
        known = sorted(by_depth)
        if len(known) == 1:
            return typical(by_depth[known[0]])
        at = min(max(bisect.bisect_left(known, depth), 1), len(known) - 1)
        below, above = known[at - 1], known[at]
        below_s, above_s = typical(by_depth[below]), typical(by_depth[above])
        return max(below_s + (above_s - below_s) * (depth - below) / (above - below), 0.0)

    @property
    def reading_s(self) -> float:
        """The time of reading a token; requires `are_known`."""
        return typical([
            max(seconds - self.draft_s(rows, depth), 0.0) / tokens for seconds, rows, depth, tokens in self._readings
        ])  # fmt: skip


def _group(rows: int) -> int:
    return (rows - 1).bit_length()
