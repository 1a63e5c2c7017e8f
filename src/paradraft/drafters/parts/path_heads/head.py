"""Heads that draw tokens one by one from one pass, each by the tokens before it.

All masks of a draft pass are read at once, so none depends on the tokens drawn before its own: their predictions are
right on average and often contradict each other. A head that knows the path of drawn tokens costs a small product per
drafted token, and no pass.

Shape letters: B rows of a batch, K drafted tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from paradraft.core import Draft
from paradraft.sampling.sampler import Sampler
from paradraft.tree import Tree


class PathHead(ABC):
    """Draws the tokens of one pass."""

    @abstractmethod
    def draft(
        self, sampler: Sampler, tree: Tree | None, logits_BKV: Tensor, states_BKD: Tensor, anchors: Sequence[int]
    ) -> Draft:
        """Draws all tokens of a chain, or of a tree.

        Args:
            logits_BKV: of the pass; they are changed.
            states_BKD: of which the logits were computed.
            anchors: by row, the last committed token; not read by heads that begin after the first drafted one.
        """
