"""Draws by inverse transform: their distribution, and numbers at the ends of their ranges."""

from __future__ import annotations

import itertools

import pytest
import torch

from paradraft.core import INVALID, Drafting, Request
from paradraft.drafters.parts.one_pass import draft_of_pass
from paradraft.sampling.drawing import token_at, without_replacement
from paradraft.sampling.sampler import Sampler
from paradraft.sampling_params import Sampling
from paradraft.tree import Tree

Q = [0.0, 0.5, 0.25, 0.0, 0.25]
SHARES = (torch.arange(200, dtype=torch.float64) + 0.5) / 200


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    """Guards the draw itself, to the number: shares that are spread evenly count out the distribution."""
    q = torch.tensor(Q, dtype=torch.float64).expand(1, 200, 5)
    assert torch.bincount(token_at(q * 7, SHARES[None])[0], minlength=5).tolist() == [0, 100, 50, 0, 50]


@pytest.mark.parametrize("share", [2.0**-53, 0.5, 1 - 2.0**-53])
@pytest.mark.parametrize("size", [5, 151_936])
def test_no_token_is_drawn_that_cannot_be(share: float, size: int) -> None:
    """Guards against tokens that top-k cut, and against an index behind the last token, where products are rounded."""
    weights = torch.zeros(1, 1, size, dtype=torch.float64)
    weights[..., [1, 3]] = torch.tensor([0.1, 0.2], dtype=torch.float64)
    assert int(token_at(weights, torch.tensor([[share]], dtype=torch.float64))) in (1, 3)


def test_nothing_is_drawn_where_nothing_is_left() -> None:
    """Guards weights that are all 0, and those that are NaN."""
    weights = torch.tensor([[[0.0, 0.0], [torch.nan, 1.0], [0.0, 1.0]]], dtype=torch.float64)
    assert token_at(weights, torch.full((1, 3), 0.5, dtype=torch.float64)).tolist() == [[INVALID, INVALID, 1]]


def test_siblings_are_drawn_without_those_before_them() -> None:
    """Guards pairs of siblings: each as often as q of the first times q of the second among the rest."""
    first, second = (grid.flatten() for grid in torch.meshgrid(SHARES, SHARES, indexing="ij"))
    q = torch.tensor(Q, dtype=torch.float64).expand(1, len(first), 5)
    tokens, log_probs, probs = without_replacement(q, torch.stack([first, second], dim=-1)[None])
    pairs = list(map(tuple, tokens[0].tolist()))
    for one, other in itertools.permutations(range(5), 2):
        expected = Q[one] * Q[other] / (1 - Q[one])
        assert pairs.count((one, other)) / len(pairs) == pytest.approx(expected, abs=0.004)
    assert torch.allclose(log_probs[0].exp(), torch.tensor(Q).double()[tokens[0]])
    assert bool((probs.sum(-1) - 1 < 1e-12).all()) and bool((probs[0, :, 1].gather(1, tokens[0, :, :1]) == 0).all())


def test_a_sibling_more_than_there_are_tokens_is_absent() -> None:
    """Guards top-k below the number of siblings: what is not left has no probability."""
    q = torch.tensor([[[0.0, 1.0, 0.0]]], dtype=torch.float64)
    _, log_probs, probs = without_replacement(q, torch.full((1, 1, 2), 0.5, dtype=torch.float64))
    assert log_probs.tolist() == [[[0.0, -torch.inf]]] and not bool(probs.isnan().any())


@pytest.mark.parametrize(("draws", "are_shared"), [("numbers", False), ("noise", True)])
def test_nodes_of_a_depth_have_separate_numbers(draws: str, are_shared: bool) -> None:
    """Guards the rule `block`, which may not look at a node before it draws another; the target's noise is shared."""
    count, tree = 2000, Tree(paths=((0,), (1,), (0, 0), (1, 0)))
    logits = torch.zeros(count, 2, 4)
    sampling = [Sampling(temperature=1.0, seed=seed) for seed in range(count)]
    requests = [Request(tokens=[1], sampling=each) for each in sampling]
    sampler = Sampler(requests, drafting=Drafting(draws=draws, tree=tree))
    tokens = draft_of_pass(sampler, tree, logits).tokens
    share = float((tokens[:, 2] == tokens[:, 3]).double().mean())
    assert share == 1.0 if are_shared else share == pytest.approx(0.25, abs=0.05)
