"""How many tokens to draft in the next round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from paradraft.core import Step


class LengthPolicy(Protocol):
    """Chooses the length of the next draft from what earlier rounds accepted."""

    def next(self) -> int:
        """Tokens to draft in the next round; 0 decodes plainly."""

    def observe(self, step: Step) -> None:
        """Learns what a round accepted."""


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """Always drafts `k` tokens."""

    k: int

    def next(self) -> int:
        """See `LengthPolicy`."""
        return self.k

    def observe(self, step: Step) -> None:
        """Nothing to learn."""
