"""Training rows of parallel drafters, and which row may attend to which.

A sample of tokens becomes rows (position, depth). A row of depth 0 is the real token at its
position. A row of depth i is the mask token at its position, i steps behind its *anchor*, the last
real token it sees: anchor = position - depth. Every row predicts the token after its position. In
PARD a chain of rows with one anchor is what a draft pass looks like after that anchor
(An et al. 2025, section 3.2.1 and Fig. 4); ParallelSpec and PPD share the rule.

Shape letters: R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of one sample.

    Args:
        position: `[R]` index of the row's token in the sample.
        depth: `[R]` 0 for real tokens, i for the i-th mask behind its anchor.
    """

    position: Tensor
    depth: Tensor

    def __post_init__(self) -> None:
        assert self.position.ndim == 1 and self.position.shape == self.depth.shape
        assert bool((self.depth >= 0).all() and (self.anchor >= 0).all())

    @property
    def anchor(self) -> Tensor:
        """`[R]` position of the last real token each row sees."""
        return self.position - self.depth


def attention_rule(rows: Rows) -> Tensor:
    """Which rows (first index) attend to which (second index), as `[R, R]` booleans.

    A row sees the real tokens up to its anchor, and the masks of its own anchor up to itself.

    Worked example: three tokens and the masks (1, 1), behind token 0, and (2, 2), behind it.

    >>> import torch
    >>> rows = Rows(position=torch.tensor([0, 1, 2, 1, 2]), depth=torch.tensor([0, 0, 0, 1, 2]))
    >>> rows.anchor.tolist()
    [0, 1, 2, 0, 0]
    >>> attention_rule(rows).int()
    tensor([[1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [1, 1, 1, 0, 0],
            [1, 0, 0, 1, 0],
            [1, 0, 0, 1, 1]], dtype=torch.int32)
    """
    own_anchor, own_depth = rows.anchor[:, None], rows.depth[:, None]
    real = (rows.depth == 0) & (rows.position <= own_anchor)
    same_chain = (rows.anchor == own_anchor) & (rows.depth <= own_depth)
    return real | same_chain
