"""Prefill chunk size, chosen to bound the delay of running requests.

A prefill delays the next round of all running requests. So if one of them is streamed, long prompts are prefilled in
chunks. A chunk takes about as long as a round: chunked prefill slows the other requests down at most about twice.
"""

from __future__ import annotations

import statistics
from collections import deque


class ReadingPace:
    """Chooses the prefill chunk size from the times of rounds and prefills.

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
    """Tokens while no time is known."""
    ROUNDS = 256
    """Rounds remembered: enough to include those of a fuller batch, a while ago."""
    READINGS = 16
    """Prefills remembered."""

    def __init__(self) -> None:
        self._rounds_s = deque[float](maxlen=self.ROUNDS)
        self._tokens_s = deque[float](maxlen=self.READINGS)

    def decode(self, seconds: float) -> None:
        """Records the time of a round."""
        self._rounds_s.append(seconds)

    def read(self, tokens: int, seconds: float) -> None:
        """Records the time of a prefill."""
        if tokens:
            self._tokens_s.append(seconds / tokens)

    @property
    def most(self) -> int:
        """Chunk size: tokens whose prefill takes about as long as a round."""
        if not self._rounds_s or not self._tokens_s:
            return self.FIRST
        return max(int(statistics.median(self._rounds_s) / max(statistics.median(self._tokens_s), 1e-9)), self.LEAST)
