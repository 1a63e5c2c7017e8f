"""Cost model of a round, learnt from measured rounds; single times are not trusted (docs/decisions.md, 28)."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Sequence
from functools import partial

from paradraft.decode.lengths.isotonic import increasing
from paradraft.decode.stats import RoundTime
from paradraft.timing import typical


class PassTimes:
    """Measured times of passes by size, such as the number of tokens; monotone, piecewise linear.

    Sizes that differ by less than a fifth form a group, whose time is the median of its last times, because single
    times mislead. Passes with drafts and those without never share one: a few drafted tokens among many rows hardly
    change the size, and what they cost is the question.

    Args:
        fade: whether times that were not measured lately count less in the monotone fit: for those that are not
            relative to a time that is known for now.

    >>> times = PassTimes()
    >>> for size, seconds in [(4, 1.0), (4, 9.0), (4, 1.0), (12, 3.0)]:
    ...     times.add(size, seconds)
    >>> times.of(8), times.of(20), times.of(2)
    (2.0, 5.0, 1.0)
    """

    LAST = 12
    """Times kept per group of sizes."""
    STEPS = 4
    """Groups between a size and its double."""
    FEW, LUCK = 4, 0.6
    """Fewer measurements are not trusted; share of its time by which a size that was measured once may be faster."""
    OLDEST = 32
    """Most halvings."""
    LEAST_S = 1e-9
    """Rates divide by times, and a clock may be too coarse for a small model."""

    def __init__(self, *, fade: bool = False) -> None:
        self._fade = fade
        self._groups: dict[int, deque[tuple[float, float]]] = defaultdict(lambda: deque(maxlen=self.LAST))
        self._typical: dict[int, tuple[float, float]] = {}
        self._measured, self._last = 0, dict[int, int]()
        """Number of measurements, and by group that of its last one."""
        self._near: set[int] = set()
        """Groups, whether of drafts or not, within a factor of two of one that was measured twice."""
        self.points: list[tuple[float, float]] = []
        """Measured sizes with their times, the smallest first."""
        self._hopes: list[tuple[int, float]] = []
        """Groups with the least time that they may have, which grows with the size."""

    def add(self, size: float, seconds: float, *, drafts: bool = False) -> None:
        """Adds a measurement; the size is at least 1."""
        group = self._group(size, drafts)
        times = self._groups[group]
        times.append((size, max(seconds, self.LEAST_S)))
        self._typical[group] = sum(size for size, _ in times) / len(times), typical([seconds for _, seconds in times])
        if len(times) == 2:
            self._near.update(range(group // 2 - self.STEPS, group // 2 + self.STEPS + 1))
        by_size = sorted(self._typical, key=self._typical.__getitem__)
        self._measured += 1
        self._last[group] = self._measured
        rising = increasing([(self._typical[each][1], self._weight(each)) for each in by_size])
        self.points = [(self._typical[each][0], seconds_of) for each, seconds_of in zip(by_size, rising, strict=True)]
        few_s, groups = self.points[0][1], sorted(self._typical)
        hopes_s = [few_s if len(self._groups[each]) < self.FEW else self._hope(each) for each in groups]
        self._hopes = list(zip(groups, itertools.accumulate(hopes_s, max), strict=True))

    def _weight(self, group: int) -> float:
        """The number of its times; of times that `fade`, half for each `LAST` times of other groups since its last."""
        age = self._measured - self._last[group] if self._fade else 0
        return len(self._groups[group]) * 0.5 ** min(age / self.LAST, self.OLDEST)

    def _hope(self, group: int) -> float:
        return self._typical[group][1] * (1.0 - self.LUCK / math.sqrt(len(self._groups[group])))

    def _group(self, size: float, drafts: bool) -> int:
        """Even numbers are groups of passes without drafts."""
        return 2 * round(self.STEPS * math.log2(size)) + drafts

    def knows(self, size: float) -> bool:
        """Whether a size between half of this one and its double was measured twice."""
        return self._group(size, drafts=False) // 2 in self._near

    def trusts(self, size: float) -> bool:
        """Whether passes of about this size without drafts were measured at least `FEW` times."""
        return len(self._groups.get(self._group(size, drafts=False), ())) >= self.FEW

    def knows_well(self, size: float, *, drafts: bool = False) -> bool:
        """Whether `LAST` times of about this size were measured."""
        return len(self._groups.get(self._group(size, drafts), ())) == self.LAST

    def typical(self, size: float, *, drafts: bool = False) -> float:
        """The median of the last times of a size that was measured."""
        return self._typical[self._group(size, drafts)][1]

    def hopeful(self, size: float, *, drafts: bool = False) -> float:
        """The time that a size may have if measurements were disturbed: after few, that of the next smaller size."""
        at = bisect.bisect_right(self._hopes, (self._group(size, drafts), math.inf))
        return self._hopes[max(at - 1, 0)][1]

    @property
    def largest(self) -> float:
        """The largest measured size; 0 without any."""
        return self.points[-1][0] if self.points else 0.0

    def of(self, size: float) -> float:
        """The interpolated time of a size; linear above the largest measured size, constant below the smallest."""
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
    """The time of a round as a function of its drafts: drafter, target, and the rest.

    The drafter's time depends on the number of drafting rows and on the depth, the target's on the number of tokens of
    its pass. A machine may be slower now than when other lengths were tried, and texts grow: so all times are relative
    to that of the target's usual pass.

    Sizes and depths that were never measured are not hoped to be free: a token in a larger pass takes at least as long
    as in prefills, and a deeper draft its part of the passes where each token has one.

    Args:
        one_by_one: whether the drafter runs a pass for each token.
        reading_work: of a token of a prompt, relative to the target's, see `Target.relative_work`.
    """

    DRIFT = 0.3
    """Rate at which a change of the target's usual pass time becomes a change of all times."""
    FASTER = 0.8
    """Share of its expected time below which a draft with reading says that drafts have become faster."""

    def __init__(self, *, one_by_one: bool = False, reading_work: float = 0.0) -> None:
        self._one_by_one, self._reading_work = one_by_one, reading_work
        self.is_ragged = True
        """Whether a pass of the target computes no padding; else all rows cost as much as the longest."""
        self._target_s = PassTimes()
        self._draft_s: dict[int, PassTimes] = defaultdict(partial(PassTimes, fade=True))
        """By number of drafting rows, in powers of two; the size is the depth of the draft."""
        self._prefills: deque[tuple[int, float]] = deque(maxlen=PassTimes.LAST)
        """Tokens and times of the target's prefills."""
        self._first: deque[tuple[int, float, int, int]] = deque(maxlen=PassTimes.LAST)
        """Drafts for which the drafter had to read texts: tokens read, time, rows and depth."""
        self._other_s = 0.0
        self._slowness = 1.0

    def knows_plain(self, rows: int) -> bool:
        """Whether plain rounds with about as many rows were timed."""
        return self._target_s.knows(rows)

    def trusts_plain(self, rows: int) -> bool:
        """Whether plain rounds with about as many rows were timed often enough."""
        return self._target_s.trusts(rows)

    @property
    def knows_drafts(self) -> bool:
        """Whether any draft was timed."""
        return bool(self._draft_s)

    @property
    def rows_to_try(self) -> int:
        """Most rows that may draft in a trial: twice as many as ever did, because the cost of more is a guess."""
        return 1 << (1 + max(self._draft_s, default=-1))

    def seconds(self, rows: int, nodes: Sequence[float], depth: int) -> float:
        """The expected time of a round.

        Args:
            rows: of the batch; requires `knows_plain(rows)`.
            nodes: of each drafting row; requires `knows_drafts`, unless there are none.
        """
        more = self._draft_time(len(nodes), depth) if nodes else 0.0
        return self._target_time(self._size(rows, nodes)) + more + self._other_s

    def pass_s(self, rows: int, nodes: Sequence[float], *, hopeful: bool = False) -> float:
        """`seconds` without the drafter's; see `PassTimes.hopeful`."""
        return self._pass_of(self._size(rows, nodes), drafts=bool(nodes), hopeful=hopeful)

    def plain_now_s(self, rows: int) -> float:
        """The expected time of a plain round as fast as the machine is now."""
        return self.pass_s(rows, []) * self._slowness

    def _pass_of(self, size: float, *, drafts: bool, hopeful: bool) -> float:
        target_s = self._target_s.hopeful(size, drafts=drafts) if hopeful else self._target_time(size)
        return target_s + self._other_s

    def least_more(self, rows: int, *, hopeful: bool = False) -> float:
        """Least time of a drafted token in a pass of a measured size, in plain passes; 0 before any was measured."""
        plain_s = self.pass_s(rows, [], hopeful=hopeful)
        sizes = (size for size, _ in self._target_s.points if size > rows)
        more = ((self._pass_of(size, drafts=True, hopeful=hopeful) / plain_s - 1.0) / (size - rows) for size in sizes)
        return max(min(more, default=0.0), 0.0)

    @property
    def largest(self) -> float:
        """The largest measured size of a pass, in tokens; that of the longest row times their number, if padded."""
        return self._target_s.largest

    def reading_s(self) -> float:
        """The drafter's prefill time per token; before any draft, from the target's."""
        if not self._first or not self._draft_s:
            return self._reading_work * self._token_s()
        more_s = sum(seconds - self._draft_time(rows, depth) for _, seconds, rows, depth in self._first)
        return max(more_s / sum(tokens for tokens, *_ in self._first), 0.0)

    def learn_prefill(self, tokens: int, seconds: float) -> None:
        """Adds a prefill of the target; nothing is read of prompts of one token, or of a known prefix."""
        if tokens:
            self._prefills.append((tokens, seconds / self._slowness))

    def _token_s(self) -> float:
        """The time of a token in the target's prefills, without that of reading the weights. It is at most that of a
        token in the smallest pass: a first prefill may have waited for much else."""
        if not self._prefills or not self._target_s.points:
            return 0.0
        size, weights_s = self._target_s.points[0]
        return min(
            typical([max(seconds - weights_s, 0.0) / tokens for tokens, seconds in self._prefills]), weights_s / size
        )

    def _target_time(self, size: float) -> float:
        seconds, more = self._target_s.of(size), size - self._target_s.largest
        return max(seconds, self._target_s.points[-1][1] + more * self._token_s()) if more > 0.0 else seconds

    def _size(self, rows: int, nodes: Sequence[float]) -> float:
        return rows + (sum(nodes) if self.is_ragged else rows * max(nodes, default=0))

    def _draft_time(self, rows: int, depth: int) -> float:
        """Linear in the number of drafting rows; constant above a single measured group."""
        known = sorted(self._draft_s)
        at = bisect.bisect_left(known, (rows - 1).bit_length())
        nearest = known[max(at - 1, 0) : at + 1] if at < len(known) else known[-2:]
        (least, least_s), *more = [(1 << group, self._time_of_group(group, depth)) for group in nearest]
        if not more:
            return least_s * min(rows / least, 1.0)
        slope = max((more[0][1] - least_s) / (more[0][0] - least), 0.0)
        return max(least_s + slope * (rows - least), 0.0)

    def _time_of_group(self, group: int, depth: int) -> float:
        times = self._draft_s[group]
        if self._one_by_one and len(times.points) == 1:
            return times.of(depth) * depth / times.largest
        return times.of(depth) * min(depth / times.points[0][0], 1.0)

    def learn(
        self,
        rows: int,
        nodes: Sequence[int],
        depth: int,
        time: RoundTime,
        *,
        unread: int,
        is_first: bool,
        is_usual: bool,
    ) -> None:
        """Adds a round; see `seconds`.

        Args:
            unread: tokens of the rows that begin to draft, which the drafter had to read.
            is_first: whether drafting began in some row, or ended in all, since the previous round. The drafter then
                reads the tokens committed meanwhile, or the CPU caches still hold its data: such times are ignored.
            is_usual: whether the round follows the best plan: if the time of its pass is well known, it measures how
                slow the machine is now.
        """
        slowness, size = self._slowness, self._size(rows, nodes)
        self._other_s += self.DRIFT * (time.other_s / slowness - self._other_s)
        if is_first and not nodes:
            return
        drafts = bool(nodes)
        if is_usual and self._target_s.knows_well(size, drafts=drafts):
            change = time.verify_s / (slowness * self._target_s.typical(size, drafts=drafts))
            self._slowness *= min(max(change, 0.25), 4.0) ** self.DRIFT
        else:
            self._target_s.add(size, time.verify_s / slowness, drafts=drafts)
        if not nodes:
            return
        draft_s, is_timed = time.draft_s / slowness, not is_first
        if unread:
            self._first.append((unread, draft_s, len(nodes), depth))
            is_timed = self.knows_drafts and draft_s < self.FASTER * self._draft_time(len(nodes), depth)
        if is_timed:
            self._draft_s[(len(nodes) - 1).bit_length()].add(depth, draft_s)

    def of_usual(self, seconds: float) -> float:
        """Converts a current time to the machine speed at which times were learnt."""
        return seconds / self._slowness
