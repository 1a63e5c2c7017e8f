"""Token trees the plain way: Python lists and a walk to the root."""

from __future__ import annotations

import random


def parents_from(choices: list[int]) -> list[int]:
    """Any list of numbers as a valid tree: node n gets one of the parents -1 … n - 1."""
    return [choice % (node + 1) - 1 for node, choice in enumerate(choices)]


def random_parents(seed: int, nodes: int) -> list[int]:
    chooser = random.Random(seed)
    return parents_from([chooser.randrange(1000) for _ in range(nodes)])


def path_to(parents: list[int], node: int) -> list[int]:
    """The nodes from the root down to `node`, itself included; empty for the root, -1."""
    return [] if node == -1 else [*path_to(parents, parents[node]), node]
