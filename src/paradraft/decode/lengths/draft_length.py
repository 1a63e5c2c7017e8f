"""How many tokens to draft in the next round.

A policy is asked before each round how deep the draft may be, may cut the draft that came, and
learns from what was accepted. It changes the speed, never the text: what it decides depends on
tokens that are committed, on times, and on the drafter's distributions, never on which tokens were
drawn for the round it decides about. (Under the rejection rule a draft cut in view of its own
tokens would bias the text.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from paradraft.core import Draft, Request, RoundOutput
from paradraft.decode.lengths.expected_length import Expected
from paradraft.parents import ancestors
from paradraft.tree import Tree


class LengthPolicy(Protocol):
    """Chooses the length of the next draft from what earlier rounds accepted."""

    k: int
    """Most tokens of a path of a draft."""
    wants_confidence: bool
    """Whether `cut` looks at the drafter's confidence."""
    runs_plain: bool
    """Whether it runs rounds without a draft now and then, to compare."""

    def start(self, tree: Tree | None, *, is_ragged: bool) -> None:
        """Begins with a batch without rows; what was learnt may stay.

        Args:
            tree: the shape of the drafts; None for chains.
            is_ragged: whether the target's pass takes as long as it has tokens; else as long as its longest row has.
        """

    def join(self, requests: Sequence[Request]) -> None:
        """Takes in new rows, after the others."""

    def next(self) -> list[int]:
        """For each row, how many tokens deep to draft in the next round, at most `k`; 0 decodes plainly."""

    def cut(self, draft: Draft) -> Draft:
        """The draft without what is not worth the target's time."""

    def observe(self, output: RoundOutput, *, draft_s: float, verify_s: float, other_s: float) -> None:
        """Learns what a round accepted, how long its two passes took, and how long everything else."""

    def keep(self, rows: Tensor) -> None:
        """Forgets all rows but `rows`, `[b]` the index that each had before."""


class Fixed:
    """Always drafts `k` tokens."""

    wants_confidence = False
    runs_plain = False

    def __init__(self, k: int) -> None:
        self.k = k
        self._rows = 0

    def start(self, tree: Tree | None, *, is_ragged: bool) -> None:
        """Forgets all rows."""
        self._rows = 0

    def join(self, requests: Sequence[Request]) -> None:
        """Counts the rows."""
        self._rows += len(requests)

    def next(self) -> list[int]:
        """The same for every row."""
        return [self.k] * self._rows

    def cut(self, draft: Draft) -> Draft:
        """The draft as it is."""
        return draft

    def observe(self, output: RoundOutput, *, draft_s: float, verify_s: float, other_s: float) -> None:
        """Nothing to learn."""

    def keep(self, rows: Tensor) -> None:
        """Counts the rows."""
        self._rows = len(rows)


class Heuristic(Fixed):
    """Two more after a draft that was accepted whole, one less after a rejection; for each row by itself.

    Args:
        k: most tokens.
    """

    def start(self, tree: Tree | None, *, is_ragged: bool) -> None:
        """Forgets all rows."""
        self._wanted: list[int] = []

    def join(self, requests: Sequence[Request]) -> None:
        """Every row begins with half of the most."""
        self._wanted += [max(self.k // 2, 1)] * len(requests)

    def next(self) -> list[int]:
        """Every row gets its own length."""
        return list(self._wanted)

    def observe(self, output: RoundOutput, *, draft_s: float, verify_s: float, other_s: float) -> None:
        """Grows or shrinks each row's length."""
        for row, (accepted, drafted) in enumerate(zip(output.accepted, output.drafted, strict=True)):
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
