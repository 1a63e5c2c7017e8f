"""Union of token trees: one tree that has the nodes of several drafts after the same committed tokens.

Shape letters: B rows of a batch, n nodes of one tree, N nodes of the union.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from paradraft import ragged
from paradraft.tree import ABSENT, Tree


def union_of_trees(
    tokens: Sequence[list[list[int]]],
    parents: Sequence[list[list[int]]],
    confidence: Sequence[Tensor | None],
    values: Sequence[list[list[float]] | None],
    device: torch.device | None = None,
    shape: Tree | None = None,
) -> tuple[list[list[int]], list[list[int]], Tensor | None, list[list[float]] | None]:
    """Merges the trees of each row; see `merged`, and for a shape `shaped`.

    Args:
        tokens: of each tree, B rows of n ids, `ABSENT` where a row has fewer nodes.
        parents: likewise.
        confidence: `[B, n]` of each tree, or None, which counts as 1.
        values: of each tree, by row and node, or None.
        shape: of the union; None for all nodes. With a shape all trees have values.

    Returns:
        Tokens, parents and values by row and node, and confidence `[B, N]`. The confidence of a node is the largest
        that it has in any tree, and None if no tree has any. So is its value, but None if some tree has none.

    >>> chains, tokens = [[-1, 0], [-1, 0]], [[[5, 6], [7, -1]], [[5, 8], [-1, -1]]]
    >>> values = [[[0.9, 0.5], [0.3]], [[0.8, 0.7], []]]
    >>> union = union_of_trees(tokens, [chains, chains], [None, None], values)
    >>> union
    ([[5, 6, 8], [7]], [[-1, 0, 0], [-1]], None, [[0.9, 0.5, 0.7], [0.3]])
    """
    trees = list(map(merged, *(zip(*parts, strict=True) for parts in (tokens, parents))))
    known = [each for each in values if each is not None]
    largest = [_largest(*row) for row in zip(trees, *known, strict=True)] if len(known) == len(values) else None
    if shape is not None:
        assert largest is not None
        trees, largest = map(list, zip(*(shaped(*row, shape) for row in zip(trees, largest, strict=True)), strict=True))
    all_tokens, all_parents = [tree[0] for tree in trees], [tree[1] for tree in trees]
    N = max(map(len, all_tokens))
    if not N or all(each is None for each in confidence):
        return all_tokens, all_parents, None, largest
    surest_BN = torch.zeros(len(trees), N, device=device)
    for index, values_Bn in enumerate(confidence):
        nodes_Bn = ragged.upload([tree[2][index] for tree in trees], device).view(len(trees), len(tokens[index][0]))
        values_Bn = torch.ones(nodes_Bn.shape, device=device) if values_Bn is None else values_Bn.float()
        values_Bn = values_Bn.masked_fill(nodes_Bn == ABSENT, 0.0)
        surest_BN = surest_BN.scatter_reduce(1, nodes_Bn.clamp(min=0), values_Bn, "amax")
    return all_tokens, all_parents, surest_BN, largest


MergedTree = tuple[list[int], list[int], list[list[int]]]
"""What `merged` returns."""


def shaped(tree: MergedTree, values: list[float], shape: Tree) -> tuple[MergedTree, list[float]]:
    """The nodes of largest value, the largest first, and their values.

    Args:
        values: of the nodes, never above the parent's.
        shape: a budget of nodes, or paths: a node's rank is that of its value among its siblings'.

    >>> shaped(([5, 6, 7], [-1, -1, 0], [[0, 1, 2]]), [0.5, 0.3, 0.4], Tree(budget=2))
    (([5, 7], [-1, 0], [[0, -1, 1]]), [0.5, 0.4])
    """
    tokens, parents, nodes_of = tree
    order = sorted(range(len(tokens)), key=lambda node: -values[node])  # of equal values the parent comes first
    if shape.paths is None:
        kept = order[: shape.nodes]
    else:
        path_of: dict[int, tuple[int, ...]] = {ABSENT: ()}
        ranks: Counter[int] = Counter()
        for node in order:
            path_of[node] = *path_of[parents[node]], ranks[parents[node]]
            ranks[parents[node]] += 1
        kept = [node for node in order if path_of[node] in shape.paths]
    new = {ABSENT: ABSENT} | {node: index for index, node in enumerate(kept)}
    return (
        [tokens[node] for node in kept],
        [new[parents[node]] for node in kept],
        [[new.get(node, ABSENT) for node in nodes] for nodes in nodes_of],
    ), [values[node] for node in kept]


def _largest(tree: MergedTree, *values: list[float]) -> list[float]:
    """The largest value of each node of a union in any of its trees."""
    found = [0.0] * len(tree[0])
    for nodes, of_tree in zip(tree[2], values, strict=True):
        for node, value in zip(nodes, of_tree, strict=False):  # absent nodes at the end have no value
            if node != ABSENT:
                found[node] = max(found[node], value)
    return found


def merged(tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> MergedTree:
    """Merges trees so that equal siblings are one node.

    Nodes come in the order of the trees: the first node of each, then the second of each. So parents come before their
    children, and the best nodes first, as in each tree, which length policies expect.

    Args:
        tokens: of the nodes of each tree; `ABSENT` nodes, and those after them, are left out.
        parents: of the nodes of each tree, each before its children; -1 is the root.

    Returns:
        Tokens and parents of the union; and for each tree the node of the union for each of its nodes, or `ABSENT`.

    Worked example: the chains 5, 6, 7 and 5, 8, 9 share their first node.

        root - 5 - 6 - 7          nodes 0, 1, 3
                 \\- 8 - 9         nodes 0, 2, 4

    >>> merged([[5, 6, 7], [5, 8, 9]], [[-1, 0, 1], [-1, 0, 1]])
    ([5, 6, 8, 7, 9], [-1, 0, 0, 1, 2], [[0, 1, 3], [0, 2, 4]])
    """
    all_tokens: list[int] = []
    all_parents: list[int] = []
    known: dict[tuple[int, int], int] = {}
    nodes_of: list[list[int]] = [[] for _ in tokens]
    trees = list(zip(tokens, parents, nodes_of, strict=True))
    for index in range(max(map(len, tokens))):
        for tree_tokens, tree_parents, nodes in trees:
            if index >= len(tree_tokens):
                continue
            token, parent = tree_tokens[index], tree_parents[index]
            after = nodes[parent] if parent >= 0 else parent
            if token == ABSENT or (after == ABSENT and parent >= 0):
                nodes.append(ABSENT)
                continue
            node = known.setdefault((after, token), len(all_tokens))
            if node == len(all_tokens):
                all_tokens.append(token)
                all_parents.append(after)
            nodes.append(node)
    return all_tokens, all_parents, nodes_of
