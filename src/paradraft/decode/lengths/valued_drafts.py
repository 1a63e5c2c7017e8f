"""Length policy `expected` for drafts whose nodes have values: verifies those that are worth their time in this round.

`Expected` knows how often the first, second, … node of a draft is accepted on average. A drafter that estimates the
chance of each node (`Draft.values`) knows more: it may be sure of eight tokens in this round and of none in the next.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from paradraft.core import Draft, Request
from paradraft.decode.lengths.round_costs import RoundCosts
from paradraft.decode.lengths.trust import Trust
from paradraft.decode.stats import RoundOutput, RoundTime
from paradraft.tree import Tree
from paradraft.worth import Worth


def most_worth(
    values: Sequence[Sequence[float]], seconds: Callable[[Sequence[int]], float], *, most: int | None = None
) -> tuple[list[int], float]:
    """The nodes of a batch's drafts with the most expected tokens per second.

    Args:
        values: of each row's nodes, the largest first.
        seconds: the time of a round from the number of nodes of each row.
        most: most nodes of all rows together.

    Returns:
        Of each row the number of nodes that are verified, and the expected tokens per second.

    >>> most_worth([[0.9, 0.2], [0.6]], lambda nodes: 1.0 + 0.25 * sum(nodes))
    ([1, 1], 2.3333333333333335)
    """
    order = sorted((-value, row) for row, of_row in enumerate(values) for value in of_row)
    counts, tokens = [0] * len(values), float(len(values))
    best, rate = list(counts), tokens / seconds(counts)
    for value, row in order[:most]:
        counts[row] += 1
        tokens -= value
        if (with_it := tokens / seconds(counts)) > rate:
            best, rate = list(counts), with_it
    return best, rate


class LossGuard:
    """Pauses drafting while it loses time against plain rounds, however sure the drafter is.

    Of R rows the mean luck is that of one divided by √R, so what R rows save counts √R times.

    >>> guard = LossGuard()
    >>> for _ in range(5):
    ...     guard.saved(-2.0, plain_s=2.0, rows=1)
    >>> guard.pause
    32
    """

    MOST_LOST = 5.0
    """Plain rounds that are lost before a pause."""
    MOST_SAVED = 8.0
    """Plain rounds saved that count against later losses, so that drafts that stop paying are noticed."""
    FIRST, LONGEST = 32, 512
    """Rounds of the first pause and of the longest, that of R rows divided by √R; each is twice as long as the one
    before, up to that, until drafts pay again."""
    BETWEEN = 256
    """Rounds between two pauses that `renew` interrupts."""

    def __init__(self) -> None:
        self._saved = 0.0
        self._next_pause = self.FIRST
        self.pause = 0
        """The number of rounds from now on that should be plain."""
        self._interrupted = 0
        """Rounds of an interrupted pause that are left, if drafts lose time again."""
        self._since_renewal = self.BETWEEN

    def renew(self) -> None:
        """Interrupts a pause where a batch begins anew, of other texts, until drafts have lost one plain round."""
        if self.pause and self._since_renewal >= self.BETWEEN:
            self._interrupted, self.pause, self._saved, self._since_renewal = self.pause, 0, 1.0 - self.MOST_LOST, 0

    def pass_round(self) -> None:
        """Counts a round."""
        self.pause = max(self.pause - 1, 0)
        self._since_renewal += 1

    def saved(self, seconds: float, plain_s: float, rows: int) -> None:
        """Adds the time that a round with a draft has saved, the drafter's own subtracted."""
        self._saved = min(self._saved + seconds / plain_s * math.sqrt(rows), self.MOST_SAVED)
        if self._saved <= -self.MOST_LOST:
            if self._interrupted:
                self.pause = self._interrupted
            else:
                longest = max(int(self.LONGEST / math.sqrt(rows)), self.FIRST)
                self.pause, self._next_pause = self._next_pause, min(2 * self._next_pause, longest)
            self._saved, self._interrupted = 0.0, 0
        elif self._saved == self.MOST_SAVED:
            self._next_pause, self._interrupted = self.FIRST, 0


class ValuedDrafts:
    """Cuts each draft to the nodes that are worth their time.

    Times of passes are interpolated between measured sizes, and sizes are at most doubled at a time. Drafters correct
    their chances by what came true (`Trust`). A `LossGuard` pauses drafts that lose time all the same.

    Exploration: where the measurements of another size may have been unlucky, it is tried, as long as the time that the
    trials lose stays within `EXPLORE` of all time. After `PLAIN_AFTER` rounds without a plain one, two are run, to
    compare.
    """

    wants_confidence = False
    runs_plain = True

    EXPLORE = 0.01
    """The share of all time that trials may lose."""
    EARLY, SOON = 3, 16
    """The first trials wait for this number of rounds at most, and are small then."""
    UNBOUNDED = 16
    """Every round of this number has no least value, so that sizes that were never tried may be."""
    FEW = 3
    """Most nodes of the first pass with drafts, or one for every four rows."""
    MOST_LOST = 2.0
    """Most plain rounds that a round is said to have lost: it may have been disturbed. Divided by the root of the
    number of rows, as the losses before a pause."""
    PLAIN_AFTER = 128
    """Rounds with drafts before two plain ones."""

    def __init__(self, k: int) -> None:
        self.k = k
        self._costs = RoundCosts()
        self._guards = defaultdict[int, LossGuard](LossGuard)
        """By number of rows, in powers of two: what one row gains, many may lose."""
        self._trust = Trust()
        self._draft: Draft | None = None
        """The draft of this round, before it was cut."""
        self._lost_s = 0.0
        self._rows = self._since_plain = self._plain_left = 0
        self._trials = self._since_trial = 0
        self._is_trial = self._is_drafting = False
        self._is_timed = True
        """Whether the time of the last round was known: of those that read prompts it is not."""
        self._number = 0
        """Of the round."""
        self._rate = self._expected = 0.0
        """Expected tokens per second of the best cut of this round; expected tokens of the cut that was made."""

    def start(self, tree: Tree | None, *, is_ragged: bool) -> None:
        """Drops all rows; keeps the measured times."""
        self._costs.is_ragged = is_ragged
        self._rows = self._since_plain = self._plain_left = 0
        for guard in self._guards.values():
            guard.renew()

    @property
    def _guard(self) -> LossGuard:
        return self._guards[self._rows.bit_length()]

    def join(self, requests: Sequence[Request]) -> None:
        """Adds rows."""
        self._rows += len(requests)

    def keep(self, rows: Tensor) -> None:
        """Drops the other rows."""
        self._rows = len(rows)

    def next(self) -> list[int]:
        """K for every row, or 0 to measure plain rounds and while drafts lose time."""
        self._is_trial, self._draft, self._number = False, None, self._number + 1
        if self._since_plain >= self.PLAIN_AFTER:
            self._plain_left = 2
        is_plain = self._plain_left or self._guard.pause or not self._costs.knows_plain(self._rows)
        self._is_drafting = not is_plain
        return [0 if is_plain else self.k] * self._rows

    @property
    def worth(self) -> Worth:
        """The least value is the one below which no best node pays, however many follow it: see `most_worth`."""
        if not self._costs.knows_plain(self._rows):
            return Worth(pause=self._guard.pause)
        plain_s = self._costs.plain_now_s(self._rows)
        if not self._is_drafting:
            return Worth(plain_s=plain_s, pause=self._guard.pause)
        is_bounded = self._number % self.UNBOUNDED != 0
        least = self._rows * self._costs.least_more(self._rows, hopeful=self._may_try) if is_bounded else 0.0
        return Worth(least_value=least, odds=self._trust.odds, plain_s=plain_s, pause=self._guard.pause)

    @property
    def _may_try(self) -> bool:
        return self._is_timed and (self._lost_s <= 0.0 or self._is_early)

    @property
    def _is_early(self) -> bool:
        return self._trials < self.EARLY and self._since_trial >= self.SOON

    def learn_prefill(self, tokens: int, seconds: float) -> None:
        """Does nothing: sizes of passes are at most doubled, and no text is read."""

    def postpone(self, unread: Mapping[int, int]) -> None:
        """Does nothing: drafters that estimate values postpone no row."""

    def cut(self, draft: Draft) -> Draft:
        """Removes the nodes that are not worth their time."""
        if not draft.tokens.shape[1] or draft.values is None:
            return draft
        self._draft, values = draft, draft.values
        fewest = max(self.FEW, self._rows // 4)
        most = max(fewest, 2 * (int(self._costs.largest) - self._rows))
        counts, self._rate = most_worth(values, self._seconds, most=most)
        if self._may_try:
            tried, _ = most_worth(values, self._hopeful_s, most=most if self._lost_s <= 0.0 else fewest)
            self._is_trial, counts = tried != counts, tried
        self._expected = self._rows + sum(sum(row[:count]) for row, count in zip(values, counts, strict=True))
        return draft if counts == list(map(len, values)) else draft.first(counts)

    def _seconds(self, nodes: Sequence[int]) -> float:
        return self._costs.pass_s(self._rows, [count for count in nodes if count])

    def _hopeful_s(self, nodes: Sequence[int]) -> float:
        return self._costs.pass_s(self._rows, [count for count in nodes if count], hopeful=True)

    def observe(self, output: RoundOutput, time: RoundTime | None) -> None:
        """Learns the time of the round, and how far the values can be trusted."""
        for guard in self._guards.values():
            guard.pass_round()
        if self._draft is not None:
            self._trust.learn(self._draft, output.tokens)
        nodes, tokens = [count for count in output.nodes if count], sum(map(len, output.tokens))
        self._is_timed = time is not None
        if time is None:
            if self._is_trial:
                self._end_trial(self._costs.pass_s(self._rows, nodes))
            return
        self._since_plain = self._since_plain + 1 if nodes else 0
        self._plain_left = max(self._plain_left - 1, 0)
        self._costs.learn(self._rows, nodes, self.k, time, unread=0, is_first=False, is_usual=not self._is_trial)
        seconds = self._costs.of_usual(time.verify_s + time.other_s)
        if not self._costs.knows_plain(self._rows):
            return
        plain_s = self._costs.pass_s(self._rows, [])
        if self._is_drafting:
            worth = tokens / max(sum(map(bool, output.tokens)), 1)
            # Without a node the pass was a plain one.
            saved_s = (worth * plain_s - seconds if nodes else 0.0) - self._costs.of_usual(time.draft_s)
            least_s = -self.MOST_LOST * plain_s / math.sqrt(self._rows)
            self._guard.saved(max(saved_s, least_s), plain_s, self._rows)
        self._since_trial += 1
        if self._is_trial:
            self._end_trial(seconds)
        else:
            self._lost_s = max(self._lost_s - self.EXPLORE * seconds, 0.0)

    def _end_trial(self, seconds: float) -> None:
        """Counts what a round has lost; the tokens of one are mostly luck, so those that were expected count."""
        self._trials, self._since_trial = self._trials + 1, 0
        most_s = self.MOST_LOST * self._costs.pass_s(self._rows, [])
        self._lost_s = max(self._lost_s + min(seconds - self._expected / self._rate, most_s), 0.0)
