"""The union of drafts: one tree, with every path of each draft once."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paradraft.core import Draft
from paradraft.decode.lengths.draft_length import Confidence
from paradraft.parents import is_chain
from paradraft.probes import Probes
from paradraft.ragged import from_lists
from paradraft.tree import ABSENT, Tree

Nodes = tuple[list[int], list[int]]


@st.composite
def trees(draw: st.DrawFn) -> Nodes:
    """A tree with different siblings; some nodes are absent, and with them those after them."""
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(draw(st.integers(0, 7))):
        parent = draw(st.integers(-1, node - 1))
        used = {token for token, other in zip(tokens, parents, strict=True) if other == parent}
        free = [token for token in (ABSENT, 0, 1, 2, 3) if token == ABSENT or token not in used]
        tokens.append(draw(st.sampled_from(free)))
        parents.append(parent)
    return tokens, parents


def paths(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    """The tokens from the root to each node that is there."""
    found: list[tuple[int, ...] | None] = []
    for token, parent in zip(tokens, parents, strict=True):
        before = () if parent < 0 else found[parent]
        found.append(None if token == ABSENT or before is None else (*before, token))
    return [path for path in found if path is not None]


def draft_of(rows: list[Nodes]) -> Draft:
    tokens, parents = (from_lists([row[part] for row in rows]) for part in range(2))
    return Draft(tokens=tokens, parents=parents)


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 3).flatmap(lambda rows: st.lists(st.lists(trees(), min_size=rows, max_size=rows), min_size=1)))
def test_a_union_has_every_path_once(parts: list[list[Nodes]]) -> None:
    """Guards equal siblings, of which only one could be accepted; children before their parents, which see nothing of
    them; paths that are lost; and passes that are wider than their widest row."""
    union = Draft.union(*map(draft_of, parts))
    wanted = [{path for part in parts for path in paths(*part[row])} for row in range(len(parts[0]))]
    for row, (tokens, parents) in enumerate(zip(union.tokens.tolist(), union.parents.tolist(), strict=True)):
        assert all(parent < node for node, parent in enumerate(parents))
        found = paths(tokens, parents)
        assert len(found) == len(set(found)) == len([token for token in tokens if token != ABSENT])
        assert set(found) == wanted[row]
    assert union.tokens.shape[1] == max(map(len, wanted))


def test_nodes_come_in_turn() -> None:
    """Guards length policies, which drop the last nodes: they would drop the whole draft of the last part."""
    union = Draft.union(draft_of([([5, 6, 7], [-1, 0, 1])]), draft_of([([8, 9], [-1, 0])]))
    assert union.tokens.tolist() == [[5, 8, 6, 9, 7]] and union.parents.tolist() == [[-1, -1, 0, 1, 2]]


def test_a_union_of_equal_chains_is_a_chain() -> None:
    """Guards speed: a target's pass of a chain needs no mask, in rows of different lengths too."""
    first, second = (Draft.chain(from_lists(rows)) for rows in ([[5, 6, 7], [1]], [[5, 6], []]))
    union = Draft.union(first, second)
    assert union.tokens.tolist() == [[5, 6, 7], [1, ABSENT, ABSENT]] and is_chain(union.parents)
    assert Draft.union(first).tokens.tolist() == first.tokens.tolist()
    assert Draft.union(second, Draft.empty(2, torch.device("cpu"))).tokens.tolist() == second.tokens.tolist()


def test_drafts_without_a_token_are_an_empty_union() -> None:
    """Guards rounds in which settings forbid all tokens: the union then failed at an index, and not with the reason."""
    absent = torch.full((2, 3), ABSENT)
    union = Draft.union(Draft.chain(absent, confidence=torch.zeros(2, 3)), Draft.chain(absent))
    assert union.tokens.shape == (2, 0) and union.confidence is None


def test_the_surest_part_decides_what_is_cut() -> None:
    """Guards the length policy `confidence`: a token that another part is sure of stays, and so do those of parts that
    do not say how sure they are."""
    unsure = Draft.chain(from_lists([[5, 6], [5, 7]]), confidence=torch.tensor([[0.1, 0.2], [0.4, 0.1]]))
    sure = Draft.chain(from_lists([[5, 8], [6, ABSENT]]), confidence=torch.tensor([[0.9, 0.7], [0.5, 0.0]]))
    found = Draft.union(unsure, sure).confidence
    assert found is not None and torch.equal(found, torch.tensor([[0.9, 0.2, 0.7], [0.4, 0.5, 0.1]]))
    copied = Draft.chain(from_lists([[9], []]))
    union = Confidence(2).cut(Draft.union(unsure, copied))
    assert union.tokens.tolist() == [[ABSENT, 9], [5, ABSENT]]


@pytest.mark.parametrize(
    "more",
    [
        {"probs": torch.ones(1, 2, 10) / 10},
        {"probes": Probes(nodes=torch.tensor([[0]]), before=torch.tensor([[-1]]), tokens=torch.tensor([[90]]))},
    ],
)
def test_what_cannot_be_merged_is_refused(more: dict[str, object]) -> None:
    """Guards the rejection rule, where a merged tree has another distribution than its parts; and prompt tokens, whose
    nodes would be others."""
    chain = Draft.chain(torch.tensor([[5, 6]]))
    with pytest.raises(AssertionError):
        Draft.union(chain, Draft(tokens=chain.tokens, parents=chain.parents, **more))


VALUED = (
    Draft(
        tokens=torch.tensor([[5, 6, 7]]), parents=torch.tensor([[-1, 0, -1]]), values=[[0.6, 0.5, 0.2]]
    ),
    Draft(
        tokens=torch.tensor([[5, 8, 9, ABSENT]]), parents=torch.tensor([[-1, 0, -1, -1]]), values=[[0.7, 0.1, 0.3]]
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "tokens", "parents", "values"),
    [
        (Tree(budget=9), [5, 6, 9, 7, 8], [-1, 0, -1, -1, 0], [0.7, 0.5, 0.3, 0.2, 0.1]),
        (Tree(budget=3), [5, 6, 9], [-1, 0, -1], [0.7, 0.5, 0.3]),
        (Tree(paths=((0,), (2,), (0, 1))), [5, 7, 8], [-1, -1, 0], [0.7, 0.2, 0.1]),
    ],
)
def test_a_shape_keeps_the_nodes_of_largest_value(
    shape: Tree, tokens: list[int], parents: list[int], values: list[float]
) -> None:
    """Guards the node budget that parts share, the order that policies expect, and ranks among all siblings."""
    union = Draft.union(*VALUED, shape=shape)
    assert (union.tokens.tolist(), union.parents.tolist(), union.values) == ([tokens], [parents], [values])


def test_a_shaped_union_keeps_the_surest_confidence() -> None:
    """Guards confidence against the order of nodes before they were sorted by value."""
    sure = [dataclasses.replace(draft, confidence=torch.full(draft.tokens.shape, 0.5)) for draft in VALUED]
    sure[1] = dataclasses.replace(sure[1], confidence=torch.tensor([[0.1, 0.9, 0.8, 0.0]]))
    union = Draft.union(*sure, shape=Tree(budget=5))
    assert union.confidence is not None
    assert union.confidence[0].tolist() == pytest.approx([0.5, 0.5, 0.8, 0.5, 0.9])
