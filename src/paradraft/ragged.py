"""Rows of token ids of different lengths, filled with `ABSENT` on the right.

Shape letters: B rows, M and N tokens of the longest row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paradraft.core import ABSENT


def count(tokens_BM: Tensor) -> Tensor:
    """`[B]` number of tokens of each row."""
    return (tokens_BM != ABSENT).sum(1)


def append(tokens_BM: Tensor, more_BN: Tensor) -> Tensor:
    """Rows of `more_BN` behind rows of `tokens_BM`.

    >>> append(torch.tensor([[7, -1], [8, 9]]), torch.tensor([[1, 2], [3, -1]])).tolist()
    [[7, 1, 2], [8, 9, 3]]
    """
    joined = torch.cat([tokens_BM, more_BN], dim=1)
    return from_lists([[token for token in row if token != ABSENT] for row in joined.tolist()], joined.device)


def drop_first(tokens_BM: Tensor, number_B: Tensor) -> Tensor:
    """Rows without their first `number_B` tokens.

    >>> drop_first(torch.tensor([[7, 8, 9], [5, 6, -1]]), torch.tensor([2, 1])).tolist()
    [[9], [6]]
    """
    M = tokens_BM.shape[1]
    source = torch.arange(M, device=tokens_BM.device) + number_B[:, None]
    moved = tokens_BM.gather(1, source.clamp(max=M - 1)).masked_fill(source >= M, ABSENT)
    return moved[:, : int(count(moved).max())]


def from_lists(rows: list[list[int]], device: torch.device | None = None) -> Tensor:
    """`[B, M]` int64; at least one row.

    >>> from_lists([[5], [], [6, 7]]).tolist()
    [[5, -1], [-1, -1], [6, 7]]
    """
    width = max(map(len, rows))
    filled = [row + [ABSENT] * (width - len(row)) for row in rows]
    return torch.tensor(filled, dtype=torch.long, device=device).view(len(rows), width)
