"""Drafts of drafters that estimate values: the likeliest nodes first, as a chain or a tree."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from paradraft.core import Draft, Drafting
from paradraft.tree import ABSENT, MOST_CANDIDATES, Tree


@dataclass(frozen=True, kw_only=True)
class Node:
    """A drafted token.

    Args:
        parent: index of its parent, -1 for the last committed token.
        value: estimated probability of the path to it.
        sure: chance of the likeliest token at its place.
    """

    token: int
    parent: int
    value: float
    sure: float


Place = TypeVar("Place")
Child = tuple[int, float]
"""A token and the chance that it comes next."""


def grown(
    root: Place,
    children: Callable[[Place, int], Sequence[Child]],
    after: Callable[[Place, int], Place],
    *,
    k: int,
    tree: Tree | None,
    floor: float,
) -> list[Node]:
    """The nodes of largest value, at most K deep.

    Args:
        root: the place after the last committed token.
        children: the likeliest next tokens at a place and its depth, with their chances, the best first.
        after: the place after a token at a place.
        tree: shape of the draft; None for a chain.
        floor: least value of a node.

    >>> children, after = lambda place, depth: [(1, 0.75), (2, 0.5)], lambda place, token: place
    >>> nodes = grown(0, children, after, k=2, tree=Tree(budget=4), floor=0.25)
    >>> [(node.token, node.parent, node.value) for node in nodes]
    [(1, -1, 0.75), (1, 0, 0.5625), (2, -1, 0.5), (2, 0, 0.375)]
    """
    nodes = list[Node]()
    width, most = (1, k) if tree is None else (MOST_CANDIDATES, tree.nodes)
    paths = None if tree is None else tree.paths
    order = itertools.count()  # of equal nodes the first found, a parent before its children
    heap: list[tuple[float, int, tuple[int, ...], Node, Any]] = []

    def add_children(value: float, path: tuple[int, ...], parent: int, place: Place) -> None:
        following = children(place, len(path))[:width]
        for rank, (token, chance) in enumerate(following):
            of_path = value * chance
            if of_path >= floor and (paths is None or (*path, rank) in paths):
                node = Node(token=token, parent=parent, value=of_path, sure=following[0][1])
                heapq.heappush(heap, (-of_path, next(order), (*path, rank), node, place))

    add_children(1.0, (), ABSENT, root)
    while heap and len(nodes) < most:
        _, _, path, node, place = heapq.heappop(heap)
        nodes.append(node)
        if len(path) < k and len(nodes) < most:
            add_children(node.value, path, len(nodes) - 1, after(place, node.token))
    return nodes


def draft_of(rows: Sequence[list[Node]], drafting: Drafting, device: torch.device) -> Draft:
    """The draft with these nodes in each row."""
    tokens, parents = (
        [[node.token for node in nodes] for nodes in rows],
        [[node.parent for node in nodes] for nodes in rows],
    )
    sure = None
    if drafting.wants_confidence:
        N = max(map(len, rows))
        padded = [[node.sure for node in nodes] + [0.0] * (N - len(nodes)) for nodes in rows]
        sure = torch.tensor(padded, device=device).view(len(rows), N)
    values = [[node.value for node in nodes] for nodes in rows]
    return Draft.of_lists(tokens, parents, device, confidence=sure, values=values)
