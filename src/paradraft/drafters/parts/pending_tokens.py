"""The committed tokens that a draft model has not read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from paradraft import ragged
from paradraft.core import Committed, Request
from paradraft.models.cached_rows import SavedRow
from paradraft.models.causal_lm import CausalLM

FIRST = 16
"""Tokens at the beginning of a shortened prompt, which all later ones attend to."""
SHORTEST = 32
"""The smallest window."""


@dataclass(frozen=True, kw_only=True)
class Windowed:
    """Settings of drafters whose draft model may read a shortened prompt.

    Args:
        draft_window: tokens at the end of a prompt that the draft model reads, and up to half as many more, beside the
            first `FIRST`; None for all. A prompt is what a row joins with: a resumed answer is part of it.
    """

    draft_window: int | None = None

    def __post_init__(self) -> None:
        if self.draft_window is not None and self.draft_window < SHORTEST:
            raise ValueError(f"draft_window={self.draft_window}: use at least {SHORTEST}, or leave it out")


def cut_of(length: int, window: int | None) -> int:
    """Number of tokens after `FIRST` that a draft model does not read of a prompt of `length`.

    It grows in steps of half a window, so that most turns of a conversation read on where the one before ended.

    >>> [cut_of(length, 100) for length in (100, 216, 217, 265, 266, 315, 316)], cut_of(9999, None)
    ([0, 100, 100, 100, 150, 150, 200], 0)
    """
    if window is None:
        return 0
    return max(length - FIRST - window, 0) // (window // 2) * (window // 2)


class PendingTokens:
    """A draft model's KV cache, and the tokens of each row that are not in it.

    Args:
        window: see `Windowed`.
    """

    def __init__(self, lm: CausalLM, *, window: int | None = None) -> None:
        self._lm, self._window = lm, window
        self.rows: list[list[int]] = []
        self._cuts: list[int] = []
        """By row, the tokens of the prompt after `FIRST` that are left out."""

    def start(self) -> None:
        """Drops all rows."""
        self._lm.start()
        self.rows, self._cuts = [], []

    def join(self, requests: Sequence[Request], prompt: Committed) -> None:
        """Adds rows whose prompts are pending."""
        self._lm.cache.join(len(requests))
        for request in requests:
            self._cuts.append(cut := cut_of(len(request.tokens), self._window))
            self.rows.append([*request.tokens[:FIRST], *request.tokens[FIRST + cut :]])

    def reads(self, prompt: int) -> int:
        """See `Drafter`."""
        return prompt - cut_of(prompt, self._window)

    def of(self, lengths: Sequence[int]) -> list[list[int]]:
        """The tokens of the rows that draft; none of the others."""
        return [row if length else [] for row, length in zip(self.rows, lengths, strict=True)]

    def catch_up(self, rows: Sequence[int], most: int) -> dict[int, int]:
        """See `Drafter`; a row that has more than `most` tokens pending is read in pieces."""
        pieces: list[list[int]] = [[] for _ in self.rows]
        behind = [row for row in rows if len(self.rows[row]) > most]
        for row in behind:
            count = min(most, len(self.rows[row]) - 1)
            most -= count
            pieces[row], self.rows[row] = self.rows[row][: count + 1], self.rows[row][count:]
        if behind:
            self._lm.prefill(pieces)
        return {row: len(self.rows[row]) for row in behind}

    def drop(self, lengths: Sequence[int]) -> None:
        """Removes the tokens of the rows that have drafted."""
        self.rows = [[] if length else row for row, length in zip(self.rows, lengths, strict=True)]

    def add(self, more: list[list[int]]) -> None:
        """Appends tokens to each row."""
        self.rows = ragged.joined(self.rows, more)

    def commit(self, new: Committed) -> None:
        """Appends the committed tokens."""
        self.add(new.tokens)

    def keep(self, rows: Tensor) -> None:
        """See `Drafter`."""
        self.rows = [self.rows[row] for row in rows.tolist()]
        self._cuts = [self._cuts[row] for row in rows.tolist()]
        self._lm.cache.keep(rows)

    def save(self, row: int, most: int) -> tuple[SavedRow, int]:
        """The row of the KV cache, and what is left out before it."""
        cut = self._cuts[row]
        return self._lm.cache.save(row, max(min(most, FIRST), most - cut)), cut

    def restore(self, row: int, saved: tuple[SavedRow, int], shared: int) -> None:
        """Reuses the common prefix of the saved row; the rest of the prompt stays pending."""
        kept, cut = saved
        common = max(min(shared, FIRST), shared - cut if cut == self._cuts[row] else 0)
        known = self._lm.cache.restore(row, kept, min(common, len(self.rows[row]) - 1))
        self.rows[row] = self.rows[row][known:]
