"""Training rows of parallel drafters, and which row may attend to which.

A sample of tokens becomes rows (position, depth). A row of depth 0 is the real token at its
position. A row of depth i is the mask token at its position, i steps behind its *anchor*, the last
real token it sees: anchor = position - depth. Every row predicts the token after its position. In
PARD a chain of rows with one anchor is what a draft pass looks like after that anchor
(An et al. 2025, section 3.2.1 and Fig. 4); ParallelSpec and PPD share the rule.

Shape letters: R rows; `…` stands for no axis or one for the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

FILLING = -1
"""The document of rows that only fill a batch up."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of one sample, of several packed behind each other, or of a batch.

    Args:
        position: `[…, R]` index of the row's token in its sample.
        depth: `[…, R]` 0 for real tokens, i for the i-th mask behind its anchor.
        document: `[…, R]` which of the packed samples the row is of, or `FILLING`.
    """

    position: Tensor
    depth: Tensor
    document: Tensor

    def __post_init__(self) -> None:
        assert self.position.ndim in (1, 2)
        assert self.position.shape == self.depth.shape == self.document.shape
        assert bool((self.depth >= 0).all() and (self.anchor >= 0).all())

    @staticmethod
    def of_sample(position: Tensor, depth: Tensor) -> Rows:
        """The rows `[R]` of a sample that stands alone."""
        return Rows(position=position, depth=depth, document=torch.zeros_like(position))

    @property
    def anchor(self) -> Tensor:
        """`[…, R]` position of the last real token each row sees."""
        return self.position - self.depth


def may_attend(
    anchor: Tensor, depth: Tensor, document: Tensor, other_position: Tensor, other_depth: Tensor, other_document: Tensor
) -> Tensor:
    """The rule, for a row and another: the real tokens up to the anchor, and the masks of the anchor up to itself."""
    real = (other_depth == 0) & (other_position <= anchor)
    same_chain = (other_position - other_depth == anchor) & (other_depth <= depth)
    return (document == other_document) & (real | same_chain)


def attention_rule(rows: Rows) -> Tensor:
    """Which rows (first index) attend to which (second index), as `[…, R, R]` booleans.

    Rows that only fill a batch see each other, so that no softmax is over nothing.

    Worked example: three tokens and the masks (1, 1), behind token 0, and (2, 2), behind it.

    >>> rows = Rows.of_sample(position=torch.tensor([0, 1, 2, 1, 2]), depth=torch.tensor([0, 0, 0, 1, 2]))
    >>> rows.anchor.tolist()
    [0, 1, 2, 0, 0]
    >>> attention_rule(rows).int()
    tensor([[1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [1, 1, 1, 0, 0],
            [1, 0, 0, 1, 0],
            [1, 0, 0, 1, 1]], dtype=torch.int32)
    """
    own = (row[..., :, None] for row in (rows.anchor, rows.depth, rows.document))
    others = (row[..., None, :] for row in (rows.position, rows.depth, rows.document))
    return may_attend(*own, *others)


def mask_function(rows: Rows) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The rule as `flex_attention` asks for it: a function of batch, head, query and key indices; rows are `[S, R]`."""
    position, depth, document = rows.position, rows.depth, rows.document

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = position[batch, query] - depth[batch, query], depth[batch, query], document[batch, query]
        return may_attend(*own, position[batch, key], depth[batch, key], document[batch, key])

    return sees
