"""Accepted tokens of chains by depth, as counted."""

from __future__ import annotations

import itertools
import operator

MEMORY = 0.98
"""Decay of counts per draft."""
FIRST, PRIOR = 2 / 3, 2.0
"""Rate before any is known, of which an endless chain has two accepted tokens, and the weight of a guess in drafts."""


class DepthRates:
    """How often tokens are accepted after accepted ones, by depth; older drafts weigh less.

    >>> rates = DepthRates()
    >>> for _ in range(100):
    ...     rates.learn(right=1, decided=2)
    >>> [round(tokens, 1) for tokens in rates.accepted(3)]
    [0.0, 1.0, 1.0, 1.0]
    """

    def __init__(self) -> None:
        self._was: list[float] = []
        self._could: list[float] = []

    def learn(self, *, right: int, decided: int) -> None:
        """Adds a draft whose first `right` tokens were accepted and whose first `decided` were accepted or refused."""
        more = [0.0] * (decided - len(self._could))
        self._was, self._could = self._was + more, self._could + more
        for depth in range(decided):
            self._was[depth] = MEMORY * self._was[depth] + (depth < right)
            self._could[depth] = MEMORY * self._could[depth] + 1.0

    def rate(self, depth: int, others: DepthRates | None = None) -> float:
        """The rate of a depth, from 0; `others` are the rates that are likely before any is known."""
        guess = FIRST if others is None else others.rate(depth)
        if depth >= len(self._could):
            return guess
        return (self._was[depth] + PRIOR * guess) / (self._could[depth] + PRIOR)

    def accepted(self, most: int, others: DepthRates | None = None) -> list[float]:
        """The mean number of accepted tokens of a chain of 0, 1, … and `most` tokens."""
        reached = itertools.accumulate((self.rate(depth, others) for depth in range(most)), operator.mul)
        return list(itertools.accumulate(reached, initial=0.0))
