"""The committed tokens that a draft model has not read."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paradraft import ragged
from paradraft.core import Committed, Request
from paradraft.models.cached_rows import SavedRow
from paradraft.models.causal_lm import CausalLM


class PendingTokens:
    """A draft model's KV cache, and the tokens of each row that are not in it."""

    def __init__(self, lm: CausalLM) -> None:
        self._lm = lm
        self.rows: list[list[int]] = []

    def start(self) -> None:
        """Drops all rows."""
        self._lm.start()
        self.rows = []

    def join(self, requests: Sequence[Request], prompt: Committed) -> None:
        """Adds rows whose prompts are pending."""
        self._lm.cache.join(len(requests))
        self.rows += [list(request.tokens) for request in requests]

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
        self._lm.cache.keep(rows)

    def save(self, row: int, most: int) -> SavedRow:
        """The row of the KV cache."""
        return self._lm.cache.save(row, most)

    def restore(self, row: int, saved: SavedRow, shared: int) -> None:
        """Reuses the common prefix of the saved row; the rest of the prompt stays pending."""
        known = self._lm.cache.restore(row, saved, min(shared, len(self.rows[row]) - 1))
        self.rows[row] = self.rows[row][known:]
