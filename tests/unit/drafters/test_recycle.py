"""Token recycling: what is kept of a pass, and what is drafted from it, are those of hand-made logits."""

from __future__ import annotations

import math

import pytest
import torch

from paradraft.core import Committed, Draft, Drafting, Request
from paradraft.drafters.recycle import BIAS_AND_SLOPE, UNSURE, Config, KnownPlaces, RecycleDrafter
from paradraft.likeliest import Likeliest
from paradraft.sampling.noise import gumbel_noise
from paradraft.sampling_params import Sampling
from paradraft.tree import Tree

CPU = torch.device("cpu")
BUDGET = Tree(budget=12)
# A pass after the text 3, 4: nodes 5 and 7 after the root, 6 after 5, and an absent one.
PASS = Likeliest(
    read=[[5, 7, 6, -1]],
    parents=[[-1, -1, 0, -1]],
    tokens=[[[5, 7], [6, 8], [9, 3], [4, -1], [1, 2]]],
    logits=[[[3.0, 2.5], [4.0, 1.0], [2.0, 1.0], [1.0, -math.inf], [9.0, 9.0]]],
)


def row_after(tokens: list[int], config: Config | None = None, sampling: Sampling | None = None) -> KnownPlaces:
    """A row whose pass is `PASS`, of which these tokens were committed."""
    request = Request(tokens=[3, 4], sampling=sampling or Sampling())
    row = KnownPlaces(request, config or Config(floor=0.0), has_noise=True)
    row.commit(tokens, PASS, 0)
    return row


def tree_of(row: KnownPlaces, k: int, tree: Tree | None = BUDGET) -> dict[tuple[int, ...], float]:
    """Values by path."""
    paths: list[tuple[int, ...]] = []
    nodes = row.draft(k, tree)
    for node in nodes:
        paths.append((*(paths[node.parent] if node.parent >= 0 else ()), node.token))
    return {path: node.value for path, node in zip(paths, nodes, strict=True)}


def test_refused_nodes_teach_too() -> None:
    """Guards the point of the method: token 7 was refused, and what follows it is drafted later."""
    row = row_after([5, 6, 4])
    row.commit([1, 7], None, 0)
    assert set(tree_of(row, 1)) == {(9,), (3,)}


def test_two_tokens_come_before_one() -> None:
    """Guards the key of two tokens: 4 was last read after 3, and 4 after another token is what is known of 4 alone."""
    likeliest = Likeliest(read=[[]], parents=[[]], tokens=[[[8, 9]]], logits=[[[2.0, 1.0]]])
    row = row_after([5, 2, 4])
    row.commit([3, 4], likeliest, 0)  # read after 2, 4
    assert set(tree_of(row, 1)) == {(5,), (7,)}, "after 3, 4"
    row.commit([1, 4], None, 0)
    assert set(tree_of(row, 1)) == {(8,), (9,)}, "after 4: the latest"
    single = row_after([5, 2, 4], Config(key=1, floor=0.0))
    single.commit([3, 4], likeliest, 0)
    assert set(tree_of(single, 1)) == {(8,), (9,)}


def test_the_first_of_equal_keys_is_kept() -> None:
    """Guards against a refused node that replaces what is known at the end of the text."""
    likeliest = Likeliest(read=[[4, 4]], parents=[[-1, 0]], tokens=[[[1], [2], [6]]], logits=[[[1.0], [1.0], [1.0]]])
    row = KnownPlaces(Request(tokens=[3, 4]), Config(floor=0.0), has_noise=True)
    row.commit([9, 4], likeliest, 0)
    assert set(tree_of(row, 1)) == {(1,)}


def test_places_without_an_allowed_token_teach_nothing() -> None:
    """Guards chances against logits that are all -inf, or no numbers."""
    likeliest = Likeliest(read=[[]], parents=[[]], tokens=[[[-1, -1]]], logits=[[[-math.inf, -math.inf]]])
    row = row_after([5, 3, 4])
    row.commit([3, 4], likeliest, 0)
    assert set(tree_of(row, 1)) == {(5,), (7,)}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("tree", [None, BUDGET])
def test_values_are_products_of_chances(tree: Tree | None, temperature: float) -> None:
    """Guards the estimate against the definition: a logistic function of the share of logits over temperature and the
    target's noise at the token's position."""
    sampling = Sampling(temperature=temperature, seed=5)
    row = row_after([5, 3, 4], sampling=sampling)
    values = tree_of(row, 3, tree)
    known = {(3, 4): ([5, 7], [3.0, 2.5], 2), (4, 5): ([6, 8], [4.0, 1.0], 2), (5, 6): ([4], [1.0], 2)}
    known |= {(4, 7): ([9, 3], [2.0, 1.0], 2), (5, 8): ([], [], 2), (7, 9): ([], [], 2)}
    for path, value in values.items():
        chance, pair = 1.0, (3, 4)
        for depth, token in enumerate(path):
            ids, logits, matched = known.get(pair, ([5, 7], [3.0, 2.5], 1))  # of the last token alone
            scores = torch.tensor(logits, dtype=torch.float64)
            if temperature:
                noise = gumbel_noise(5, torch.tensor([[5 + depth]]), 16)[0, 0, ids]
                scores = scores / temperature + noise
            share = float(scores.softmax(0)[ids.index(token)].clamp(UNSURE, 1 - UNSURE))
            bias, slope = BIAS_AND_SLOPE[matched, True]
            chance /= 1 + math.exp(-bias - slope * math.log(share / (1 - share)))
            pair = (pair[1], token)
        assert value == pytest.approx(chance)
    assert list(values.values()) == sorted(values.values(), reverse=True)
    assert len(values) > (1 if tree is None else 4)


def test_rows_move_and_absent_nodes_are_left_out() -> None:
    """Guards rows that leave, and padding that would become knowledge."""
    drafter = RecycleDrafter(Config(floor=0.0))
    drafter.start(Drafting(tree=BUDGET), CPU)
    drafter.join([Request(tokens=[8]), Request(tokens=[3, 4])], Committed(tokens=[[8], [3, 4]]))
    both = Likeliest(
        read=[[-1] * 4, *PASS.read], parents=[[-1] * 4, *PASS.parents], tokens=[[[2, -1]] * 5, *PASS.tokens],
        logits=[[[1.0, -math.inf]] * 5, *PASS.logits],
    )  # fmt: skip
    drafter.commit(Committed(tokens=[[2], [5, 3, 4]], likeliest=both))
    drafter.keep(torch.tensor([1]))
    draft = drafter.propose([2])
    assert {5, 7} <= set(draft.tokens[0].tolist()) <= {5, 7, 6, 8, 9, 3}
    assert drafter.propose([0]).tokens.shape == (1, 0)


def test_drafts_stay_the_same_in_pieces() -> None:
    """Guards an end that is forgotten in rounds that commit a single token, and a prompt of one token."""
    row = KnownPlaces(Request(tokens=[4]), Config(floor=0.0), has_noise=True)
    row.commit([5], PASS, 0)
    row.commit([6], None, 0)
    assert set(tree_of(row, 1)) == {(4,)}
    row.commit([], None, 0)
    assert set(tree_of(row, 1)) == {(4,)}


@pytest.mark.parametrize(("name", "value"), [("width", 0), ("width", 17), ("key", 3), ("floor", 1.5)])
def test_settings_out_of_range(name: str, value: float) -> None:
    """Guards users against settings that would draft nothing, or crash later."""
    with pytest.raises(ValueError, match=f"{name}={value}: use"):
        Config(**{name: value})


def test_a_draft_is_a_draft() -> None:
    """Guards the tensors: chains have no parents of their own, values are those of the nodes."""
    drafter = RecycleDrafter(Config())
    drafter.start(Drafting(wants_confidence=True), CPU)
    drafter.join([Request(tokens=[3, 4])], Committed(tokens=[[3, 4]]))
    assert torch.equal(drafter.propose([3]).tokens, Draft.empty(1, CPU).tokens)
    drafter.commit(Committed(tokens=[[5, 3, 4]], likeliest=PASS))
    draft = drafter.propose([1])
    assert draft.tokens.tolist() == [[5]] and draft.values is not None
    assert draft.confidence is not None and draft.confidence.tolist() == [pytest.approx(draft.values[0])]
