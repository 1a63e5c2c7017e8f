"""Heads that correct each token's logits by a memory of the tokens before it.

Products are computed only for the ids that can be drafted.

Shape letters: B rows of a batch, K drafted tokens, W nodes of a depth, V vocabulary, U ids that can be drafted,
D hidden size, X rank of a head.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from paradraft.drafters.parts.path_heads.head import PathHead
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward.cpu.correction import NativeCorrection
from paradraft.models.output_ids import OutputIds
from paradraft.models.target import gathered
from paradraft.sampling.expansion import Expand


class Correction(PathHead):
    """A head of this kind; a subclass computes the memory of a path.

    Args:
        lm: the model whose embeddings and threads it uses.
        ids: that can be drafted.
        correction_VX: from a memory to what is added to the logits.
        embedding: `[rows, D]` that memories are made of.
        token, memory: see `NativeCorrection`.
    """

    def __init__(
        self, lm: CausalLM, ids: OutputIds, correction_VX: Tensor, embedding: Tensor,
        token: Tensor | None = None, memory: Tensor | None = None,
    ) -> None:  # fmt: skip
        self._ids_U = ids.with_rows
        correction_UX = correction_VX if self._ids_U is None else correction_VX[self._ids_U]
        is_native = lm.is_native
        native = NativeCorrection(embedding, token, memory, correction_UX, self._ids_U) if is_native else None
        super().__init__(lm, native)
        self._correction = lm.linear(correction_UX)

    @abstractmethod
    def _remember(self, tokens_BW: Tensor, read_B1X: Tensor | None, before_BWX: Tensor | None) -> Tensor:
        """`[B, W, X]` memories after tokens, from what is read of their depth and the memories before, if any."""

    def _correct(self, logits: Tensor, memories: Tensor) -> Tensor:
        """Changes the logits `[…, V]` to those after memories `[…, X]`."""
        added = self._correction(memories).to(logits.dtype)
        return logits.add_(added) if self._ids_U is None else logits.index_add_(-1, self._ids_U, added)

    def _first_and_later(
        self, anchors: Sequence[int], logits_BKV: Tensor, reads: Tensor | None
    ) -> tuple[Tensor, Expand]:
        memories: list[Tensor] = []

        def expand(depth: int, new_BW: Tensor, slot_BW: Tensor) -> Tensor:
            before_BWX = gathered(memories.pop(), slot_BW) if memories else None
            read_B1X = None if reads is None else reads[:, depth - 1, None]
            memories.append(self._remember(new_BW, read_B1X, before_BWX))
            before_BWV = logits_BKV[:, depth, None].expand(-1, new_BW.shape[1], -1).clone()
            return self._correct(before_BWV, memories[0])

        return logits_BKV[:, :1], expand


def without_forbidden(logits_XV: Tensor) -> Tensor:
    """`[V, X]` a matrix whose products are added to logits: ids without a logit, at -inf, get 0."""
    return logits_XV.masked_fill(logits_XV == -torch.inf, 0.0).T
