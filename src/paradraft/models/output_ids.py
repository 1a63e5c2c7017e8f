"""The ids whose logits a model returns, and which of them may be chosen.

Shape letters: U rows of the output head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from paradraft.formats.vocab_map import VocabMap


class OutputIds:
    """From the output head's rows to the logits of token ids.

    Args:
        vocab_size: V; further rows of the head are padding.
        vocab_map: the ids of the rows; None if they are the rows' indices.
        device: of the logits.
    """

    def __init__(self, vocab_size: int, vocab_map: VocabMap | None, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._vocab_map = None if vocab_map is None else vocab_map.below(vocab_size, device)
        self._forbidden, self._reserved = set[int](), set[int]()

    @property
    def with_rows(self) -> Tensor | None:
        """`[U]` the ids that the head has rows for, increasing; None for all."""
        return None if self._vocab_map is None else self._vocab_map.to_target

    def of_rows(self, vocab_map: VocabMap | None) -> OutputIds:
        """The ids of another head's rows, with the same ids that may not be chosen."""
        ids = OutputIds(self._vocab_size, vocab_map, self._device)
        ids._forbidden, ids._reserved = self._forbidden, self._reserved
        return ids

    def logits(self, rows: Tensor) -> Tensor:
        """Logits `[…, V]` from those of the rows `[…, U]`, in place where possible; -inf for ids without a row, and
        for those that may not be chosen."""
        if self._vocab_map is None:
            logits = rows.narrow(-1, 0, self._vocab_size)
        else:
            logits = self._vocab_map.spread(rows, self._vocab_size)
        for token in self._forbidden | self._reserved:
            logits.select(-1, token).fill_(-torch.inf)
        return logits

    def forbid(self, tokens: Iterable[int]) -> None:
        """Forbids tokens for good."""
        self._forbidden |= {token for token in tokens if token < self._vocab_size}

    def reserve(self, tokens: Iterable[int]) -> None:
        """Forbids tokens until the next call."""
        self._reserved.clear()
        self._reserved.update(token for token in tokens if token < self._vocab_size)
