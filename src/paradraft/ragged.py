"""Rows of token ids of different lengths: as lists, or as a tensor padded with `ABSENT` on the right.

A few ids per round are handled as lists: one operation on such a small tensor takes longer than all of it.

Shape letters: B rows, M and N tokens of the longest row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paradraft.tree import ABSENT


def upload(ids: Any, device: torch.device | None) -> Tensor:
    """An int64 tensor of nested sequences of integers. Does not synchronize with a GPU, as `torch.tensor` does.

    >>> upload([[1, 2], [3, 4]], torch.device("cpu")).tolist()
    [[1, 2], [3, 4]]
    """
    if device is None or device.type != "cuda":
        return torch.tensor(ids, dtype=torch.long, device=device)
    return torch.tensor(ids, dtype=torch.long, pin_memory=True).to(device, non_blocking=True)


def from_lists(rows: list[list[int]], device: torch.device | None = None) -> Tensor:
    """`[B, M]` int64; at least one row.

    >>> from_lists([[5], [], [6, 7]]).tolist()
    [[5, -1], [-1, -1], [6, 7]]
    """
    filled = padded(rows)
    return upload(filled, device).view(len(filled), len(filled[0]))


def padded(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """The rows as long as the longest.

    >>> padded([[5], [], [6, 7]])
    [[5, -1], [-1, -1], [6, 7]]
    """
    width = max(map(len, rows), default=0)
    return [[*row, *[ABSENT] * (width - len(row))] for row in rows]


def to_lists(tokens_BM: Tensor) -> list[list[int]]:
    """The rows without padding.

    >>> to_lists(torch.tensor([[5, -1], [-1, -1], [6, 7]]))
    [[5], [], [6, 7]]
    """
    return [[token for token in row if token != ABSENT] for row in tokens_BM.tolist()]


def append(tokens_BM: Tensor, more_BN: Tensor) -> Tensor:
    """Appends each row of `more_BN` to that of `tokens_BM`.

    >>> append(torch.tensor([[7, -1], [8, 9]]), torch.tensor([[1, 2], [3, -1]])).tolist()
    [[7, 1, 2], [8, 9, 3]]
    """
    return from_lists(joined(to_lists(tokens_BM), to_lists(more_BN)), tokens_BM.device)


def joined(rows: list[list[int]], more: list[list[int]]) -> list[list[int]]:
    """Appends each row of `more` to that of `rows`.

    >>> joined([[7], [8, 9]], [[1, 2], [3]])
    [[7, 1, 2], [8, 9, 3]]
    """
    return [row + end for row, end in zip(rows, more, strict=True)]
