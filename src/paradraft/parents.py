"""Token trees as tensors: depths, ancestors, chains and paths, computed from parents.

A round needs the same values several times, and all chains of a length share one tensor of parents, so results are
cached by tensor. Neither the arguments nor the results may be modified.

Shape letters: B rows of a batch, N nodes of a tree, M = N + 1 with the root after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from paradraft.tree import ABSENT


@lru_cache(maxsize=256)
def parents_of_chains(batch_size: int, nodes: int, device: torch.device) -> Tensor:
    """`[B, N]` parents -1, 0, 1, … for every row; read-only: all callers share the tensor."""
    return torch.arange(-1, nodes - 1, device=device).repeat(batch_size, 1)


BLOCK = -2
"""In place of a parent: the token is one of a block, whose tokens have consecutive places and all see each other."""
_cached = lru_cache(maxsize=64)  # tensors are equal as keys only if they are the same object


@_cached
def ancestors(parents_BN: Tensor) -> Tensor:
    """Tree attention mask: each node attends to its ancestors and itself (and to all committed tokens).

    Args:
        parents_BN: `[B, N]` parents, each smaller than its node; -1 is the root, outside the tree; or `BLOCK`.

    Returns:
        `[B, N, N]` booleans; entry (n, a) is true when a is n or an ancestor of n, or both are of the block.

    >>> ancestors(torch.tensor([[-1, 0, 0, 2]]))[0].int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
    >>> ancestors(torch.tensor([[-2, -2, -1]]))[0].int().tolist()
    [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    """
    B, N = parents_BN.shape
    if is_chain(parents_BN):
        return torch.ones(N, N, dtype=torch.bool, device=parents_BN.device).tril().expand(B, N, N)
    # One more row for the root, which is its own parent and the ancestor of no node.
    up_BM = torch.nn.functional.pad(torch.where(parents_BN < 0, N, parents_BN), (0, 1), value=N)
    is_block_BN = parents_BN == BLOCK
    sees_BMM = torch.eye(N + 1, dtype=torch.bool, device=parents_BN.device).repeat(B, 1, 1)
    for _ in range((N - 1).bit_length()):  # 1, 2, 4, … generations
        sees_BMM = sees_BMM | sees_BMM.gather(1, up_BM[:, :, None].expand(-1, -1, N + 1))
        up_BM = up_BM.gather(1, up_BM)
    return sees_BMM[:, :N, :N] | (is_block_BN[:, :, None] & is_block_BN[:, None])


@_cached
def depths(parents_BN: Tensor) -> Tensor:
    """The depth of each node; a child of the root has depth 0, a token of a block its place there.

    >>> depths(torch.tensor([[-1, 0, 0, 2], [-2, -2, -2, -1]])).tolist()
    [[0, 1, 1, 2], [0, 1, 2, 0]]
    """
    N = parents_BN.shape[1]
    if is_chain(parents_BN):
        return parents_BN + 1
    # One more column for the root, which is its own parent, at distance 0.
    up_BM = torch.nn.functional.pad(torch.where(parents_BN < 0, N, parents_BN), (0, 1), value=N)
    is_block_BN = parents_BN == BLOCK
    steps_BM = (up_BM != N).long()  # from each node up to the one in `up_BM`
    for _ in range((N - 2).bit_length()):  # 1, 2, 4, … generations
        steps_BM = steps_BM + steps_BM.gather(1, up_BM)
        up_BM = up_BM.gather(1, up_BM)
    return steps_BM[:, :N] + (is_block_BN.cumsum(1) - 1) * is_block_BN


@_cached
def depths_after(parents_BN: Tensor) -> Tensor:
    """Number of drafted tokens before each row of logits: 0 for the root's row, depth + 1 for a node's.

    >>> depths_after(torch.tensor([[-1, 0, 0, 2]])).tolist()
    [[0, 1, 2, 2, 3]]
    """
    return torch.nn.functional.pad(depths(parents_BN) + 1, (1, 0))


def depths_of_places(tokens_BN: Tensor, parents_BN: Tensor) -> Tensor:
    """`depths_after`, but `ABSENT` after absent nodes.

    >>> depths_of_places(torch.tensor([[7, 8], [9, ABSENT]]), torch.tensor([[-1, 0], [-1, 0]])).tolist()
    [[0, 1, 2], [0, 1, -1]]
    """
    is_there_BM = torch.nn.functional.pad(tokens_BN != ABSENT, (1, 0), value=True)
    return depths_after(parents_BN).masked_fill(~is_there_BM, ABSENT)


@_cached
def is_chain(parents_BN: Tensor) -> bool:
    """Whether every node's parent is the node before it.

    >>> is_chain(torch.tensor([[-1, 0, 1]])), is_chain(torch.tensor([[-1, 0, 0]]))
    (True, False)
    """
    chains_BN = parents_of_chains(*parents_BN.shape, parents_BN.device)
    return parents_BN is chains_BN or torch.equal(
        parents_BN, chains_BN
    )  # a GPU must finish before tensors are compared


@_cached
def with_root(parents_BN: Tensor) -> Tensor:
    """Parents `[B, N + 1]` of the tree with the root as its first node.

    >>> with_root(torch.tensor([[-1, 0, 0]])).tolist()
    [[-1, 0, 1, 1]]
    """
    B, N = parents_BN.shape
    if is_chain(parents_BN):
        return parents_of_chains(B, N + 1, parents_BN.device)
    return torch.nn.functional.pad(parents_BN + 1, (1, 0), value=ABSENT)


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """The nodes from the root down to a node, without the root, which is -1.

    >>> path_to(3, [-1, 0, 0, 2]), path_to(-1, [-1])
    ([0, 2, 3], [])
    """
    path: list[int] = []
    while node != ABSENT:
        path.append(node)
        node = parents[node]
    return path[::-1]


def logit_rows(path: Sequence[int]) -> list[int]:
    """Indices of the logits that predict the tokens of a path, and the token after it: 0 for the root's, n + 1 for
    node n's.

    >>> logit_rows([0, 2]), logit_rows([])
    ([0, 1, 3], [0])
    """
    return [0, *(node + 1 for node in path)]


def texts_before(tokens_BN: Tensor, parents_BN: Tensor) -> Tensor:
    """The drafted tokens on the path from the root to each node, inclusive.

    Returns:
        `[B, N + 1, N]` token ids, `ABSENT` between and after them; row 0 is the root's.

    >>> texts_before(torch.tensor([[5, 6, 7]]), torch.tensor([[-1, 0, 0]]))[0].tolist()
    [[-1, -1, -1], [5, -1, -1], [5, 6, -1], [5, -1, 7]]
    """
    tokens = torch.where(ancestors(parents_BN), tokens_BN[:, None], ABSENT)
    return torch.nn.functional.pad(tokens, (0, 0, 1, 0), value=ABSENT)


def depths_of_row(tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Depth of each node of a row's draft, counted from 1; 0 for an absent node and its descendants.

    >>> depths_of_row([7, -1, 8, 9], [-1, 0, 1, 0])
    [1, 0, 0, 2]
    """
    node_depths: list[int] = []
    for token, parent in zip(tokens, parents, strict=True):
        is_present = token >= 0 and (parent < 0 or node_depths[parent] > 0)
        node_depths.append((node_depths[parent] if parent >= 0 else 0) + 1 if is_present else 0)
    return node_depths
