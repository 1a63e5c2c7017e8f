"""Whether drafting pays in this run: the time of rounds beside that of plain rounds, which draft nothing.

A plain round yields one token a row. So rounds that gave a row 1.5 tokens each took the place of 1.5 plain rounds, and
drafting pays where they took less time than those. How long plain rounds take is measured in the same run: where the
length policy runs none, `Compared` has a few of the rounds draft nothing. With the match rule this changes no token.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from paradraft.core import Draft, Request, RoundOutput
from paradraft.decode.lengths.draft_length import LengthPolicy
from paradraft.tree import Tree


@dataclass(kw_only=True)
class Times:
    """A number of times, their sum and that of their squares."""

    number: float = 0.0
    total_s: float = 0.0
    squares: float = 0.0

    def add(self, seconds: float) -> None:
        """Takes in one."""
        self.number += 1.0
        self.total_s += seconds
        self.squares += seconds * seconds

    def halve(self) -> None:
        """Lets what is known count half, and keeps the mean."""
        self.number, self.total_s, self.squares = self.number / 2, self.total_s / 2, self.squares / 2

    @property
    def mean_s(self) -> float:
        """Of at least one time."""
        return self.total_s / self.number

    @property
    def spread(self) -> float:
        """The standard deviation as a share of the mean, of at least two times."""
        variance = max(self.squares - self.total_s * self.mean_s, 0.0) / (self.number - 1.0)
        return math.sqrt(variance) / max(self.mean_s, 1e-9)

    def error_s(self, least: float = 0.0) -> float:
        """The standard error of the mean, of at least two times, whose spread is at least this."""
        return max(self.spread, least) * self.mean_s / math.sqrt(self.number)


@dataclass(kw_only=True)
class Rounds:
    """The rounds of batches of one size.

    Args:
        plain: times of plain rounds.
        taken: times of the rounds that the length policy decided, plain ones among them.
        passes: of these without the drafter's part.
        worth: how many plain rounds would have given as many tokens as they did.
    """

    LEAST_PLAIN = 4
    """Plain rounds whose mean counts."""
    LAST = 2048
    """Rounds that count in full: when there are more, all count half."""

    plain: Times = field(default_factory=Times)
    taken: Times = field(default_factory=Times)
    passes: Times = field(default_factory=Times)
    worth: float = 0.0

    @property
    def is_plain_known(self) -> bool:
        """Whether enough plain rounds were timed."""
        return self.plain.number >= self.LEAST_PLAIN

    @property
    def reference(self) -> Times:
        """Times of plain rounds; where too few are known, of the target's part of rounds with drafts, which is more."""
        return self.plain if self.is_plain_known else self.passes

    def add(self, seconds: float, pass_s: float, worth: float) -> None:
        """Takes in a round that the length policy decided."""
        self.taken.add(seconds)
        self.passes.add(pass_s)
        self.worth += worth
        if self.taken.number > self.LAST:
            for times in (self.plain, self.taken, self.passes):
                times.halve()
            self.worth /= 2


class Payoff:
    """What drafting has gained or lost since the engine was made.

    >>> payoff = Payoff()
    >>> for _ in range(40):
    ...     payoff.add_plain(1, 0.010)
    ...     payoff.add(1, seconds=0.030, pass_s=0.030, worth=1.5, drafting=1, tokens=2)
    >>> round(payoff.speedup, 2), payoff.advice(("--drafter none",))
    (0.5, 'drafting made this 2.0 x slower here: try --drafter none')
    """

    LEAST_ROUNDS = 24
    """Rounds with a draft before anything is said of the speed."""
    MARGIN = 1.05
    """How many times as long as plain rounds drafting must have taken, errors taken off, to be called slower."""
    ERRORS = 2.5
    """Standard errors that are taken off on either side: about one false alarm in 10,000 comparisons."""
    FEW_TOKENS = 1.05
    """Tokens a round at which a drafter is called useless, …"""
    MANY_ROUNDS = 200
    """… and in how many rounds with a draft."""

    def __init__(self) -> None:
        self.of_size: dict[int, Rounds] = defaultdict(Rounds)
        """By the number of rows of the batch."""
        self._drafted_rounds = 0
        self.rounds = 0
        """Rounds with a draft, each row's by itself."""
        self.tokens = 0
        """What they gave."""

    def add_plain(self, rows: int, seconds: float) -> None:
        """Takes in a plain round of a batch, whose round before was plain too."""
        self.of_size[rows].plain.add(seconds)

    def add(self, rows: int, *, seconds: float, pass_s: float, worth: float, drafting: int, tokens: int) -> None:
        """Takes in a round that the length policy decided.

        Args:
            rows: of the batch.
            seconds: that it took.
            pass_s: those of them that were not the drafter's.
            worth: how many plain rounds give as many tokens.
            drafting: how many rows had a draft.
            tokens: what these rows got.
        """
        self.of_size[rows].add(seconds, pass_s, worth)
        self._drafted_rounds += drafting > 0
        self.rounds += drafting
        self.tokens += tokens

    @property
    def speedup(self) -> float | None:
        """Tokens per second, as a multiple of those of plain rounds; None where too few rounds of either kind ran."""
        known = [one for one in list(self.of_size.values()) if one.is_plain_known and one.taken.number]
        if not known or self._drafted_rounds < self.LEAST_ROUNDS:
            return None
        return sum(one.worth * one.plain.mean_s for one in known) / sum(one.taken.total_s for one in known)

    def advice(self, instead: Sequence[str]) -> str | None:
        """What to tell a user whom drafting has served badly; None where it has not, or too little is known.

        Args:
            instead: what to try.
        """
        slower, is_least = self._slower() or (None, False)
        return advice(slower, instead, is_least=is_least, rounds=self.rounds, tokens=self.tokens)

    def _slower(self) -> tuple[float, bool] | None:
        """How many times as long as plain rounds it took, if it is certain that it took longer; and whether that is the
        least that it may be."""
        known = [one for one in list(self.of_size.values()) if one.taken.number >= 2]
        if self._drafted_rounds < self.LEAST_ROUNDS or not known:
            return None
        taken_s = sum(one.taken.total_s for one in known)
        plain_s = sum(one.worth * one.reference.mean_s for one in known)
        taken_error_s = math.hypot(*(one.taken.number * one.taken.error_s() for one in known))
        # A few plain rounds may all lie between the disturbances that more of the others show.
        plain_error_s = math.hypot(*(one.worth * one.reference.error_s(one.passes.spread) for one in known))
        if taken_s - self.ERRORS * taken_error_s < self.MARGIN * (plain_s + self.ERRORS * plain_error_s):
            return None
        return taken_s / plain_s, not all(one.is_plain_known for one in known)


def advice(
    slower: float | None, instead: Sequence[str], *, is_least: bool = False, rounds: int, tokens: float
) -> str | None:
    """One sentence for a user whom drafting has served badly; None for others.

    Args:
        slower: how many times as slow as plain rounds drafting was, where that is certain and above 1.
        instead: what to try.
        is_least: whether `slower` is the least that it may be.
        rounds: with a draft.
        tokens: that these gave.

    >>> advice(6.04, ("--lengths expected", "--drafter none"), rounds=90, tokens=120)
    'drafting made this 6.0 x slower here: try --lengths expected, or --drafter none'
    >>> advice(None, ("--lengths expected", "--drafter none"), rounds=210, tokens=214)
    '210 rounds with a draft gave 1.02 tokens each: try another drafter, or --drafter none'
    """
    is_useless = rounds >= Payoff.MANY_ROUNDS and tokens < Payoff.FEW_TOKENS * rounds
    if slower is None and not is_useless:
        return None
    gave = f"{rounds} rounds with a draft gave {tokens / max(rounds, 1):.2f} tokens each"
    found = "" if slower is None else f"drafting made this {'at least ' * is_least}{slower:.1f} x slower here"
    if is_useless:
        found = f"{found}, {gave}" if found else gave
        instead = ("another drafter", instead[-1])
    return f"{found}: try {', or '.join(instead)}"


class Compared:
    """A length policy whose rounds are compared with plain rounds.

    Args:
        policy: decides the lengths.
        tries_plain: now and then have a few rounds draft nothing, where the policy runs no plain rounds by itself.
    """

    EVERY = 24
    """Rounds with a draft before plain rounds are tried; each time half as many more, …"""
    MOST = 128
    """… up to these."""
    TRIED = 3
    """Plain rounds of a try. Two are timed: after drafts the first one takes longer."""

    def __init__(self, policy: LengthPolicy, *, tries_plain: bool) -> None:
        self.policy = policy
        self.k, self.wants_confidence, self.runs_plain = policy.k, policy.wants_confidence, policy.runs_plain
        self.payoff = Payoff()
        self._tries_plain = tries_plain and not policy.runs_plain
        self._every, self._since, self._left = float(self.EVERY), 0, 0
        self._asked: list[int] = []
        self._was_plain = False

    def start(self, tree: Tree | None, *, is_ragged: bool) -> None:
        """See `LengthPolicy`."""
        self._was_plain = False
        self.policy.start(tree, is_ragged=is_ragged)

    def join(self, requests: Sequence[Request]) -> None:
        """See `LengthPolicy`."""
        self._was_plain = False
        self.policy.join(requests)

    def next(self) -> list[int]:
        """See `LengthPolicy`; none in a try."""
        wanted = self.policy.next()
        self._asked = [0] * len(wanted) if self._left else wanted
        return self._asked

    def cut(self, draft: Draft) -> Draft:
        """See `LengthPolicy`."""
        return self.policy.cut(draft)

    def observe(self, output: RoundOutput, *, draft_s: float, verify_s: float, other_s: float) -> None:
        """See `LengthPolicy`."""
        self.policy.observe(output, draft_s=draft_s, verify_s=verify_s, other_s=other_s)
        rows, is_plain = len(output.tokens), not any(self._asked) and not any(output.nodes)
        is_timed, self._was_plain = is_plain and self._was_plain, is_plain
        if is_timed:
            self.payoff.add_plain(rows, verify_s + other_s)
        if self._left:
            self._left -= 1
            return
        drafting = [len(tokens) for tokens, nodes in zip(output.tokens, output.nodes, strict=True) if nodes]
        self.payoff.add(
            rows,
            seconds=draft_s + verify_s + other_s,
            pass_s=verify_s + other_s,
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
