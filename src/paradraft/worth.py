"""The worth of drafts, which length policies estimate for drafters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, kw_only=True)
class Worth:
    """The worth of drafts in the next round.

    Args:
        least_value: least value of the best node of a draft that may pay; where no node has it, no draft is needed.
        odds: by part of a union, or 0, a factor of the odds of estimated chances; 1 where it has none.
        plain_s: expected time of a round without a draft, in seconds; 0 if it is unknown.
        pause: number of rounds, the next one included, in which no draft will be asked for.

    >>> Worth(odds={1: 0.5}).of_part(1).factor
    0.5
    """

    least_value: float = 0.0
    odds: Mapping[int, float] = field(default_factory=dict)
    plain_s: float = 0.0
    pause: int = 0

    @property
    def factor(self) -> float:
        """The factor of the odds of a drafter that is no union."""
        return self.odds.get(0, 1.0)

    def of_part(self, part: int) -> Worth:
        """The worth for a part of a union."""
        return replace(self, odds={0: self.odds.get(part, 1.0)})
