"""The time that evaluations take of a run."""

from __future__ import annotations

import time

SHARE = 0.1
"""Most of a run's time that evaluations take unless a recipe says how often to evaluate."""


class EvaluationTime:
    """Measures evaluations, and allows another while they take at most `SHARE` of the time."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._spent_s = self._last_s = 0.0

    def add(self, taken_s: float) -> None:
        """Records an evaluation."""
        self._last_s = taken_s
        self._spent_s += taken_s

    def allows(self) -> bool:
        """Whether another evaluation, as long as the last one, stays within the share of the time until its end."""
        elapsed_s = time.monotonic() - self._began_s
        return self._spent_s + self._last_s <= SHARE * (elapsed_s + self._last_s)

    @property
    def in_words(self) -> str:
        """The share so far, for messages."""
        return f"evaluations took {self._spent_s / max(time.monotonic() - self._began_s, 1e-9):.0%} of the time"
