"""Heads that correct each token's logits by a memory of the tokens before it.

Shape letters: B rows of a batch, K drafted tokens, W nodes of a depth, V vocabulary, D hidden size, X rank of a head.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from paradraft.drafters.parts.path_heads.head import PathHead
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward.cpu.correction import NativeCorrection
from paradraft.models.target import gathered
from paradraft.sampling.expansion import Expand


class Correction(PathHead):
    """A head of this kind; a subclass computes the memory of a path.

    Args:
        lm: the model whose embeddings and threads it uses.
        correction_VX: from a memory to what is added to the logits.
        native: the same head for passes in C++; None elsewhere.
    """

    def __init__(self, lm: CausalLM, correction_VX: Tensor, native: NativeCorrection | None) -> None:
        super().__init__(lm, native)
        self._correction = lm.linear(correction_VX)

    @abstractmethod
    def _remember(self, tokens_BW: Tensor, read_B1X: Tensor | None, before_BWX: Tensor | None) -> Tensor:
        """`[B, W, X]` memories after tokens, from what is read of their depth and the memories before, if any."""

    def _first_and_later(
        self, anchors: Sequence[int], logits_BKV: Tensor, reads: Tensor | None
    ) -> tuple[Tensor, Expand]:
        memories: list[Tensor] = []

        def expand(depth: int, new_BW: Tensor, slot_BW: Tensor) -> Tensor:
            before_BWX = gathered(memories.pop(), slot_BW) if memories else None
            read_B1X = None if reads is None else reads[:, depth - 1, None]
            memories.append(self._remember(new_BW, read_B1X, before_BWX))
            return logits_BKV[:, depth, None] + self._correction(memories[0])

        return logits_BKV[:, :1], expand


def without_forbidden(logits_XV: Tensor) -> Tensor:
    """`[V, X]` a matrix whose products are added to logits: ids without a logit, at -inf, get 0."""
    return logits_XV.masked_fill(logits_XV == -torch.inf, 0.0).T
