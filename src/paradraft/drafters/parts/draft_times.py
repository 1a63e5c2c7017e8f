"""Measured times of a part of a union: of drafts, and of the texts that it reads before its first draft of a row."""

from __future__ import annotations

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
    ...     times.add(seconds, rows=1, unread=unread)
    >>> times.draft_s(1), round(times.reading_s, 3)
    (0.3, 0.01)
    """

    def __init__(self) -> None:
        self._drafts: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=LAST))
        """By number of drafting rows, in powers of two."""
        self._readings: deque[tuple[float, int, int]] = deque(maxlen=LAST)
        """Of rounds in which texts were read: time, drafting rows, and tokens."""

    def add(self, seconds: float, *, rows: int, unread: int) -> None:
        """Adds a round.

        Args:
            rows: number of drafting rows.
            unread: tokens that were read for those that did not draft in the round before.
        """
        if not unread:
            self._drafts[_group(rows)].append(seconds)
        elif unread >= FEW:
            self._readings.append((seconds, rows, unread))

    @property
    def are_known(self) -> bool:
        """Whether a draft was timed for which no text was read."""
        return bool(self._drafts)

    def draft_s(self, rows: int) -> float:
        """The time of drafts of a number of rows, that of the nearest measured one; requires `are_known`."""
        return typical(self._drafts[min(self._drafts, key=lambda group: abs(group - _group(rows)))])

    @property
    def reading_s(self) -> float:
        """The time of reading a token; requires `are_known`."""
        return typical([
            max(seconds - self.draft_s(rows), 0.0) / tokens for seconds, rows, tokens in self._readings
        ])  # fmt: skip


def _group(rows: int) -> int:
    return (rows - 1).bit_length()
