"""How many tokens to draft in the next round.

A policy is asked before each round how deep the draft may be, may cut the draft that came, and
learns from what was accepted. It changes the speed, never the text: what it decides depends on
tokens that are committed, on times, and on the drafter's distributions, never on which tokens were
drawn for the round it decides about. (Under the rejection rule a draft cut in view of its own
tokens would bias the text.)
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from paradraft.core import Draft, Step
from paradraft.tree import ancestors, depths


class LengthPolicy(Protocol):
    """Chooses the length of the next draft from what earlier rounds accepted."""

    wants_confidence: bool
    """Whether `cut` looks at the drafter's confidence."""

    def start(self, batch_size: int) -> None:
        """Begins with a new batch; what was learnt about costs may stay."""

    def next(self) -> int:
        """Most tokens to draft in any row of the next round; 0 decodes plainly."""

    def cut(self, draft: Draft) -> Draft:
        """The draft without what is not worth the target's time."""

    def observe(self, step: Step, *, draft_s: float, verify_s: float) -> None:
        """Learns what a round accepted and how long its two passes took."""

    def keep_rows(self, rows: Tensor) -> None:
        """Forgets all rows of the batch but `rows`."""


class Fixed:
    """Always drafts `k` tokens."""

    wants_confidence = False

    def __init__(self, k: int) -> None:
        self.k = k

    def start(self, batch_size: int) -> None:
        """See `LengthPolicy`."""

    def next(self) -> int:
        """See `LengthPolicy`."""
        return self.k

    def cut(self, draft: Draft) -> Draft:
        """The draft as it is."""
        return draft

    def observe(self, step: Step, *, draft_s: float, verify_s: float) -> None:
        """Nothing to learn."""

    def keep_rows(self, rows: Tensor) -> None:
        """Nothing to forget."""


class Heuristic(Fixed):
    """Two more after a draft that was accepted whole, one less after a rejection; for each row by itself.

    Args:
        k: most tokens.
    """

    def start(self, batch_size: int) -> None:
        """Every row begins with half of the most."""
        self._wanted = [max(self.k // 2, 1)] * batch_size

    def next(self) -> int:
        """What the most successful row gets."""
        return max(self._wanted)

    def cut(self, draft: Draft) -> Draft:
        """Every row gets its own length."""
        if min(self._wanted) == max(self._wanted) or not draft.tokens.shape[1]:
            return draft
        most_B1 = torch.tensor(self._wanted, device=draft.tokens.device)[:, None]
        return draft.where(depths(draft.parents) < most_B1)

    def observe(self, step: Step, *, draft_s: float, verify_s: float) -> None:
        """Grows or shrinks each row's length."""
        for row, (accepted, drafted) in enumerate(zip(step.accepted, step.drafted, strict=True)):
            if drafted:
                change = 2 if accepted == drafted else -1
                self._wanted[row] = min(max(self._wanted[row] + change, 1), self.k)

    def keep_rows(self, rows: Tensor) -> None:
        """Keeps the lengths of these rows."""
        self._wanted = [self._wanted[row] for row in rows.tolist()]


class Confidence(Fixed):
    """Cuts a draft before the first position at which the drafter is not sure of any token.

    Not sure means that its largest probability there is below the threshold. (The probability of the
    drawn token itself would do for the match rule only.)

    Args:
        k: most tokens.
        threshold: in [0, 1].

    Raises:
        ValueError: `threshold` is out of range.
    """

    wants_confidence = True

    def __init__(self, k: int, threshold: float = 0.3) -> None:
        super().__init__(k)
        if not 0.0 <= threshold <= 1.0:
            raise ValueError(f"confidence threshold {threshold}: use a number from 0 (cut nothing) to 1")
        self.threshold = threshold

    def cut(self, draft: Draft) -> Draft:
        """Cuts below the first unsure node of every path; drafters without a confidence are not cut."""
        if draft.confidence is None or not draft.tokens.shape[1]:
            return draft
        is_unsure = (draft.confidence < self.threshold)[:, None]
        return draft.where(~(ancestors(draft.parents) & is_unsure).any(2))


@dataclass(kw_only=True)
class _Costs:
    """Times of the passes of one batch size, by the number of tokens that were asked for."""

    seconds: dict[int, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=12)))

    def add(self, k: int, seconds: float) -> None:
        self.seconds[k].append(seconds)

    def of(self, k: int) -> float:
        """The mean time when `k` tokens are asked for, without the slowest; on a straight line between known ones."""
        known = sorted(self.seconds)
        below = max((other for other in known if other <= k), default=known[0])
        above = min((other for other in known if other >= k), default=known[-1])
        share = (k - below) / (above - below) if above > below else 0.0
        return (1 - share) * self._mean(below) + share * self._mean(above)

    def _mean(self, k: int) -> float:
        # The slowest is left out: it may have been another program's.
        times = sorted(self.seconds[k])
        return statistics.fmean(times[:-1] or times)


class Expected(Fixed):
    """Maximises the expected tokens per second; plain decoding while speculation does not pay.

    With a_i the share of recent rounds that accepted position i when asked for as many, and T(k) the
    measured time of a round that is asked for k tokens, it drafts the k for which
    (1 + a_1 + … + a_k) / T(k) is largest, if that is `GAIN` times as much as without a draft. T is learnt for each batch size (in powers of two) in a few
    rounds with the most and with no tokens. Later both are tried again in turn, as often as the time
    that such a round loses stays within `EXPLORE` of all time. What was learnt stays for the next
    batch.

    Args:
        k: most tokens.
    """

    MEMORY = 0.98
    """How much of its weight an observation keeps with every later one; a round has one for each row."""
    DRAFTS = 12
    """Longest drafts, counted by rows, that the first batches begin with, to learn what is accepted."""
    TRIALS = 3
    """Rounds with the longest draft and without one that every new batch size begins with, to learn the costs."""
    CATCHING_UP = 8
    """Plain rounds after which the next draft's time says nothing about later ones: it reads what they committed."""
    GAIN = 1.05
    """How many times as fast as plain decoding drafting has to be: that the drafter first reads the prompt, and what
    noise makes of the times, is not in T."""
    EXPLORE = 0.01
    """The share of all time that trying other lengths may lose."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self._costs: dict[int, _Costs] = defaultdict(_Costs)
        self._accepted = [0.0] * k
        self._drafted = [0.0] * k
        self._drafts = 0
        self._lost_s = 0.0
        self._best = self._asked = self._next_try = k
        self._batch = 1
        self._unread = 0

    def start(self, batch_size: int) -> None:
        """Keeps what is known of costs and acceptance."""
        self._batch = batch_size
        self._unread = self.CATCHING_UP

    def next(self) -> int:
        """The best length for the whole batch."""
        costs = self._costs[self._size]
        trials = {k: len(costs.seconds.get(k, ())) for k in (self.k, 0)}
        fewest = min(trials, key=lambda k: trials[k])
        if trials[fewest] < self.TRIALS:
            self._best = self._asked = fewest
        elif self._drafts < self.DRAFTS:
            self._best = self._asked = self.k
        else:
            best = max(range(1, self.k + 1), key=lambda k: (self._rate(k), -k))
            self._best = self._asked = best if self._rate(best) > self.GAIN * self._rate(0) else 0
            if self._lost_s <= 0.0:
                self._asked, self._next_try = self._next_try, self.k - self._next_try
        return self._asked

    @property
    def _size(self) -> int:
        return (self._batch - 1).bit_length()

    def _tokens(self, k: int) -> float:
        """Expected tokens of a row's round with `k` drafted tokens."""
        shares = (a / d if d else 0.0 for a, d in zip(self._accepted[:k], self._drafted[:k], strict=True))
        return 1.0 + sum(shares)

    def _rate(self, k: int) -> float:
        """Expected tokens of a row per second, with `k` drafted tokens a round."""
        return self._tokens(k) / self._costs[self._size].of(k)

    def observe(self, step: Step, *, draft_s: float, verify_s: float) -> None:
        """Adds a round to costs and acceptance."""
        seconds = draft_s + verify_s
        if self._asked == self._best:
            self._lost_s = max(self._lost_s - self.EXPLORE * seconds, 0.0)
        else:
            self._lost_s += max(seconds - self._tokens(self._asked) / self._rate(self._best), 0.0)
        # A draft that first reads a prompt, or what many plain rounds committed, costs more than the next one will.
        if not (self._asked and self._unread >= self.CATCHING_UP):
            self._costs[self._size].add(self._asked, seconds)
        self._unread = 0 if self._asked else self._unread + 1
        rows = [accepted for accepted, tokens in zip(step.accepted, step.tokens, strict=True) if tokens]
        self._drafts += len(rows) if self._asked == self.k else 0
        kept = self.MEMORY ** len(rows)
        for place in range(self._asked):
            self._accepted[place] = kept * self._accepted[place] + sum(accepted > place for accepted in rows)
            self._drafted[place] = kept * self._drafted[place] + len(rows)

    def keep_rows(self, rows: Tensor) -> None:
        """A smaller batch has other costs."""
        self._batch = len(rows)


POLICIES = {"fixed": Fixed, "heuristic": Heuristic, "confidence": Confidence, "expected": Expected}
