"""Length policies: the draft length of each round.

A policy bounds the depth of a draft before each round, may cut the draft afterwards, and learns from the acceptance. It
changes the speed, never the text: its decisions depend on committed tokens, on times, and on the drafter's
distributions, never on the tokens drawn for the round that it decides about. (Under the rejection rule a draft cut
depending on its own tokens would bias the text.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from paradraft.core import Draft, Request
from paradraft.decode.lengths.expected_length import Expected
from paradraft.decode.lengths.valued_drafts import ValuedDrafts
from paradraft.decode.stats import RoundOutput, RoundTime
from paradraft.parents import ancestors
from paradraft.traits import Traits
from paradraft.tree import Tree
from paradraft.worth import Worth


class LengthPolicy(Protocol):
    """Chooses the length of the next draft."""

    k: int
    """Most tokens of a path of a draft."""
    wants_confidence: bool
    """Whether `cut` uses the drafter's confidence."""
    runs_plain: bool
    """Whether times decide when a row drafts, so that it runs plain rounds now and then, to compare."""

    @property
    def worth(self) -> Worth:
        """That of drafts in the round for which `next` was called last."""

    def start(self, tree: Tree | None, *, is_ragged: bool) -> None:
        """Begins with an empty batch; learnt statistics may stay.

        Args:
            tree: the shape of the drafts; None for chains.
            is_ragged: whether the time of the target's pass depends on its total number of tokens; else on the longest
                row.
        """

    def join(self, requests: Sequence[Request]) -> None:
        """Adds rows after the others."""

    def learn_prefill(self, tokens: int, seconds: float) -> None:
        """Learns from a prefill of the target."""

    def next(self) -> list[int]:
        """Largest draft depth of each row in the next round, at most `k`; 0 decodes plainly."""

    def postpone(self, unread: Mapping[int, int]) -> None:
        """Sets the lengths of rows to 0 whose draft model reads in this round; `unread` has their tokens left."""

    def cut(self, draft: Draft) -> Draft:
        """Removes nodes that are not worth verifying."""

    def observe(self, output: RoundOutput, time: RoundTime | None) -> None:
        """Learns from a round's acceptance and its time, which is None for a round that read prompts too."""

    def keep(self, rows: Tensor) -> None:
        """Drops and reorders rows: `[b]` the old index of each row."""


class Fixed:
    """Always drafts `k` tokens."""

    wants_confidence = False
    runs_plain = False
    worth = Worth()

    def __init__(self, k: int) -> None:
        self.k = k
        self._rows = 0

    def start(self, tree: Tree | None, *, is_ragged: bool) -> None:
        """Drops all rows."""
        self._rows = 0

    def join(self, requests: Sequence[Request]) -> None:
        """Counts the rows."""
        self._rows += len(requests)

    def learn_prefill(self, tokens: int, seconds: float) -> None:
        """Does nothing."""

    def next(self) -> list[int]:
        """The same for every row."""
        return [self.k] * self._rows

    def postpone(self, unread: Mapping[int, int]) -> None:
        """Does nothing: without times that decide, no row is postponed."""

    def cut(self, draft: Draft) -> Draft:
        """Returns the draft unchanged."""
        return draft

    def observe(self, output: RoundOutput, time: RoundTime | None) -> None:
        """Does nothing."""

    def keep(self, rows: Tensor) -> None:
        """Counts the rows."""
        self._rows = len(rows)


class Heuristic(Fixed):
    """Per row, two tokens more after a fully accepted draft, one less after a rejection; at most `k`."""

    def start(self, tree: Tree | None, *, is_ragged: bool) -> None:
        """Drops all rows."""
        self._wanted: list[int] = []

    def join(self, requests: Sequence[Request]) -> None:
        """Every row begins with half of `k`."""
        self._wanted += [max(self.k // 2, 1)] * len(requests)

    def next(self) -> list[int]:
        """Returns the length of each row."""
        return list(self._wanted)

    def observe(self, output: RoundOutput, time: RoundTime | None) -> None:
        """Updates the length of each row."""
        for row, (accepted, drafted) in enumerate(zip(output.accepted, output.drafted, strict=True)):
            if drafted:
                change = 2 if accepted == drafted else -1
                self._wanted[row] = min(max(self._wanted[row] + change, 1), self.k)

    def keep(self, rows: Tensor) -> None:
        """Keeps the lengths of these rows."""
        self._wanted = [self._wanted[row] for row in rows.tolist()]


class Confidence(Fixed):
    """Cuts a draft before the first position at which the drafter's largest probability is below a threshold in [0, 1].

    (The probability of the drawn token itself would be valid for the match rule only.)
    """

    wants_confidence = True

    def __init__(self, k: int, threshold: float = 0.3) -> None:
        super().__init__(k)
        if not 0.0 <= threshold <= 1.0:
            raise ValueError(f"confidence threshold {threshold}: use a number from 0 (cut nothing) to 1")
        self.threshold = threshold

    def cut(self, draft: Draft) -> Draft:
        """Cuts every path before its first unsure node; does nothing for drafters without confidence."""
        if draft.confidence is None or not draft.tokens.shape[1]:
            return draft
        is_unsure = (draft.confidence < self.threshold)[:, None]
        return draft.where(~(ancestors(draft.parents) & is_unsure).any(2))


POLICIES: dict[str, Callable[[int], LengthPolicy]] = {
    "fixed": Fixed, "heuristic": Heuristic, "confidence": Confidence, "expected": Expected,
}  # fmt: skip
"""Policies by name; each is constructed from K."""


def length_policy(
    name: str, k: int, drafter: Traits, *, reading_work: float, reads: Callable[[int], int]
) -> LengthPolicy:
    """The policy of this name for a drafter with these traits; for `reading_work` and `reads` see `Expected`."""
    if name != "expected":
        return POLICIES[name](k)
    if drafter.estimates:
        return ValuedDrafts(k)
    return Expected(k, one_by_one=drafter.drafts_one_by_one, reading_work=reading_work, reads=reads)
