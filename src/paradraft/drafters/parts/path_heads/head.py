"""Heads that draw tokens one by one from one pass, each by the tokens before it.

All masks of a draft pass are read at once, so none depends on the tokens drawn before its own: their predictions are
right on average and often contradict each other. A head that knows the path of drawn tokens costs a small product per
drafted token, and no pass.

Shape letters: B rows of a batch, K drafted tokens, V vocabulary, D hidden size, X rank of a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from paradraft.core import Draft
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward.cpu.drawing import NativePathHead, PassOutputs
from paradraft.sampling.expansion import EXPANDED, Expand, expanded
from paradraft.sampling.sampler import Sampler
from paradraft.tree import Tree


class PathHead(ABC):
    """Draws the tokens of one pass; a subclass computes the logits after tokens.

    Args:
        lm: the model whose embeddings and threads it uses.
        native: the same head for passes in C++; None elsewhere.
    """

    def __init__(self, lm: CausalLM, native: NativePathHead | None) -> None:
        self._lm, self._native = lm, native

    def _after_anchors(self, anchors: Sequence[int], logits_BKV: Tensor) -> Tensor:
        """The logits with those of the first tokens changed by the last committed ones, where C++ does not do that."""
        return logits_BKV

    @abstractmethod
    def _reads(self, states_BKD: Tensor) -> Tensor | None:
        """`[B, …, X]` what the head reads of the states; None for nothing."""

    @abstractmethod
    def _first_and_later(
        self, anchors: Sequence[int], logits_BKV: Tensor, reads: Tensor | None
    ) -> tuple[Tensor, Expand]:
        """`[B, 1, V]` the logits of the first tokens, and what computes those of later ones."""

    @torch.no_grad()
    def draft(
        self, sampler: Sampler, tree: Tree | None, logits_BKV: Tensor, states_BKD: Tensor, anchors: Sequence[int]
    ) -> Draft:
        """Draws all tokens of a chain, or of a tree.

        Args:
            logits_BKV: of the pass; they are changed.
            states_BKD: of which the logits were computed.
            anchors: by row, the last committed token; not read by heads that begin after the first drafted one.
        """
        logits_BKV = self._after_anchors(anchors, logits_BKV)
        k, reads = logits_BKV.shape[1], self._reads(states_BKD)
        plain = None if self._native is None else sampler.plain_draws(k, logits_BKV.shape[2])
        if self._native is not None and plain is not None:
            outputs = PassOutputs(anchors, logits_BKV, reads, *plain, self._lm.threads)
            if tree is None:
                return Draft.chain(self._native.chains(outputs))
            if tree.budget is not None:
                count = min(tree.budget, EXPANDED)
                tokens_BN, parents_BN = self._native.trees(outputs, number=count, budget=tree.budget)
                return Draft(tokens=tokens_BN, parents=parents_BN)
        first_B1V, expand = self._first_and_later(anchors, logits_BKV, reads)
        return expanded(sampler, tree, first_B1V, expand, k=k)
