"""An output head of low rank for drafters on the target's states (SlimSpec, 2605.10453): up · down, without a bias.

Shape letters: U rows of the head, D hidden size, X rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LowRankHead(nn.Module):
    """A trained head, initialized to the nearest one of its rank to another (Eckart and Young 1936).

    Args:
        weight_UD: of the other head.
        rank: X, at most D.
    """

    def __init__(self, weight_UD: Tensor, rank: int) -> None:
        super().__init__()
        rows, width = weight_UD.shape
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, rows, bias=False)
        with torch.no_grad():
            weight_UD = weight_UD.float()
            # The right singular vectors, from the smaller product: U is often a hundred times D.
            _, vectors_DD = torch.linalg.eigh(weight_UD.T @ weight_UD)
            likeliest_DX = vectors_DD[:, -rank:]
            self.down.weight.copy_(likeliest_DX.T)
            self.up.weight.copy_(weight_UD @ likeliest_DX)

    def forward(self, states: Tensor) -> Tensor:
        """The products `[…, U]` of states `[…, D]`, in place of the other head's."""
        products: Tensor = self.up(self.down(states))
        return products
