from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paradraft.parents import ancestors, depths, is_chain, texts_before, with_root
from paradraft.tree import ABSENT, Tree
from tests.support.trees import parents_from, path_to

CHOICES = st.lists(st.integers(0, 1000), max_size=9)
RANKS = "use ranks from 0 to 15, at least one"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "a tree has either a budget or paths"),
        ({"budget": 3, "paths": ((0,),)}, "a tree has either a budget or paths"),
        ({"budget": 0}, "tree budget 0: use at least 1 node"),
        ({"budget": -1}, "tree budget -1: use at least 1 node"),
        ({"budget": 3, "max_depth": 0}, "depth of a tree 0: use at least 1, and none beside paths"),
        ({"paths": ((0,),), "max_depth": 1}, "depth of a tree 1: use at least 1, and none beside paths"),
        ({"paths": ()}, "tree paths: name at least one, and each only once"),
        ({"paths": ((0,), (0,))}, "tree paths: name at least one, and each only once"),
        ({"paths": ((0,), ())}, f"tree path (): {RANKS}"),
        ({"paths": ((0,), (-1,))}, f"tree path (-1,): {RANKS}"),
        ({"paths": ((0,), (0, -1))}, f"tree path (0, -1): {RANKS}"),
        ({"paths": ((0,), (16,))}, f"tree path (16,): {RANKS}"),
        ({"paths": ((0,), (1, 0))}, "tree path (1, 0) is there without its parent (1,): add it"),
        ({"paths": ((0,), (0, 0, 0))}, "tree path (0, 0, 0) is there without its parent (0, 0): add it"),
    ],
)
def test_trees_are_checked(settings: dict[str, object], message: str) -> None:
    """Guards against nodes that hang in the air, whose tokens would be verified behind the wrong text."""
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Tree(**settings)


def test_the_smallest_trees_and_the_last_rank_are_allowed() -> None:
    """Guards against limits that are off by one."""
    assert (Tree(budget=1).nodes, Tree(budget=1).depth) == (1, None)
    assert Tree(budget=9, max_depth=1).depth == 1
    assert (Tree(paths=((0,),)).nodes, Tree(paths=((15,), (15, 15))).depth) == (1, 2)


def test_paths_are_ordered_parents_first() -> None:
    """Guards against siblings tried in another order than by rank, and children before their parents."""
    expected = ((0,), (1,), (0, 0), (0, 1))
    assert Tree(paths=((1,), (0, 1), (0,), (0, 0))).paths == Tree(paths=[[1], [0, 1], [0], [0, 0]]).paths == expected


@given(CHOICES)
@settings(deadline=None)
def test_ancestors_and_depths_equal_a_walk_to_the_root(choices: list[int]) -> None:
    """Guards against a node that inherits from the wrong parent, or turns by its index instead of its depth."""
    parents = parents_from(choices)
    sees, depth = ancestors(torch.tensor([parents], dtype=torch.long)), depths(torch.tensor([parents]).long())
    assert sees.shape == (1, len(parents), len(parents))
    for node in range(len(parents)):
        assert sees[0, node].nonzero().flatten().tolist() == sorted(path_to(parents, node))
        assert depth[0, node] == len(path_to(parents, node)) - 1


@given(st.lists(st.lists(st.integers(0, 1000), min_size=6, max_size=6), min_size=2, max_size=3))
@settings(deadline=None)
def test_rows_of_a_batch_are_independent(batch: list[list[int]]) -> None:
    """Guards against one row's tree leaking into another's."""
    parents = torch.tensor([parents_from(choices) for choices in batch])
    assert torch.equal(ancestors(parents), torch.cat([ancestors(row[None]) for row in parents]))


@pytest.mark.parametrize("nodes", range(1, 18))
def test_a_chain_beside_a_tree_sees_its_whole_way(nodes: int) -> None:
    """Guards the deepest node of all: in a batch with trees, chains do not take their fast path."""
    chain, star = list(range(-1, nodes - 1)), [-1] * nodes
    sees = ancestors(torch.tensor([chain, star]))
    assert torch.equal(sees[0], torch.ones(nodes, nodes, dtype=torch.bool).tril())
    assert torch.equal(sees[1], torch.eye(nodes, dtype=torch.bool))


@given(CHOICES)
@settings(deadline=None)
def test_is_chain(choices: list[int]) -> None:
    """Guards against a tree that takes the fast path of chains, and against a chain that does not."""
    straight = list(range(-1, len(choices) - 1))
    parents = parents_from(choices)
    assert is_chain(torch.tensor([straight]).long())
    assert is_chain(torch.tensor([straight, parents]).long()) == (parents == straight)


@given(CHOICES)
@settings(deadline=None)
def test_the_root_is_one_more_node_above_all(choices: list[int]) -> None:
    """Guards against tokens that are read one position too early, or that do not see the last committed token."""
    parents = torch.tensor([parents_from(choices)]).long()
    assert torch.equal(depths(with_root(parents))[:, 1:], depths(parents) + 1)
    assert bool(ancestors(with_root(parents))[:, :, 0].all())
    assert with_root(parents)[0].tolist() == [ABSENT, *(parent + 1 for parent in parents[0].tolist())]


@given(CHOICES)
@settings(deadline=None)
def test_every_node_knows_the_text_before_it(choices: list[int]) -> None:
    """Guards penalties and processors against the tokens of other branches, and the order of the row's own."""
    parents, N = parents_from(choices), len(choices)
    tokens = torch.arange(N)[None] + 10
    texts = texts_before(tokens, torch.tensor([parents]).long())
    assert texts.shape == (1, N + 1, N)
    for node in range(-1, N):
        text = [token for token in texts[0, node + 1].tolist() if token != ABSENT]
        assert text == [10 + step for step in path_to(parents, node)]


def test_answers_are_kept_for_a_tensor_not_for_its_address() -> None:
    """Guards against the tree of a draft that is gone, whose memory a new one has taken."""
    for round_ in range(100):
        parents = torch.tensor([[-1, 0, 0 if round_ % 2 else 1]])
        assert is_chain(parents) == (round_ % 2 == 0)
        assert depths(parents).tolist() == [[0, 1, 1 if round_ % 2 else 2]]


@pytest.mark.parametrize(
    ("tree", "complaint"),
    [
        ({"budget": 4.5}, "tree budget=4.5: use a whole number"),
        ({"budget": True}, "tree budget=True: use a whole number"),
        ({"budget": "4"}, "tree budget='4': use a whole number"),
        ({"paths": ((0.5,),)}, "rank of a tree path=0.5: use a whole number"),
        ({"paths": (("a",),)}, "rank of a tree path='a': use a whole number"),
        ({"paths": 5}, "tree paths 5: use paths such as"),
        ({"paths": "01"}, "tree paths '01': use paths such as"),
        ({"paths": (0, 1)}, "tree path 0: use ranks such as"),
        ({"paths": ("01",)}, "tree path '01': use ranks such as"),
    ],
)
def test_a_tree_of_the_wrong_types_is_refused_where_it_is_made(tree: dict[str, Any], complaint: str) -> None:
    """Guards answers against a TypeError of torch in their first round."""
    with pytest.raises(ValueError, match=f"^{re.escape(complaint)}"):
        Tree(**tree)


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    """Guards users who take their settings from an array."""
    assert Tree(budget=np.int64(4)) == Tree(budget=4) and type(Tree(budget=np.int64(4)).budget) is int
    assert Tree(paths=np.array([[0], [1]])).paths == ((0,), (1,))
