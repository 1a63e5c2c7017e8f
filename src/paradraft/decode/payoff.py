"""Speedup of drafting, measured in the running engine against plain rounds, which draft nothing.

A plain round yields one token per row. So rounds that gave a row 1.5 tokens each replaced 1.5 plain rounds, and
drafting pays if they took less time than those. Plain rounds are timed in the same run: if the length policy runs none,
`Compared` inserts a few. With the match rule this changes no token.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from paradraft.core import Draft, Request
from paradraft.decode.lengths.draft_length import LengthPolicy
from paradraft.decode.stats import RoundOutput, RoundTime
from paradraft.tree import Tree
from paradraft.worth import Worth


@dataclass(kw_only=True)
class TimeSums:
    """Sums over measured times, for mean and standard error."""

    count: float = 0.0
    total_s: float = 0.0
    squares: float = 0.0

    def add(self, seconds: float) -> None:
        """Adds a measurement."""
        self.count += 1.0
        self.total_s += seconds
        self.squares += seconds * seconds

    def halve(self) -> None:
        """Halves the weight of all measurements; the mean stays."""
        self.count, self.total_s, self.squares = self.count / 2, self.total_s / 2, self.squares / 2

    @property
    def mean_s(self) -> float:
        """The mean of at least one time."""
        return self.total_s / self.count

    @property
    def spread(self) -> float:
        """Relative standard deviation of at least two times."""
        variance = max(self.squares - self.total_s * self.mean_s, 0.0) / (self.count - 1.0)
        return math.sqrt(variance) / max(self.mean_s, 1e-9)

    def error_s(self, least: float = 0.0) -> float:
        """Standard error of the mean of at least two times; `least` is a lower bound of their spread."""
        return max(self.spread, least) * self.mean_s / math.sqrt(self.count)


@dataclass(kw_only=True)
class Rounds:
    """The rounds of batches of one size.

    Args:
        plain: times of plain rounds.
        taken: times of the rounds that the length policy decided, plain ones among them.
        passes: `taken` without the drafter's time.
        worth: number of plain rounds that give as many tokens as `taken`.
    """

    LEAST_PLAIN = 4
    """Fewest plain rounds whose mean is used."""
    LAST = 2048
    """When there are more rounds, the weight of all is halved."""

    plain: TimeSums = field(default_factory=TimeSums)
    taken: TimeSums = field(default_factory=TimeSums)
    passes: TimeSums = field(default_factory=TimeSums)
    worth: float = 0.0

    @property
    def is_plain_known(self) -> bool:
        """Whether `LEAST_PLAIN` plain rounds were timed."""
        return self.plain.count >= self.LEAST_PLAIN

    @property
    def reference(self) -> TimeSums:
        """Times of plain rounds; if there are too few, those of `passes`, which are longer."""
        return self.plain if self.is_plain_known else self.passes

    def add(self, seconds: float, pass_s: float, worth: float) -> None:
        """Adds a round that the length policy decided."""
        self.taken.add(seconds)
        self.passes.add(pass_s)
        self.worth += worth
        if self.taken.count > self.LAST:
            for times in (self.plain, self.taken, self.passes):
                times.halve()
            self.worth /= 2


class Payoff:
    """Speedup of drafting since the engine was created.

    >>> payoff = Payoff()
    >>> for _ in range(40):
    ...     payoff.add_plain(1, 0.010)
    ...     payoff.add(1, seconds=0.030, pass_s=0.030, worth=1.5, drafting=1, tokens=2)
    >>> round(payoff.speedup, 2), payoff.advice(("--drafter none",))
    (0.5, 'drafting made this 2.0 x slower here: try --drafter none')
    """

    LEAST_ROUNDS = 24
    """Rounds with a draft before the speed is judged."""
    MARGIN = 1.05
    """Smallest slowdown against plain rounds that is reported, after subtracting errors."""
    ERRORS = 2.5
    """Standard errors subtracted on either side: about one false alarm in 10,000 comparisons."""
    FEW_TOKENS = 1.05
    """A drafter with fewer tokens per round is called useless …"""
    MANY_ROUNDS = 200
    """… after this many rounds with a draft."""

    def __init__(self) -> None:
        self.of_size: dict[int, Rounds] = defaultdict(Rounds)
        """By number of rows of the batch."""
        self._drafted_rounds = 0
        self.rounds = 0
        """Rounds with a draft, summed over rows."""
        self.tokens = 0
        """Tokens of these rounds."""

    def add_plain(self, rows: int, seconds: float) -> None:
        """Adds a plain round; the round before it must have been plain too."""
        self.of_size[rows].plain.add(seconds)

    def add(self, rows: int, *, seconds: float, pass_s: float, worth: float, drafting: int, tokens: int) -> None:
        """Adds a round that the length policy decided, in which `drafting` rows had a draft and got `tokens`.

        Args:
            pass_s: `seconds` without the drafter's.
            worth: number of plain rounds that give as many tokens.
        """
        self.of_size[rows].add(seconds, pass_s, worth)
        self._drafted_rounds += drafting > 0
        self.rounds += drafting
        self.tokens += tokens

    @property
    def speedup(self) -> float | None:
        """Tokens per second relative to plain rounds; None if too few rounds of either kind ran."""
        known = [each for each in list(self.of_size.values()) if each.is_plain_known and each.taken.count]
        if not known or self._drafted_rounds < self.LEAST_ROUNDS:
            return None
        return sum(each.worth * each.plain.mean_s for each in known) / sum(each.taken.total_s for each in known)

    def advice(self, instead: Sequence[str]) -> str | None:
        """`advice` on what to try `instead`; None if drafting pays, or if too little is known."""
        slower, is_least = self._slower() or (None, False)
        return advice(slower, instead, is_least=is_least, rounds=self.rounds, tokens=self.tokens)

    def _slower(self) -> tuple[float, bool] | None:
        """The slowdown against plain rounds if it is certain, and whether it is only a lower bound."""
        known = [each for each in list(self.of_size.values()) if each.taken.count >= 2]
        if self._drafted_rounds < self.LEAST_ROUNDS or not known:
            return None
        taken_s = sum(each.taken.total_s for each in known)
        plain_s = sum(each.worth * each.reference.mean_s for each in known)
        taken_error_s = math.hypot(*(each.taken.count * each.taken.error_s() for each in known))
        # A few plain rounds may all miss the disturbances that the more numerous other rounds show.
        plain_error_s = math.hypot(*(each.worth * each.reference.error_s(each.passes.spread) for each in known))
        if taken_s - self.ERRORS * taken_error_s < self.MARGIN * (plain_s + self.ERRORS * plain_error_s):
            return None
        return taken_s / plain_s, not all(each.is_plain_known for each in known)


def advice(
    slower: float | None, instead: Sequence[str], *, is_least: bool = False, rounds: int, tokens: float
) -> str | None:
    """One sentence for a user whose drafter does not pay, with `tokens` of `rounds` with a draft; None for others.

    Args:
        slower: slowdown against plain rounds, if it is certain and above 1.

    >>> advice(6.04, ("--lengths expected", "--drafter none"), rounds=90, tokens=120)
    'drafting made this 6.0 x slower here: try --lengths expected, or --drafter none'
    >>> advice(None, ("--lengths expected", "--drafter none"), rounds=210, tokens=214)
    '210 rounds with a draft gave 1.02 tokens each: try another drafter, or --drafter none'
    """
    is_useless = rounds >= Payoff.MANY_ROUNDS and tokens < Payoff.FEW_TOKENS * rounds
    if slower is None and not is_useless:
        return None
    gave = f"{rounds} rounds with a draft gave {tokens / max(rounds, 1):.2f} tokens each"
    sentence = "" if slower is None else f"drafting made this {'at least ' * is_least}{slower:.1f} x slower here"
    if is_useless:
        sentence = f"{sentence}, {gave}" if sentence else gave
        instead = ("another drafter", instead[-1])
    return f"{sentence}: try {', or '.join(instead)}"


class Compared:
    """Compares a length policy with plain rounds; `tries_plain` inserts some, unless the policy runs them itself."""

    EVERY = 24
    """Rounds with a draft before the first trial of plain rounds; the interval grows by half each time, …"""
    MOST = 128
    """… up to this."""
    TRIED = 3
    """Plain rounds of a trial. Two are timed: after drafts the first one takes longer."""

    def __init__(self, policy: LengthPolicy, *, tries_plain: bool) -> None:
        self.policy = policy
        self.k, self.wants_confidence, self.runs_plain = policy.k, policy.wants_confidence, policy.runs_plain
        self.payoff = Payoff()
        self._tries_plain = tries_plain and not policy.runs_plain
        self._every, self._since, self._left = float(self.EVERY), 0, 0
        self._requested: list[int] = []
        self._was_plain = False

    def start(self, tree: Tree | None, *, is_ragged: bool) -> None:
        """See `LengthPolicy`."""
        self._was_plain = False
        self.policy.start(tree, is_ragged=is_ragged)

    def join(self, requests: Sequence[Request]) -> None:
        """See `LengthPolicy`."""
        self._was_plain = False
        self.policy.join(requests)

    @property
    def worth(self) -> Worth:
        """See `LengthPolicy`."""
        return self.policy.worth

    def next(self) -> list[int]:
        """See `LengthPolicy`; 0 in a trial."""
        wanted = self.policy.next()
        self._requested = [0] * len(wanted) if self._left else wanted
        return self._requested

    def learn_prefill(self, tokens: int, seconds: float) -> None:
        """See `LengthPolicy`."""
        self.policy.learn_prefill(tokens, seconds)

    def postpone(self, unread: Mapping[int, int]) -> None:
        """See `LengthPolicy`."""
        self.policy.postpone(unread)

    def cut(self, draft: Draft) -> Draft:
        """See `LengthPolicy`."""
        return self.policy.cut(draft)

    def observe(self, output: RoundOutput, time: RoundTime | None) -> None:
        """See `LengthPolicy`."""
        self.policy.observe(output, time)
        if time is None:
            self._was_plain = False
            return
        rows, is_plain = len(output.tokens), not any(self._requested) and not any(output.nodes)
        is_timed, self._was_plain = is_plain and self._was_plain, is_plain
        if is_timed:
            self.payoff.add_plain(rows, time.total_s - time.draft_s)
        if self._left:
            self._left -= 1
            return
        drafting = [len(tokens) for tokens, nodes in zip(output.tokens, output.nodes, strict=True) if nodes]
        self.payoff.add(
            rows,
            seconds=time.total_s,
            pass_s=time.total_s - time.draft_s,
            worth=sum(map(len, output.tokens)) / max(sum(map(bool, output.tokens)), 1),
            drafting=len(drafting),
            tokens=sum(drafting),
        )
        self._since += bool(drafting)
        if self._tries_plain and self._since >= self._every:
            self._every, self._since, self._left = min(1.5 * self._every, self.MOST), 0, self.TRIED

    def keep(self, rows: Tensor) -> None:
        """See `LengthPolicy`."""
        self._was_plain = False
        self.policy.keep(rows)
