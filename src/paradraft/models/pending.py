"""Tokens that are committed but not yet in a drafter's cache."""

from __future__ import annotations

import torch
from torch import Tensor

from paradraft.core import ABSENT


def count(tokens_BM: Tensor) -> Tensor:
    """`[B]` number of tokens in rows filled with `ABSENT` on the right."""
    return (tokens_BM != ABSENT).sum(1)


def append(tokens_BM: Tensor, more_BN: Tensor) -> Tensor:
    """Rows of `more_BN` behind rows of `tokens_BM`; both are filled with `ABSENT` on the right.

    >>> append(torch.tensor([[7, -1], [8, 9]]), torch.tensor([[1, 2], [3, -1]])).tolist()
    [[7, 1, 2], [8, 9, 3]]
    """
    joined = torch.cat([tokens_BM, more_BN], dim=1)
    order = (joined == ABSENT).int().argsort(dim=1, stable=True)
    joined = joined.gather(1, order)
    return joined[:, : int(count(joined).max())]


def drop_first(tokens_BM: Tensor, number_B: Tensor) -> Tensor:
    """Rows without their first `number_B` tokens.

    >>> drop_first(torch.tensor([[7, 8, 9], [5, 6, -1]]), torch.tensor([2, 1])).tolist()
    [[9], [6]]
    """
    M = tokens_BM.shape[1]
    source = torch.arange(M, device=tokens_BM.device) + number_B[:, None]
    moved = tokens_BM.gather(1, source.clamp(max=M - 1)).masked_fill(source >= M, ABSENT)
    return moved[:, : int(count(moved).max())]
