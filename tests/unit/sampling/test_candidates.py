"""A tree that grows is the best of its size, its estimates are probabilities, and its size is its budget."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paradraft.parents import depths
from paradraft.sampling.candidates import (
    Candidates,
    assemble,
    assemble_from,
    best_first,
    candidates_needed,
    grow,
)
from paradraft.sampling.distribution import probabilities
from paradraft.sampling.sampler import Sampler
from paradraft.sampling_params import GREEDY, Sampling
from paradraft.tree import ABSENT, MOST_CANDIDATES, Tree
from tests.support.decoding import sampler
from tests.support.trees import path_to
from tests.unit.sampling.test_distribution import random_logits

Path = tuple[int, ...]
ASIDES = (0.0, 0.5, 1.0)


def worth(path: Path, chances: list[list[float]], aside: float) -> float:
    """The estimated probability that the target takes a path: each token's, times `aside` where the tokens before it
    are not the best ones."""
    return math.prod(chances[depth][rank] * (aside if any(path[:depth]) else 1.0) for depth, rank in enumerate(path))


def all_paths(chances: list[list[float]]) -> list[Path]:
    ranks = [range(len(row)) for row in chances]
    return [path for depth in range(1, len(ranks) + 1) for path in itertools.product(*ranks[:depth])]


def best_total(chances: list[list[float]], aside: float, budget: int) -> float:
    """The expected accepted tokens of the best tree, found by trying all trees of at most `budget` nodes."""
    paths = all_paths(chances)
    trees: set[frozenset[Path]] = {frozenset()}
    everything = set(trees)
    for _ in range(budget):
        trees = {
            tree | {path}
            for tree in trees
            for path in paths
            if path not in tree and (len(path) == 1 or path[:-1] in tree)
        }
        everything |= trees
    return max(sum(worth(path, chances, aside) for path in tree) for tree in everything)


def logs_of(chances: list[list[float]]) -> list[list[float]]:
    return [[math.log(chance) if chance else -math.inf for chance in row] for row in chances]


def total(paths: list[Path], chances: list[list[float]], aside: float) -> float:
    return sum(worth(path, chances, aside) for path in paths)


@st.composite
def small_cases(draw: st.DrawFn) -> tuple[list[list[float]], float, int]:
    """Chances of at most 3 candidates for at most 3 positions, the best first and the first above 0; aside; budget."""
    K, C = draw(st.sampled_from([(1, 3), (2, 2), (2, 3), (3, 1), (3, 2)]))
    rows = [
        sorted((draw(st.sampled_from([0.0, 0.05, 0.1, 0.2, 0.3, 0.45])) for _ in range(C)), reverse=True)
        for _ in range(K)
    ]
    chances = [[max(row[0], 0.01), *row[1:]] for row in rows]
    return chances, draw(st.sampled_from(ASIDES)), draw(st.integers(1, 4))


@given(small_cases())
@settings(deadline=None, max_examples=150)
def test_a_grown_tree_is_the_best_of_all(case: tuple[list[list[float]], float, int]) -> None:
    """Guards the gain of trees, which no text shows: a wrong sign, a penalty that is forgotten or paid twice, and a
    budget that is exceeded or not used up. A child is worth no more than its parent, so taking the best node that can
    be added finds the best tree."""
    chances, aside, budget = case
    found = best_first(logs_of(chances), budget, aside=aside)
    possible = [path for path in all_paths(chances) if worth(path, chances, aside) > 0]
    assert len(found) == len(set(found)) == min(budget, len(possible))
    assert set(found) <= set(possible)
    assert all(path[:-1] in found[:place] for place, path in enumerate(found) if len(path) > 1), "parents come first"
    assert total(found, chances, aside) == pytest.approx(best_total(chances, aside, budget))


@pytest.mark.parametrize("wrong", [lambda rows: [row[::-1] for row in rows], lambda rows: rows[::-1]])
def test_a_worse_tree_is_caught(wrong: object) -> None:
    """Control of the enumeration: ranking from the worst, or positions in the wrong order, must not pass."""
    chances = [[0.8, 0.1, 0.05], [0.5, 0.4, 0.1]]
    found = best_first(logs_of(wrong(chances)), 3, aside=0.5)
    assert total(found, chances, 0.5) < best_total(chances, 0.5, 3) - 0.01


def test_nothing_grows_from_nothing() -> None:
    """Guards rounds in which nothing is asked for."""
    assert best_first([], 5, aside=0.5) == []


def sampler_of(samplings: tuple[Sampling, ...], rule: str, tree: Tree | None, *, confidence: bool = False) -> Sampler:
    return sampler([[1, 2, 3]] * len(samplings), samplings, rule=rule, tree=tree, wants_confidence=confidence)


@pytest.mark.parametrize("rule", ["match", "rejection"])
@pytest.mark.parametrize("vocabulary", [2, 7, 40])
@pytest.mark.parametrize("budget", [1, 2, 5, 16, 23])
def test_a_draft_has_as_many_nodes_as_the_budget(rule: str, vocabulary: int, budget: int) -> None:
    """Guards the width of the target's pass: a tree is never larger than its budget, which is what the speed was
    planned for, and not smaller where there are candidates enough."""
    samplings = (GREEDY, Sampling(temperature=0.8, seed=3), Sampling(temperature=1.2, top_k=2, seed=4))
    tree = Tree(budget=budget)
    made = sampler_of(samplings, rule, tree)
    candidates = made.candidates(random_logits(3, 3, vocabulary), 0, candidates_needed(tree))
    for aside in ASIDES:
        draft = assemble(candidates, tree, aside=aside)
        C = candidates.tokens.shape[2]
        for row, open_ones in enumerate((C, C, min(C, 2))):
            nodes = int((draft.tokens[row] != ABSENT).sum())
            # Three positions; aside of 0, only the best token of each is followed by others.
            most = 3 * open_ones if aside == 0.0 else open_ones + open_ones**2 + open_ones**3
            assert nodes == min(budget, most)
            check_paths(draft.tokens[row].tolist(), draft.parents[row].tolist(), candidates, row)


def check_paths(tokens: list[int], parents: list[int], candidates: Candidates, row: int) -> None:
    """Every node holds a candidate of its depth, and no two siblings the same."""
    there = [node for node, token in enumerate(tokens) if token != ABSENT]
    assert len({(parents[node], tokens[node]) for node in there}) == len(there)
    for node in there:
        assert tokens[node] in candidates.tokens[row, len(path_to(parents, node)) - 1].tolist()


@pytest.mark.parametrize("rule", ["match", "rejection"])
@pytest.mark.parametrize("tree", [Tree(budget=7), Tree(paths=((0,), (1,)))])
def test_estimates_are_logarithms_of_probabilities(rule: str, tree: Tree) -> None:
    """Guards the ranking of a tree's paths: estimates of one position add up to 1, so that positions can be compared,
    and fall from candidate to candidate where the best come first."""
    samplings = (GREEDY, Sampling(temperature=0.8, seed=3), Sampling(temperature=1.2, top_k=4, seed=4))
    found = sampler_of(samplings, rule, tree).candidates(random_logits(3, 4, 9), 0, 9)
    torch.testing.assert_close(found.log_probs.exp().sum(-1), torch.ones(3, 4, dtype=torch.float64))
    if found.probs is not None:
        # Behind the last token that can be drawn, nothing can be; a greedy row draws nothing.
        torch.testing.assert_close(found.probs[1:].sum(-1), (found.log_probs[1:] > -math.inf).double())
        torch.testing.assert_close(found.probs[0].sum(-1), torch.ones(4, 9, dtype=torch.float64))
    if rule == "match" or tree.paths is None:
        assert (found.log_probs.diff(dim=-1).nan_to_num(nan=0.0) <= 0).all()


def test_as_many_candidates_are_asked_for_as_the_best_tree_may_need() -> None:
    """Guards trees against candidates that were never looked at: with all of the vocabulary the tree is no better."""
    made = sampler_of((GREEDY,), "match", Tree(budget=1))
    logits = random_logits(1, 3, 30) / 20  # nearly uniform, so trees are wide
    for budget in range(1, MOST_CANDIDATES + 1):
        few, many = (
            made.candidates(logits, 0, number).log_probs[0].tolist()
            for number in (candidates_needed(Tree(budget=budget)), 30)
        )
        assert best_first(few, budget, aside=0.5) == best_first(many, budget, aside=0.5)
    assert candidates_needed(Tree(budget=100)) == MOST_CANDIDATES
    assert candidates_needed(None) == 1
    assert candidates_needed(Tree(paths=((0,), (3,), (0, 1)))) == 4


@pytest.mark.parametrize("confidence", [False, True])
@pytest.mark.parametrize("rule", ["match", "rejection"])
@pytest.mark.parametrize("tree", [None, Tree(budget=9), Tree(paths=((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)))])
def test_nodes_keep_what_is_known_of_their_place(tree: Tree | None, rule: str, confidence: bool) -> None:
    """Guards the rejection rule against another place's q, and the length policy "confidence", which cuts nothing
    where a draft does not say how sure it is: as a chain and as a tree, nodes have what their candidates have."""
    samplings = (GREEDY, Sampling(temperature=0.8, seed=3), Sampling(temperature=1.2, top_k=2, seed=4))
    logits = random_logits(3, 3, 7)
    made = sampler_of(samplings, rule, tree, confidence=confidence)
    found = made.candidates(logits, 0, candidates_needed(tree))
    draft = assemble(found, tree, aside=0.5)
    assert (draft.confidence is None) == (not confidence)
    assert (draft.probs is None) == (rule == "match" or (tree is not None and tree.budget is not None))
    if confidence:
        # A greedy row is as sure as its softmax says, the others as theirs at the temperature; filters do not count.
        alone = torch.stack(
            [
                probabilities(row, Sampling(temperature=s.temperature or 1.0)).amax(-1)
                for s, row in zip(samplings, logits, strict=True)
            ]
        )
        torch.testing.assert_close(found.confidence, alone)
    for row in range(3):
        tokens, parents = draft.tokens[row].tolist(), draft.parents[row].tolist()
        for node, token in enumerate(tokens):
            if token == ABSENT:
                continue
            depth = len(path_to(parents, node)) - 1
            rank = found.tokens[row, depth].tolist().index(token)
            if draft.probs is not None:
                assert torch.equal(draft.probs[row, node], found.probs[row, depth, rank])
            if confidence:
                assert draft.confidence[row, node] == found.confidence[row, depth]


@pytest.mark.parametrize(("positions", "vocabulary"), [(1, 9), (2, 9), (3, 9), (3, 2), (3, 1), (2, 3)])
def test_a_fixed_tree_has_the_paths_that_there_are_candidates_for(positions: int, vocabulary: int) -> None:
    """Guards rounds that are shallower than the tree, near the end of an answer, and the smallest vocabularies."""
    tree = Tree(paths=((0,), (1,), (2,), (3,), (0, 0), (0, 2), (0, 0, 0), (0, 0, 3)))
    made = sampler_of((GREEDY,), "match", tree)
    found = made.candidates(random_logits(1, positions, vocabulary), 0, candidates_needed(tree))
    expected = [path for path in tree.paths or () if len(path) <= positions and max(path) < vocabulary]
    draft = assemble(found, tree, aside=0.5)
    tokens, parents = draft.tokens[0].tolist(), draft.parents[0].tolist()
    assert ABSENT not in tokens
    ranks = [found.tokens[0, len(path) - 1].tolist().index(token) for path, token in zip(expected, tokens, strict=True)]
    assert [tuple(ranks[step] for step in path_to(parents, node)) for node in range(len(tokens))] == expected


def part_of(whole: Candidates, first: int, last: int) -> Candidates:
    return Candidates(
        tokens=whole.tokens[:, first:last], log_probs=whole.log_probs[:, first:last], probs=None, confidence=None
    )


@pytest.mark.parametrize("sureness", [1, 4, 20])
@pytest.mark.parametrize("positions", [1, 7, 8, 9, 16, 17, 40])
@pytest.mark.parametrize(
    "tree", [None, Tree(paths=((0,), (1,), (0, 2))), *(Tree(budget=budget) for budget in (1, 7, 8, 9, 12, 40))]
)
def test_candidates_are_asked_for_as_far_as_trees_reach(tree: Tree | None, positions: int, sureness: int) -> None:
    """Guards deep drafts: they are those that all positions at once give, what is deeper is told the best tokens before
    it, and nothing is computed that no row's tree is deep enough for."""
    log_probs = (
        (random_logits(2, positions, 4) * torch.tensor([[[sureness]], [[1]]])).log_softmax(-1).sort(-1)[0].flip(-1)
    )
    tokens = torch.arange(2 * positions * 4).view(2, positions, 4)
    whole = Candidates(tokens=tokens, log_probs=log_probs, probs=None, confidence=None)
    asked, grown = [], []

    def candidates_at(first: int, last: int, before: torch.Tensor | None) -> Candidates:
        assert (before is None) if first == 0 else torch.equal(before, tokens[:, :first, 0])
        asked.append((first, last))
        return part_of(whole, first, last)

    def faster(log_probs: torch.Tensor, budget: int, *, aside: float) -> torch.Tensor | None:
        grown.append(budget)
        return grow(log_probs, budget, aside=aside) if len(grown) % 2 else None

    found = assemble_from(candidates_at, positions, tree, aside=0.5, faster=faster)
    expected = assemble(whole, tree, aside=0.5)
    assert torch.equal(found.tokens, expected.tokens) and torch.equal(found.parents, expected.parents)
    needed = [(0, positions)]
    if tree is not None and tree.budget is not None:
        needed = [(0, min(8, positions))]
        while (known := needed[-1][1]) < positions:
            if depths(assemble(part_of(whole, 0, known), tree, aside=0.5).parents).max() < known - 1:
                break
            needed.append((known, min(2 * known, positions)))
        assert grown == [tree.budget] * len(needed)
    assert asked == needed


def test_what_is_grown_faster_is_taken() -> None:
    """Guards the growth in C++: it is asked for the same tree, and its answer is the draft."""
    tokens, log_probs = torch.tensor([[[5, 6]]]), torch.tensor([[[-0.5, -1.0]]])
    candidates = Candidates(tokens=tokens, log_probs=log_probs, probs=None, confidence=None)

    def faster(numbers: torch.Tensor, budget: int, *, aside: float) -> torch.Tensor:
        assert numbers is log_probs and (budget, aside) == (1, 0.25)
        return torch.tensor([[[0]], [[1]], [[ABSENT]]])

    draft = assemble(candidates, Tree(budget=1), aside=0.25, faster=faster)
    assert (draft.tokens.tolist(), draft.parents.tolist()) == ([[6]], [[ABSENT]])


def test_a_fixed_tree_without_a_candidate_is_empty() -> None:
    """Guards the smallest vocabularies: a draft of no nodes is one of integers too."""
    made = sampler_of((GREEDY,), "match", Tree(paths=((1,),)))
    draft = assemble(made.candidates(random_logits(1, 2, 1), 0, 2), Tree(paths=((1,),)), aside=0.5)
    assert draft.tokens.shape == draft.parents.shape == (1, 0)
    assert draft.tokens.dtype == draft.parents.dtype == torch.long


def test_under_the_rejection_rule_a_grown_tree_has_the_likeliest_tokens() -> None:
    """Guards the distribution: siblings that are not drawn with a known probability must not depend on noise."""
    tree = Tree(budget=9)
    logits = random_logits(1, 3, 40)
    made = sampler_of((Sampling(temperature=1.0, seed=4),), "rejection", tree)
    found = made.candidates(logits, 0, candidates_needed(tree))
    assert torch.equal(found.tokens, logits.topk(9).indices)
