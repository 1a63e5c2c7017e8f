"""Heads that correct each token's logits by a memory of the tokens before it.

Shape letters: B rows of a batch, K drafted tokens, W nodes of a depth, V vocabulary, D hidden size, X rank of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paradraft.core import Draft
from paradraft.drafters.parts.path_heads.head import PathHead
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward.cpu.correction import NativeCorrection
from paradraft.models.target import gathered
from paradraft.sampling.expansion import EXPANDED, expanded
from paradraft.sampling.sampler import Sampler
from paradraft.tree import Tree


class Correction(PathHead):
    """A head of this kind; a subclass computes the memory of a path.

    Args:
        lm: the model whose embeddings and threads it uses.
        correction_VX: from a memory to what is added to the logits.
        native: the same head for passes in C++; None elsewhere.
    """

    def __init__(self, lm: CausalLM, correction_VX: Tensor, native: NativeCorrection | None) -> None:
        self._lm, self._native = lm, native
        self._correction = lm.linear(correction_VX)

    def _reads(self, states_BKD: Tensor) -> Tensor | None:
        """`[B, K - 1, X]` what the states of all places but the first add to their memories; None for nothing."""
        raise NotImplementedError

    def _remember(self, tokens_BW: Tensor, read_B1X: Tensor | None, before_BWX: Tensor | None) -> Tensor:
        """`[B, W, X]` memories after tokens, from what is read of their depth and the memories before, if any."""
        raise NotImplementedError

    def _begin(self, anchors: Sequence[int], logits_BKV: Tensor) -> None:
        """Corrects the logits of the first tokens by the last committed ones, where a head does that."""

    def draft(
        self, sampler: Sampler, tree: Tree | None, logits_BKV: Tensor, states_BKD: Tensor, anchors: Sequence[int]
    ) -> Draft:
        """See `PathHead`."""
        self._begin(anchors, logits_BKV)
        k = logits_BKV.shape[1]
        reads_BKX = self._reads(states_BKD)
        plain = None if self._native is None else sampler.plain_draws(k, logits_BKV.shape[2])
        if self._native is not None and plain is not None:
            arguments = logits_BKV, reads_BKX, *plain, self._lm.threads
            if tree is None:
                return Draft.chain(self._native.chains(*arguments))
            if tree.budget is not None:
                count = min(tree.budget, EXPANDED)
                tokens_BN, parents_BN = self._native.trees(*arguments, number=count, budget=tree.budget)
                return Draft(tokens=tokens_BN, parents=parents_BN)
        memories: list[Tensor] = []

        def expand(depth: int, new_BW: Tensor, slot_BW: Tensor) -> Tensor:
            before_BWX = gathered(memories.pop(), slot_BW) if memories else None
            read_B1X = None if reads_BKX is None else reads_BKX[:, depth - 1, None]
            memories.append(self._remember(new_BW, read_B1X, before_BWX))
            return logits_BKV[:, depth, None] + self._correction(memories[0])

        return expanded(sampler, tree, logits_BKV[:, :1], expand, k=k)


def without_forbidden(logits_XV: Tensor) -> Tensor:
    """`[V, X]` a matrix whose products are added to logits: ids without a logit, at -inf, get 0."""
    return logits_XV.masked_fill(logits_XV == -torch.inf, 0.0).T
