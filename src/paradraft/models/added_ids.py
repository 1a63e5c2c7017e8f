"""Ids that a model reads besides its own, for prompt tokens.

Shape letters: D hidden size, P added ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paradraft.models.forward import Forward
from paradraft.models.forward.gated import GatedChange


class AddedIds:
    """The ids after the rows of a model's embedding, which are read but never chosen.

    Args:
        first: rows of the embedding.
        width: D.
    """

    def __init__(self, first: int, width: int) -> None:
        self._first, self._rows = first, torch.empty(0, width)
        self._changes: list[tuple[range, GatedChange]] = []

    def add(self, rows_PD: Tensor, change: GatedChange | None, compute: Forward) -> range:
        """Adds ids with these embeddings `[P, D]`, and a change of attention for them, to a pass; returns them.

        Raises:
            ValueError: the embeddings have another width, or the pass cannot change attention.
        """
        width = self._rows.shape[1]
        if rows_PD.ndim != 2 or rows_PD.shape[1] != width or not len(rows_PD):
            raise ValueError(f"embeddings of shape {list(rows_PD.shape)}: this model needs [1 or more, {width}]")
        first = self._first + len(self._rows)
        ids = range(first, first + len(rows_PD))
        rows = torch.cat([self._rows.to(rows_PD), rows_PD])
        changes = self._changes if change is None else [*self._changes, (ids, change)]
        compute.add_embeddings(rows, changes)
        self._rows, self._changes = rows, changes
        return ids

    def end_change(self, ids: range, compute: Forward) -> None:
        """Ends the change of attention for ids, if there is one."""
        left = [(others, change) for others, change in self._changes if others != ids]
        if len(left) < len(self._changes):
            self._changes = left
            compute.add_embeddings(self._rows, left)
