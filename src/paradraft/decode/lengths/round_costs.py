"""How long a round takes, learnt from rounds; single times are not trusted (docs/decisions.md, 28)."""

from __future__ import annotations

import bisect
import math
import statistics
from collections import defaultdict, deque
from collections.abc import Sequence


def typical(times_s: Sequence[float]) -> float:
    """The median; of fewer than three times the least, because what disturbs a round only adds to it."""
    return statistics.median(times_s) if len(times_s) > 2 else min(times_s)


class Times:
    """Measured times of passes by a size, such as the tokens that they read.

    Sizes that differ by less than a fifth are taken together, and the median of their last times counts: single times
    mislead. Between known sizes lie straight lines; a larger one never takes less.

    >>> times = Times()
    >>> for size, seconds in [(4, 1.0), (4, 9.0), (4, 1.0), (12, 3.0)]:
    ...     times.add(size, seconds)
    >>> times.of(8), times.of(20), times.of(2)
    (2.0, 5.0, 1.0)
    """

    LAST = 12
    """Times of a group of sizes that count."""
    STEPS = 4
    """Groups of sizes between one size and its double."""
    LEAST_S = 1e-9
    """A clock may be too coarse for a small model, and rates divide by times."""

    def __init__(self) -> None:
        self._groups: dict[int, deque[tuple[float, float]]] = defaultdict(lambda: deque(maxlen=self.LAST))
        self._typical: dict[int, tuple[float, float]] = {}
        self._near: set[int] = set()
        self.points: list[tuple[float, float]] = []
        """The known sizes with their times, the smallest first."""

    def add(self, size: float, seconds: float) -> None:
        """Takes in one time of a size of at least 1."""
        number = self._group(size)
        times = self._groups[number]
        times.append((size, max(seconds, self.LEAST_S)))
        self._typical[number] = sum(size for size, _ in times) / len(times), typical([seconds for _, seconds in times])
        if len(times) == 2:
            self._near.update(range(number - self.STEPS, number + self.STEPS + 1))
        self.points, most = [], 0.0
        for _, (typical_size, typical_s) in sorted(self._typical.items()):
            most = max(most, typical_s)
            self.points.append((typical_size, most))

    def _group(self, size: float) -> int:
        return round(self.STEPS * math.log2(size))

    def knows(self, size: float) -> bool:
        """Whether a size between half of this one and its double was measured twice."""
        return self._group(size) in self._near

    def knows_well(self, size: float) -> bool:
        """Whether as many times of about this size were measured as count."""
        return len(self._groups.get(self._group(size), ())) == self.LAST

    def of(self, size: float) -> float:
        """The time of a size; beyond the largest, on the line through the first and the last, below the first as that.

        Raises:
            ValueError: nothing is known.
        """
        if not self.points:
            raise ValueError("no pass was measured")
        points = self.points
        (first, first_s), (last, last_s) = points[0], points[-1]
        if size <= first:
            return first_s
        if size >= last:
            return last_s + ((last_s - first_s) / (last - first) * (size - last) if last > first else 0.0)
        at = bisect.bisect_right(points, (size, math.inf))
        (below, below_s), (above, above_s) = points[at - 1], points[at]
        return below_s + (above_s - below_s) * (size - below) / (above - below)


class RoundCosts:
    """The time of a round by what is drafted in it: of the drafter, of the target, and of all else.

    The drafter's time depends on how many rows draft and on how deep, the target's on how many tokens its pass
    computes. A machine may be slower now than when other lengths were tried, and texts grow: so all times are held
    against that of the target's usual pass.
    """

    DRIFT = 0.3
    """How quickly a change of what the usual pass of the target takes becomes a change of all times."""

    def __init__(self) -> None:
        self.is_ragged = True
        """Whether a pass of the target computes only the tokens that there are; else as many in each row."""
        self._target_s = Times()
        self._draft_s: dict[int, Times] = defaultdict(Times)
        """By the number of rows that draft, in powers of two; the size of a draft is its depth."""
        self._first: deque[tuple[int, float, int, int]] = deque(maxlen=Times.LAST)
        """Of drafts for which texts were read: their tokens, the time, rows and depth."""
        self._other_s = 0.0
        self._slowness = 1.0

    def knows_plain(self, rows: int) -> bool:
        """Whether about as many rows were decoded without drafts."""
        return self._target_s.knows(rows)

    @property
    def knows_drafts(self) -> bool:
        """Whether the time of any draft is known."""
        return bool(self._draft_s)

    @property
    def rows_to_try(self) -> int:
        """How many rows may draft when that is tried: twice as many as ever did, because what more cost is a guess."""
        return 1 << (1 + max(self._draft_s, default=-1))

    def seconds(self, rows: int, nodes: Sequence[float], depth: int) -> float:
        """How long a round takes.

        Args:
            rows: of the batch; `knows_plain` is true of them.
            nodes: how many are drafted in each row that drafts; `knows_drafts` is true if any does.
            depth: of the draft.
        """
        more = self._draft_time(len(nodes), depth) if nodes else 0.0
        return self._target_s.of(self._size(rows, nodes)) + more + self._other_s

    def reading_s(self) -> float:
        """How long the drafter takes to read a token of a text of which it has not drafted yet."""
        if not self._first or not self._draft_s:
            return 0.0
        more_s = sum(seconds - self._draft_time(rows, depth) for _, seconds, rows, depth in self._first)
        return max(more_s / sum(tokens for tokens, *_ in self._first), 0.0)

    def _size(self, rows: int, nodes: Sequence[float]) -> float:
        return rows + (sum(nodes) if self.is_ragged else rows * max(nodes, default=0))

    def _draft_time(self, rows: int, depth: int) -> float:
        """On a line over the rows that draft, and over how deep; what is not known is not taken to be more."""
        known = sorted(self._draft_s)
        at = bisect.bisect_left(known, (rows - 1).bit_length())
        near = known[max(at - 1, 0) : at + 1] if at < len(known) else known[-2:]
        (least, least_s), *more = [(1 << group, self._time_of_group(group, depth)) for group in near]
        if not more:
            return least_s * min(rows / least, 1.0)
        slope = max((more[0][1] - least_s) / (more[0][0] - least), 0.0)
        return max(least_s + slope * (rows - least), 0.0)

    def _time_of_group(self, group: int, depth: int) -> float:
        times = self._draft_s[group]
        return times.of(depth) * min(depth / times.points[0][0], 1.0)

    def learn(
        self,
        rows: int,
        nodes: Sequence[int],
        depth: int,
        *,
        draft_s: float,
        verify_s: float,
        other_s: float,
        unread: int,
        is_first: bool,
        is_usual: bool,
    ) -> None:
        """Adds a round.

        Args:
            rows: see `seconds`.
            nodes: see `seconds`.
            depth: see `seconds`.
            draft_s: the drafter's time.
            verify_s: the target's.
            other_s: of all else.
            unread: tokens of the rows that begin to draft, which the drafter had to read.
            is_first: whether some row drafts and did not in the round before, or none does any more. The drafter then
                reads what was committed meanwhile, or the caches hold what it needed: such times are not counted.
            is_usual: whether the round is what is thought best: where its time is well known, it tells how slow the
                machine is now.
        """
        slowness, size = self._slowness, self._size(rows, nodes)
        self._other_s += self.DRIFT * (other_s / slowness - self._other_s)
        if is_first and not nodes:
            return
        if is_usual and self._target_s.knows_well(size):
            self._slowness *= min(max(verify_s / (slowness * self._target_s.of(size)), 0.25), 4.0) ** self.DRIFT
        else:
            self._target_s.add(size, verify_s / slowness)
        if nodes and unread:
            self._first.append((unread, draft_s / slowness, len(nodes), depth))
        elif nodes and not is_first:
            times = self._draft_s[(len(nodes) - 1).bit_length()]
            if not (is_usual and times.knows_well(depth)):
                times.add(depth, draft_s / slowness)

    def of_usual(self, seconds: float) -> float:
        """What a time of now would have been when times were learnt."""
        return seconds / self._slowness
