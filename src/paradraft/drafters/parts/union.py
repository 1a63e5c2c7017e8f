"""Union of token trees: one tree that has the nodes of several drafts after the same committed tokens."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence

from paradraft.drafters.parts.estimating import Node
from paradraft.tree import ABSENT, Tree


def union_of(trees: Sequence[Sequence[Node]], shape: Tree | None = None) -> list[Node]:
    """Merges trees so that equal siblings are one node, with the largest value and confidence that it has in any tree.

    Args:
        trees: of the parts in turn; parents come before their children, whose values are not larger.
        shape: of the union; see `shaped`.

    Worked example: the chains 5, 6, 7 and 5, 8, 9 share their first node.

        root - 5 - 6 - 7
                 \\- 8 - 9

    >>> chains = [[Node(5, -1, 0.9, 0.9), Node(6, 0, 0.4, 0.5)], [Node(5, -1, 0.8, 0.8), Node(8, 0, 0.7, 0.9)]]
    >>> [tuple(node) for node in union_of(chains)]
    [(5, -1, 0.9, 0.9, 0), (8, 0, 0.7, 0.9, 1), (6, 0, 0.4, 0.5, 0)]
    """
    found = list[Node]()
    known: dict[tuple[int, int], int] = {}
    for part, tree in enumerate(trees):
        in_union = list[int]()
        for token, parent, value, sure, _ in tree:
            after = in_union[parent] if parent >= 0 else ABSENT
            node = known.setdefault((after, token), len(found))
            if node == len(found):
                found.append(Node(token, after, value, sure, part))
            else:
                of_part = part if value > found[node].value else found[node].part
                surest = max(sure, found[node].sure)
                found[node] = Node(token, after, max(value, found[node].value), surest, of_part)
            in_union.append(node)
    return shaped(found, shape)


def shaped(nodes: Sequence[Node], shape: Tree | None) -> list[Node]:
    """The nodes of largest value, the largest first.

    Args:
        nodes: parents come before their children, whose values are not larger.
        shape: a budget of nodes, or paths: a node's rank is that of its value among its siblings'; None for all nodes.

    >>> nodes = [Node(5, -1, 0.5, 0.5), Node(6, -1, 0.3, 0.5), Node(7, 0, 0.4, 0.8)]
    >>> [(node.token, node.parent) for node in shaped(nodes, Tree(budget=2))]
    [(5, -1), (7, 0)]
    """
    values = [node.value for node in nodes]
    if (shape is None or shape.paths is None) and all(map(operator.ge, values, values[1:])):
        return list(nodes if shape is None else nodes[: shape.nodes])
    order = sorted(range(len(nodes)), key=lambda node: -values[node])  # of equal values the parent comes first
    if shape is not None and shape.paths is not None:
        path_of: dict[int, tuple[int, ...]] = {ABSENT: ()}
        ranks = Counter[int]()
        for node in order:
            parent = nodes[node].parent
            path_of[node] = *path_of[parent], ranks[parent]
            ranks[parent] += 1
        order = [node for node in order if path_of[node] in shape.paths]
    elif shape is not None:
        order = order[: shape.nodes]
    new = {node: index for index, node in enumerate([ABSENT, *order], start=ABSENT)}
    return [nodes[node]._replace(parent=new[nodes[node].parent]) for node in order]
