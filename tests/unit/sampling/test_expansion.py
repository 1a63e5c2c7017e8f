"""Drafts whose every token is thought of after the very tokens before it, against a drafter that is a table."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paradraft.core import Draft, Drafting, Request
from paradraft.sampling.expansion import Expand, expanded
from paradraft.sampling.noise import gumbel_noise
from paradraft.sampling.sampler import Sampler
from paradraft.sampling_params import Sampling
from paradraft.tree import ABSENT, Tree

V, K = 7, 4
PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 1, 0), (1, 1, 1), (1, 1, 0), (1, 1, 1, 0))
ROWS = 3


def logits_after(row: int, path: tuple[int, ...]) -> Tensor:
    """What the drafter says after some tokens of a row: other numbers after all others."""
    seed = row
    for token in path:
        seed = seed * 31 + token + 1
    return 2 * torch.randn(V, generator=torch.Generator().manual_seed(seed))


def asked() -> tuple[Tensor, Expand]:
    """The first logits, and what gives the others; it only knows which node of the depth before each node follows."""
    before: list[list[tuple[int, ...]]] = [[()] for _ in range(ROWS)]

    def expand(depth: int, new_BW: Tensor, slot_BW: Tensor) -> Tensor:
        for row in range(ROWS):
            known = before[row]
            before[row] = [
                (*known[slot], token) for slot, token in zip(slot_BW[row].tolist(), new_BW[row].tolist(), strict=True)
            ]
            assert all(len(path) == depth for path in before[row])
        return torch.stack([torch.stack([logits_after(row, path) for path in before[row]]) for row in range(ROWS)])

    return torch.stack([logits_after(row, ()) for row in range(ROWS)])[:, None], expand


def draft_of(drafting: Drafting, sampling: Sampling, k: int = K) -> Draft:
    requests = [Request(id=row, tokens=[1] * (row + 2), sampling=sampling) for row in range(ROWS)]
    first, expand = asked()
    return expanded(Sampler(requests, drafting=drafting), drafting.tree, first, expand, k=k)


def nodes_of(draft: Draft, row: int) -> list[tuple[int, ...]]:
    """The tokens up to each node."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens[row].tolist(), draft.parents[row].tolist(), strict=True):
        paths.append((*(() if parent == ABSENT else paths[parent]), token))
    return paths


SAMPLED = Sampling(temperature=0.8, seed=4)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED, Sampling(temperature=0.8, seed=4, presence_penalty=1.0)])
@pytest.mark.parametrize("tree", [None, Tree(paths=PATHS), Tree(budget=9)])
def test_children_are_the_best_after_their_own_parents(sampling: Sampling, tree: Tree | None) -> None:
    """Guards side branches that go on as the best path does: of every node, its children are the best tokens after it,
    with its position's noise."""
    draft = draft_of(Drafting(tree=tree), sampling)
    for row in range(ROWS):
        paths = nodes_of(draft, row)
        assert len(set(paths)) == len(paths) == (K if tree is None else tree.nodes)
        for parent in {path[:-1] for path in paths}:
            children = [path[-1] for path in paths if path[:-1] == parent]
            scores = logits_after(row, parent).double()
            for token in set(parent):
                scores[token] -= sampling.presence_penalty
            if not sampling.is_greedy:
                scores = scores / 0.8 + gumbel_noise(4, torch.tensor([[row + 2 + len(parent)]]), V)[0, 0]
            assert children == scores.topk(len(children)).indices.tolist()


def test_a_shape_is_as_asked() -> None:
    """Guards nodes of another rank or parent."""
    parents = draft_of(Drafting(tree=Tree(paths=PATHS)), Sampling()).parents
    known = sorted(PATHS, key=lambda path: (len(path), path))
    expected = [known.index(path[:-1]) if path[:-1] else ABSENT for path in known]
    assert parents.tolist() == [expected] * ROWS
    shallow = draft_of(Drafting(tree=Tree(paths=PATHS)), Sampling(), k=2)
    assert shallow.tokens.shape == (ROWS, sum(len(path) <= 2 for path in PATHS))


@pytest.mark.parametrize("tree", [None, Tree(paths=PATHS)])
def test_under_the_rejection_rule_each_tells_its_distribution(tree: Tree | None) -> None:
    """Guards a q that is not the one a token was drawn from, which would be lossy: it is what the drafter says after
    the token's own parents, without its better siblings."""
    draft = draft_of(Drafting(draws="numbers", tree=tree), SAMPLED)
    assert draft.probs is not None
    for row in range(ROWS):
        paths = nodes_of(draft, row)
        for node, path in enumerate(paths):
            expected = (logits_after(row, path[:-1]).double() / 0.8).softmax(-1)
            for sibling in paths[:node]:
                if sibling[:-1] == path[:-1]:
                    expected[sibling[-1]] = 0.0
            torch.testing.assert_close(draft.probs[row, node], expected / expected.sum())


def test_siblings_are_drawn_from_it() -> None:
    """Guards tokens that are not drawn from the distribution they tell: of 4,000 seeds, how often each token comes
    second after the first child of the root, against its probability."""
    counts, expected = torch.zeros(V), torch.zeros(V, dtype=torch.float64)
    seeds = 4000
    requests = [Request(id=seed, tokens=[1], sampling=Sampling(temperature=1.0, seed=seed)) for seed in range(seeds)]
    tree = Tree(paths=((0,), (0, 0)))
    first = logits_after(0, ()).expand(seeds, 1, V)
    table = torch.stack([logits_after(0, (token,)) for token in range(V)])
    sampler = Sampler(requests, drafting=Drafting(draws="numbers", tree=tree))
    draft = expanded(sampler, tree, first, lambda depth, new, slot: table[new], k=2)
    for before, token in draft.tokens.tolist():
        counts[token] += 1
        expected += table[before].double().softmax(-1)
    off = ((counts - expected) ** 2 / expected).sum()
    assert off < 35  # of chi squared with 6 degrees of freedom once in 200,000


@pytest.mark.parametrize("tree", [None, Tree(paths=PATHS), Tree(budget=9)])
def test_each_tells_how_sure_it_is(tree: Tree | None) -> None:
    """Guards the confidence of another node."""
    draft = draft_of(Drafting(tree=tree, wants_confidence=True), SAMPLED)
    assert draft.confidence is not None
    for row in range(ROWS):
        for node, path in enumerate(nodes_of(draft, row)):
            expected = (logits_after(row, path[:-1]).double() / 0.8).softmax(-1).max()
            assert float(draft.confidence[row, node]) == pytest.approx(float(expected), rel=1e-5)


def test_a_grown_tree_has_the_likeliest_nodes() -> None:
    """Guards the order in which nodes are taken, against all paths of a small vocabulary."""
    draft = draft_of(Drafting(tree=Tree(budget=9)), Sampling(), k=2)
    for row in range(ROWS):
        first = logits_after(row, ()).log_softmax(-1)
        values = {(token,): float(first[token]) for token in range(V)}
        for token in range(V):
            second = logits_after(row, (token,)).log_softmax(-1)
            values |= {(token, after): float(first[token] + second[after]) for after in range(V)}
        best = sorted(values, key=lambda path: -values[path])[:9]
        assert set(nodes_of(draft, row)) == set(best)
    assert math.isfinite(float(draft.tokens.sum()))
