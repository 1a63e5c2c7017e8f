"""Mean gain of drafts in a round, by the place in the answer."""

from __future__ import annotations

MEMORY = 0.98
"""Decay of the mean at a place per round there."""


class RestGains:
    """Gains in the rest of an answer: once that repeats itself, other parts may draft as much as a slow one.

    Places are in groups: tokens 0 and 1, 2 to 3, 4 to 7 and so on.

    >>> gains = RestGains()
    >>> for place, gain in [(1, 2.0), (3, 1.0), (6, 0.0)]:
    ...     gains.learn(place, gain)
    >>> gains.after(1, 100, per_round=1.0, guess=2.0), gains.after(1, 4, per_round=2.0, guess=2.0)
    (2.0, 0.5)
    """

    def __init__(self) -> None:
        self._means: dict[int, float] = {}

    def learn(self, place: int, gain: float) -> None:
        """Adds the gain of a round after `place` tokens of an answer."""
        group = _group(place)
        self._means[group] = MEMORY * self._means.get(group, gain) + (1.0 - MEMORY) * gain

    def after(self, place: int, end: float, *, per_round: float, guess: float) -> float:
        """The gains of the rounds that follow the one at a place, up to the end of the answer.

        Args:
            per_round: tokens of a round.
            guess: gain of a round before any is known.
        """
        total, at = 0.0, place + per_round
        while at < end:
            group = _group(int(at))
            known = max((each for each in self._means if each <= group), default=None)
            upto = min(2.0 ** (group + 1), end)
            total += (upto - at) / per_round * (guess if known is None else self._means[known])
            at = upto
        return total


def _group(place: int) -> int:
    return max(place, 1).bit_length() - 1
