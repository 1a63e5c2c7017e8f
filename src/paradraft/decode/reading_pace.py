"""How much of prompts is read between two rounds, so that nobody waits long for the next tokens of an answer.

A prompt that joins is read before the next round, and all answers stand still meanwhile. So where somebody watches them
grow, long prompts are read in pieces. A piece takes about as long as a round: tokens come at most about twice as slowly
while the prompts of others are read.
"""

from __future__ import annotations

import statistics
from collections import deque


class ReadingPace:
    """Says how many tokens may be read, from how long rounds and readings took.

    >>> pace = ReadingPace()
    >>> pace.most
    64
    >>> for _ in range(3):
    ...     pace.decode(0.004)
    ...     pace.read(100, 0.010)
    >>> pace.most
    40
    """

    LEAST = 16
    """Fewer tokens take hardly less time."""
    FIRST = 64
    """Tokens as long as no time is known."""
    ROUNDS = 256
    """Rounds that count: also of a fuller batch, a while ago."""
    READINGS = 16

    def __init__(self) -> None:
        self._rounds_s = deque[float](maxlen=self.ROUNDS)
        self._tokens_s = deque[float](maxlen=self.READINGS)

    def decode(self, seconds: float) -> None:
        """Takes in how long a round took."""
        self._rounds_s.append(seconds)

    def read(self, tokens: int, seconds: float) -> None:
        """Takes in how long reading took."""
        if tokens:
            self._tokens_s.append(seconds / tokens)

    @property
    def most(self) -> int:
        """Tokens that take about as long as a round."""
        if not self._rounds_s or not self._tokens_s:
            return self.FIRST
        return max(int(statistics.median(self._rounds_s) / max(statistics.median(self._tokens_s), 1e-9)), self.LEAST)
