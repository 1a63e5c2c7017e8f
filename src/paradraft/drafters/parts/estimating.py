"""Drafters that estimate values: their drafts are lists of nodes, the likeliest first."""

from __future__ import annotations

import heapq
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from paradraft.core import Draft, Drafter, Drafting
from paradraft.tree import ABSENT, MOST_CANDIDATES, Tree


class Node(NamedTuple):
    """A drafted token.

    Args:
        parent: index of its parent, -1 for the last committed token.
        value: estimated probability of the path to it.
        sure: chance of the likeliest token at its place.
        part: of a union, that gave it its value.
    """

    token: int
    parent: int
    value: float
    sure: float
    part: int = 0


class Estimating(Drafter):
    """A drafter that estimates values: a subclass grows nodes, of which this class makes a draft."""

    def start(self, drafting: Drafting, device: torch.device) -> None:
        """Resets; a subclass drops its rows too."""
        self.drafting, self.device = drafting, device

    def grow(self, lengths: Sequence[int]) -> list[list[Node]]:
        """The nodes of each row, parents before children, of values that do not rise.

        Where no value reaches `worth.least_value` there need not be any.

        Args:
            lengths: largest depth of each row's draft; 0 for no draft.
        """
        raise NotImplementedError

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        """The draft of the grown nodes."""
        rows = self.grow(lengths)
        if not any(rows):
            return Draft.empty(len(rows), self.device)
        confidence = None
        if self.drafting.wants_confidence:
            N = max(map(len, rows))
            padded = [[node.sure for node in nodes] + [0.0] * (N - len(nodes)) for nodes in rows]
            confidence = torch.tensor(padded, device=self.device)
        return Draft.of_lists(
            [[node.token for node in nodes] for nodes in rows],
            [[node.parent for node in nodes] for nodes in rows],
            self.device,
            confidence=confidence,
            values=[[node.value for node in nodes] for nodes in rows],
            parts=[[node.part for node in nodes] for nodes in rows],
        )


Place = TypeVar("Place")
Child = tuple[int, float]
"""A token and the chance that it comes next."""


def at_odds(chance: float, factor: float) -> float:
    """A chance whose odds are this multiple.

    >>> at_odds(0.5, 3.0)
    0.75
    """
    return chance * factor / (1.0 - chance + chance * factor)


def chain_of(tokens: Sequence[int], chances: Sequence[float]) -> list[Node]:
    """The nodes of a chain, from the chance of each token after those before it.

    >>> chain_of([5, 6], [0.5, 0.5])[1]
    Node(token=6, parent=0, value=0.25, sure=0.5, part=0)
    """
    values = itertools.accumulate(chances, operator.mul)
    return list(map(Node, tokens, itertools.count(ABSENT), values, chances))


def grown(
    root: Place,
    children: Callable[[Place, int], Sequence[Child]],
    after: Callable[[Place, int], Place],
    *,
    k: int,
    tree: Tree | None,
    floor: float,
    least_first: float = 0.0,
) -> list[Node]:
    """The nodes of largest value, at most K deep.

    Args:
        root: the place after the last committed token.
        children: the likeliest next tokens at a place and its depth, with their chances, the best first.
        after: the place after a token at a place.
        tree: shape of the draft; None for a chain.
        floor: least value of a node.
        least_first: least value of the best node; without such a node there is no draft.

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
            if of_path < floor:
                break
            if paths is None or (*path, rank) in paths:
                node = Node(token, parent, of_path, following[0][1])
                heapq.heappush(heap, (-of_path, next(order), (*path, rank), node, place))

    add_children(1.0, (), ABSENT, root)
    if heap and -heap[0][0] < least_first:
        return []
    while heap and len(nodes) < most:
        _, _, path, node, place = heapq.heappop(heap)
        nodes.append(node)
        if len(path) < k and len(nodes) < most:
            add_children(node.value, path, len(nodes) - 1, after(place, node.token))
    return nodes
