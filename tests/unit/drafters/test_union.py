"""The union of drafts: one tree, with every path of each draft once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paradraft.drafters.parts.estimating import Node
from paradraft.drafters.parts.union import union_of
from paradraft.tree import Tree

Path = tuple[int, ...]


@st.composite
def trees(draw: st.DrawFn) -> list[Node]:
    """A tree with different siblings; no value is above the parent's."""
    nodes = list[Node]()
    for number in range(draw(st.integers(0, 7))):
        parent = draw(st.integers(-1, number - 1))
        used = {node.token for node in nodes if node.parent == parent}
        token = draw(st.sampled_from([token for token in range(8) if token not in used]))
        share, sure = draw(st.sampled_from([0.25, 0.5, 1.0])), draw(st.sampled_from([0.1, 0.5, 0.9]))
        nodes.append(Node(token, parent, share * (nodes[parent].value if parent >= 0 else 1.0), sure))
    return nodes


def by_path(nodes: list[Node]) -> dict[Path, Node]:
    """The nodes by their tokens from the root."""
    paths = list[Path]()
    for number, node in enumerate(nodes):
        assert node.parent < number
        paths.append((*(paths[node.parent] if node.parent >= 0 else ()), node.token))
    found = dict(zip(paths, nodes, strict=True))
    assert len(found) == len(nodes)
    return found


@settings(deadline=None, max_examples=300)
@given(st.lists(trees(), max_size=4))
def test_a_union_has_every_path_once(parts: list[list[Node]]) -> None:
    """Guards equal siblings, of which only one could be accepted; children before their parents, which see nothing of
    them; paths that are lost; the order by which policies cut; and nodes that a part was surer of."""
    rows = list(map(by_path, parts))
    union = union_of(parts)
    found = by_path(union)
    assert found.keys() == {path for row in rows for path in row}
    assert [node.value for node in union] == sorted((node.value for node in union), reverse=True)
    for path, node in found.items():
        assert node.value == max(row[path].value for row in rows if path in row)
        assert node.sure == max(row[path].sure for row in rows if path in row)
        assert rows[node.part][path].value == node.value


@settings(deadline=None, max_examples=100)
@given(st.lists(trees(), max_size=4), st.integers(1, 9))
def test_a_budget_keeps_the_nodes_of_largest_value(parts: list[list[Node]], budget: int) -> None:
    """Guards the node budget that parts share; a node's parent is always among those that are kept."""
    kept, whole = union_of(parts, Tree(budget=budget)), union_of(parts)
    assert kept == whole[:budget] and by_path(kept).items() <= by_path(whole).items()


def test_equal_chains_are_a_chain() -> None:
    """Guards speed: a target's pass of a chain needs no mask."""
    chain = [Node(5, -1, 0.9, 0.9), Node(6, 0, 0.8, 0.9), Node(7, 1, 0.7, 0.9)]
    assert union_of([chain, chain[:2]]) == chain
    assert union_of([[], chain]) == [node._replace(part=1) for node in chain]
    assert union_of([]) == union_of([[], []]) == []


def test_paths_are_ranks_among_all_siblings() -> None:
    """Guards shapes of fixed paths: a rank is that of the value, not the order of the parts."""
    parts = [
        [Node(5, -1, 0.6, 0.6), Node(6, 0, 0.5, 0.8), Node(7, -1, 0.2, 0.6)],
        [Node(5, -1, 0.7, 0.7), Node(8, 0, 0.1, 0.1), Node(9, -1, 0.3, 0.7)],
    ]
    union = union_of(parts, Tree(paths=((0,), (2,), (0, 1))))
    assert [(node.token, node.parent, node.value) for node in union] == [(5, -1, 0.7), (7, -1, 0.2), (8, 0, 0.1)]


@pytest.mark.parametrize("copies", [1, 3])
def test_ties_keep_parents_first(copies: int) -> None:
    """Guards sure drafts, whose nodes have the same value."""
    tree = [Node(1, -1, 1.0, 1.0), Node(2, 0, 1.0, 1.0), Node(3, 1, 1.0, 1.0), Node(4, 0, 1.0, 1.0)]
    assert union_of([tree] * copies, Tree(budget=3)) == tree[:3]
