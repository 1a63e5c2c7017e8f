"""The KV cache of a batch: rows join and leave, grow, and keep what passes have written.

Shape letters: B rows of a batch, C slots, H key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paradraft.models import kv_cache
from paradraft.models.forward.cuda_graphs import graph_size
from paradraft.models.forward.eager import BUCKET
from paradraft.ragged import from_lists, upload

FIRST_CAPACITY = 4096
"""Initial capacity of a row, unless the model's is smaller."""


@dataclass(frozen=True, kw_only=True)
class SavedRow:
    """Keys and values of the first `length` tokens of a row."""

    length: int
    storage: kv_cache.Storage


class Holder(Protocol):
    """Has references to a storage."""

    def forget(self) -> None:
        """Drops them."""


class CachedRows:
    """The rows of a batch: their slots and lengths.

    Args:
        model: whose keys and values it holds.
        capacity: most tokens of a row.
        width: most tokens of one pass; a row has as many extra slots.
        devices: one for each layer.
        ranks: tensor-parallel processes that share the heads of each layer.
    """

    def __init__(
        self, model: PreTrainedModel, *, capacity: int, width: int, devices: Sequence[torch.device], ranks: int = 1
    ) -> None:
        self.capacity = capacity
        self.holders = WeakSet[Holder]()
        """They forget the storage before another is allocated."""
        self._model, self._width, self._devices, self._ranks = model, width, devices, ranks
        self._slots = self._slots_for(min(capacity, FIRST_CAPACITY))
        self._largest = self._allocate(1, self._slots)
        self.storage: kv_cache.Storage = []
        """Of the rows that decoding passes read."""
        self.decoding = 0
        """Number of rows that decoding passes read; later rows are still in prefill."""
        self.starts = 0
        """Number of `start` calls: because there is one cache, each call drops the rows of the one before."""
        self._set_lengths([])

    def _slots_for(self, tokens: int) -> int:
        """Slots for a row of this length and one pass after it."""
        return -(-(tokens + graph_size(self._width)) // BUCKET) * BUCKET

    def _allocate(self, batch_size: int, slots: int) -> kv_cache.Storage:
        return kv_cache.allocate(
            self._model.config,
            batch_size=batch_size,
            capacity=slots,
            dtype=self._model.dtype,
            devices=self._devices,
            ranks=self._ranks,
        )

    def start(self) -> None:
        """Removes all rows."""
        self.starts += 1
        self.storage, self.decoding = [], 0
        self._set_lengths([])

    def join(self, rows: int, *, in_prefill: bool = False) -> None:
        """Appends empty rows.

        Args:
            rows: their number.
            in_prefill: decoding passes skip these rows until `admit`, and so do others that join before.

        Raises:
            ValueError: the cache does not fit into memory; also in `restore` and `reserve`, which grow it.
        """
        assert in_prefill or self.decoding == len(self.lengths), "rows are apart"
        total = len(self.lengths) + rows
        if not self._largest or len(self._largest[0][0]) < total:
            self._grow(total, self._slots)
        self._set_lengths([*self.lengths, *[0] * rows])
        self._use(self.decoding if in_prefill else total)

    def admit(self, rows: Sequence[int]) -> None:
        """Ends the prefill of rows: they move behind those that decoding passes read, which read them too."""
        later = [row for row in range(self.decoding, len(self.lengths)) if row not in rows]
        order = [*range(self.decoding), *rows, *later]
        if order != sorted(order):
            kv_cache.move_rows(self.rows_from(0), torch.tensor(order), self.lengths)
            self._set_lengths([self.lengths[row] for row in order])
        self._use(self.decoding + len(rows))

    def _use(self, rows: int) -> None:
        """Sets how many rows decoding passes read."""
        self.decoding, self.storage = rows, kv_cache.rows_of(self._largest, 0, rows)

    def first(self, rows: int) -> kv_cache.Storage:
        """The first rows: those that decoding passes read, or all."""
        return self.storage if rows == self.decoding else kv_cache.rows_of(self._largest, 0, rows)

    def rows_from(self, first: int) -> kv_cache.Storage:
        """The rows from `first` on, those in prefill too."""
        return kv_cache.rows_of(self._largest, first, len(self.lengths))

    def save(self, row: int, most: int) -> SavedRow:
        """Copies keys and values of at most `most` first tokens of a row, for the prefix cache."""
        length = min(self.lengths[row], most)
        return SavedRow(length=length, storage=kv_cache.copied(self.storage, row, length))

    def restore(self, row: int, saved: SavedRow, most: int) -> int:
        """Fills an empty row with at most `most` tokens of a saved one; returns their number."""
        length = min(saved.length, most)
        self.reserve(length)
        kv_cache.restore(self._largest, row, saved.storage, length)
        self._set_lengths([length if index == row else other for index, other in enumerate(self.lengths)])
        return length

    def reserve(self, tokens: int) -> None:
        """Grows for rows of this length and one pass after them.

        It doubles each time, so that little is copied and passes are recorded or compiled for few cache shapes.
        """
        needed = self._slots_for(min(tokens, self.capacity))
        if needed > self._slots:
            self._grow(len(self.lengths), min(max(2 * self._slots, needed), self._slots_for(self.capacity)))
            self._use(self.decoding)

    def _grow(self, rows: int, slots: int) -> None:
        """Allocates a larger storage and copies the rows; without rows, the old one is freed before."""
        self.storage = []
        for holder in self.holders:
            holder.forget()
        before = self._largest if self.lengths else []
        self._largest = []
        self._largest, self._slots = self._allocate(rows, slots), slots
        for new, old in zip(self._largest, before, strict=False):
            for new_BCHD, old_BCHD in zip(new, old, strict=True):
                new_BCHD[: len(self.lengths), : self.longest] = old_BCHD[: len(self.lengths), : self.longest]

    def _set_lengths(self, lengths: list[int]) -> None:
        self.lengths = list(lengths)
        """Cached tokens of each row."""
        self.longest = max(lengths, default=0)

    def advance(self, counts: list[int]) -> None:
        """Keeps the first `counts` tokens of each row of the last pass."""
        # A finished row is still decoded until all rows of its batch have finished; it must not outgrow the cache.
        self._set_lengths([min(sum(pair), self.capacity) for pair in zip(self.lengths, counts, strict=True)])

    def accept_path(self, paths: list[list[int]]) -> None:
        """Keeps the tokens of the last pass on each row's accepted path, by compaction."""
        if any(path != list(range(len(path))) for path in paths):
            device = self.storage[-1][0].device
            kv_cache.compact(self.storage, upload(self.lengths[: self.decoding], device), from_lists(paths, device))
        self.advance([*map(len, paths), *[0] * (len(self.lengths) - self.decoding)])

    def keep(self, rows: Tensor) -> None:
        """Compaction: drops all rows but `rows`, `[b]` old indices in the new order; rows in prefill stay last."""
        is_whole = self.decoding == len(self.lengths)
        kv_cache.move_rows(self.storage if is_whole else self.rows_from(0), rows, self.lengths)
        self._use(sum(row < self.decoding for row in rows.tolist()))
        self._set_lengths([self.lengths[row] for row in rows.tolist()])

    def rollback(self, lengths: list[int]) -> None:
        """Shortens rows to earlier lengths."""
        assert all(earlier <= now for earlier, now in zip(lengths, self.lengths, strict=True))
        self._set_lengths(lengths)


class RowsView(CachedRows):
    """The first layers of other rows: the same slots, with lengths of their own.

    Rows join, move and leave in the whole cache alone. Passes of a view write after the committed tokens, and the next
    pass of the whole model writes over it.

    Args:
        whole: all layers of the rows.
        layers: their number here.
    """

    def __init__(self, whole: CachedRows, layers: int) -> None:
        self.capacity, self.starts, self._whole, self._layers = whole.capacity, 0, whole, layers
        self.forget()
        self.start()
        whole.holders.add(self)

    def forget(self) -> None:
        """See `Holder`."""
        self.storage, self._sliced = [], list[tuple[Tensor, Tensor]]()

    def follow(self) -> None:
        """Takes over the rows and the lengths of the whole cache; whatever was written after them is void."""
        self._whole.reserve(self._whole.longest)
        if not self.storage or self._whole.storage is not self._sliced:
            self._sliced = self._whole.storage
            self.storage = self._sliced[: self._layers]
        self.decoding = self._whole.decoding
        self._set_lengths(self._whole.lengths[: self.decoding])

    def reserve(self, tokens: int) -> None:
        """Nothing: `follow` has made room for a pass of the whole model, and drafts are shorter."""
