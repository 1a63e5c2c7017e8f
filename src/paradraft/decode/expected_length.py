"""The length policy that drafts what pays on this machine: expected tokens over measured time.

Why it trusts no single time is in docs/decisions.md, 28.
"""

from __future__ import annotations

import copy
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from paradraft.core import Draft, RoundOutput


def expected_tokens(shares: Iterable[float]) -> float:
    """Tokens of a row's round: the target's own, and each drafted one as often as it is accepted.

    Args:
        shares: for each position of the draft, the share of rounds that accept so many tokens or more.

    >>> expected_tokens([0.5, 0.25])
    1.75
    """
    return 1.0 + sum(shares)


def on_lines(known: Mapping[int, float], x: float) -> float:
    """What lies at `x` on the straight lines between known points; beyond the first and the last, what they have.

    Raises:
        ValueError: nothing is known.

    >>> on_lines({1: 10.0, 3: 14.0}, 2), on_lines({1: 10.0, 3: 14.0}, 7)
    (12.0, 14.0)
    """
    below = max((other for other in known if other <= x), default=min(known))
    above = min((other for other in known if other >= x), default=max(known))
    share = (x - below) / (above - below) if above > below else 0.0
    return (1 - share) * known[below] + share * known[above]


@dataclass(kw_only=True)
class _Costs:
    """Times of the passes of one batch size, by the number of tokens that were asked for."""

    seconds: dict[int, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=12)))

    def add(self, k: int, seconds: float) -> None:
        self.seconds[k].append(seconds)

    def of(self, k: int) -> float:
        """The median time when `k` tokens are asked for; on a straight line between those that are known, of which no
        draft at all is none: a draft's first token costs more than its second."""
        return on_lines({other: statistics.median(s) for other, s in self.seconds.items() if other or not k}, k)


class Expected:
    """Maximises the expected tokens per second; plain decoding while speculation does not pay.

    With a_i the share of recent rounds that accepted position i when asked for as many, and T(k) the
    measured time of a round that is asked for k tokens, it drafts the k for which
    (1 + a_1 + … + a_k) / T(k) is largest; it begins to draft where that is `GAIN` times as much as
    without a draft, and goes on while it is more.

    T is learnt for each batch size (in powers of two) in a few rounds with the most tokens, with one
    and with none. Later the most and none are tried again in turn, as often as the time that this
    loses stays within `EXPLORE` of all time. What was learnt stays for the next batch.

    Args:
        k: most tokens.
    """

    wants_confidence = False

    MEMORY = 0.98
    """How much of its weight an observation keeps with every later one; a round has one for each row."""
    DRAFTS = 24
    """Longest drafts, counted by rows, that the first batches begin with, to learn what is accepted."""
    TRIALS = 3
    """Times with the longest draft, with one token and without, that every new batch size begins with."""
    TRY = 2
    """Rounds of a later try. The time of the first round after a change of length is never counted: caches hold what
    the length before needed, and a draft after plain rounds first reads what they committed."""
    DRIFT = 0.2
    """How quickly a change of what the usual round takes is a change of all costs: the machine may be slower now than
    when the other lengths were tried, texts grow, and batches shrink."""
    GAIN = 1.05
    """How many times as fast as plain decoding drafting has to be to begin: the drafter first reads the prompt, or what
    plain rounds committed, and that is not in T."""
    EXPLORE = 0.01
    """The share of all time that trying other lengths may lose."""

    def __init__(self, k: int) -> None:
        self.k = k
        self._costs: dict[int, _Costs] = defaultdict(_Costs)
        self._accepted = [0.0] * k
        self._drafted = [0.0] * k
        self._drafts = 0
        self._lost_s = 0.0
        self._slowness = 1.0
        self._best = self._next_try = k
        self._asked: int | None = None
        self._is_change = True
        self._is_learning = True
        self._rounds_of_try = 0
        self._batch = 0
        self._lent: set[int] = set()

    def start(self) -> None:
        """Keeps what is known of costs and acceptance."""
        self._batch = 0

    def join(self, rows: int) -> None:
        """A larger batch has costs of its own, which are learnt where they were only borrowed."""
        self._batch += rows
        if self._size in self._lent:
            self._lent.remove(self._size)
            del self._costs[self._size]
        self._asked = None
        self._rounds_of_try = 0

    def next(self) -> int:
        """The best length for the whole batch."""
        before, self._asked = self._asked, self._choose()
        self._is_change = self._asked != before
        return self._asked

    def cut(self, draft: Draft) -> Draft:
        """The draft as it is."""
        return draft

    def _choose(self) -> int:
        costs = self._costs[self._size]
        for k in (self.k, 1, 0):
            if len(costs.seconds.get(k, ())) < self.TRIALS:
                self._is_learning, self._best = True, 0
                return k
        if self._drafts < self.DRAFTS:
            return self.k
        best = max(range(1, self.k + 1), key=lambda k: (self._rate(k), -k))
        gain = 1.0 if self._best else self.GAIN
        self._best = best if self._rate(best) > gain * self._rate(0) else 0
        if self._is_learning:
            # As if the other length had just been tried: it has been.
            other = 0 if self._best else self.k
            self._is_learning, self._lost_s = False, self.TRY * self._loss_s(other, costs.of(other))
        if self._rounds_of_try:
            self._rounds_of_try -= 1
            return self._next_try
        if self._lost_s > 0.0:
            return self._best
        self._rounds_of_try, self._next_try = self.TRY - 1, self.k - self._next_try
        return self._next_try

    @property
    def _size(self) -> int:
        return (self._batch - 1).bit_length()

    def _tokens(self, k: int) -> float:
        """Expected tokens of a row's round with `k` drafted tokens."""
        shares = (a / d if d else 0.0 for a, d in zip(self._accepted[:k], self._drafted[:k], strict=True))
        return expected_tokens(shares)

    def _rate(self, k: int) -> float:
        """Expected tokens of a row per second, with `k` drafted tokens a round."""
        return self._tokens(k) / self._costs[self._size].of(k)

    def _loss_s(self, k: int, seconds: float) -> float:
        """What a round of `k` drafted tokens lost against the best one."""
        return max(seconds - self._tokens(k) / self._rate(self._best), 0.0)

    def observe(self, step: RoundOutput, *, draft_s: float, verify_s: float) -> None:
        """Adds a round to costs and acceptance."""
        asked, seconds = self._asked, draft_s + verify_s
        assert asked is not None, "a round that was never asked for"
        costs = self._costs[self._size]
        if not self._is_change:
            if asked == self._best and asked in costs.seconds and not self._is_learning:
                self._slowness *= (seconds / (self._slowness * costs.of(asked))) ** self.DRIFT
            else:
                costs.add(asked, seconds / self._slowness)
        if not self._is_learning:
            seconds /= self._slowness
            change_s = -self.EXPLORE * seconds if asked == self._best else self._loss_s(asked, seconds)
            self._lost_s = max(self._lost_s + change_s, 0.0)
        rows = [accepted for accepted, tokens in zip(step.accepted, step.tokens, strict=True) if tokens]
        self._drafts += len(rows) if asked == self.k else 0
        kept = self.MEMORY ** len(rows)
        for place in range(asked):
            self._accepted[place] = kept * self._accepted[place] + sum(accepted > place for accepted in rows)
            self._drafted[place] = kept * self._drafted[place] + len(rows)

    def keep(self, rows: Tensor) -> None:
        """A smaller batch has other costs; the larger one's serve where they are unknown, for the few rounds left."""
        larger = self._costs[self._size]
        self._batch = len(rows)
        if self._size not in self._costs:
            self._costs[self._size] = copy.deepcopy(larger)
            self._lent.add(self._size)
