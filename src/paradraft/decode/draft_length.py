"""How many tokens to draft in the next round.

A policy is asked before each round how deep the draft may be, may cut the draft that came, and
learns from what was accepted. It changes the speed, never the text: what it decides depends on
tokens that are committed, on times, and on the drafter's distributions, never on which tokens were
drawn for the round it decides about. (Under the rejection rule a draft cut in view of its own
tokens would bias the text.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from paradraft.core import Draft, RoundOutput
from paradraft.decode.expected_length import Expected
from paradraft.ragged import upload
from paradraft.tree import ancestors, depths


class LengthPolicy(Protocol):
    """Chooses the length of the next draft from what earlier rounds accepted."""

    wants_confidence: bool
    """Whether `cut` looks at the drafter's confidence."""

    def start(self) -> None:
        """Begins with a batch without rows; what was learnt about costs may stay."""

    def join(self, rows: int) -> None:
        """Takes in so many new rows, after the others."""

    def next(self) -> int:
        """Most tokens to draft in any row of the next round; 0 decodes plainly."""

    def cut(self, draft: Draft) -> Draft:
        """The draft without what is not worth the target's time."""

    def observe(self, step: RoundOutput, *, draft_s: float, verify_s: float) -> None:
        """Learns what a round accepted and how long its two passes took."""

    def keep(self, rows: Tensor) -> None:
        """Forgets all rows but `rows`, `[b]` the index that each had before."""


class Fixed:
    """Always drafts `k` tokens."""

    wants_confidence = False

    def __init__(self, k: int) -> None:
        self.k = k

    def start(self) -> None:
        """Nothing to forget."""

    def join(self, rows: int) -> None:
        """Nothing to take in."""

    def next(self) -> int:
        """See `LengthPolicy`."""
        return self.k

    def cut(self, draft: Draft) -> Draft:
        """The draft as it is."""
        return draft

    def observe(self, step: RoundOutput, *, draft_s: float, verify_s: float) -> None:
        """Nothing to learn."""

    def keep(self, rows: Tensor) -> None:
        """Nothing to forget."""


class Heuristic(Fixed):
    """Two more after a draft that was accepted whole, one less after a rejection; for each row by itself.

    Args:
        k: most tokens.
    """

    def start(self) -> None:
        """Forgets all rows."""
        self._wanted: list[int] = []

    def join(self, rows: int) -> None:
        """Every row begins with half of the most."""
        self._wanted += [max(self.k // 2, 1)] * rows

    def next(self) -> int:
        """What the most successful row gets."""
        return max(self._wanted)

    def cut(self, draft: Draft) -> Draft:
        """Every row gets its own length."""
        if min(self._wanted) == max(self._wanted) or not draft.tokens.shape[1]:
            return draft
        most_B1 = upload(self._wanted, draft.tokens.device)[:, None]
        return draft.where(depths(draft.parents) < most_B1)

    def observe(self, step: RoundOutput, *, draft_s: float, verify_s: float) -> None:
        """Grows or shrinks each row's length."""
        for row, (accepted, drafted) in enumerate(zip(step.accepted, step.drafted, strict=True)):
            if drafted:
                change = 2 if accepted == drafted else -1
                self._wanted[row] = min(max(self._wanted[row] + change, 1), self.k)

    def keep(self, rows: Tensor) -> None:
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


POLICIES: dict[str, Callable[[int], LengthPolicy]] = {
    "fixed": Fixed, "heuristic": Heuristic, "confidence": Confidence, "expected": Expected,
}  # fmt: skip
"""The policies by name; each is made from K."""
