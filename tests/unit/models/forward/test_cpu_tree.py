"""Trees in C++ against Python: the same nodes in the same order, and the same slots moved."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paradraft.models import kv_cache
from paradraft.models.forward.cpu import tree as in_cpp
from paradraft.models.forward.cpu.tree import grow
from paradraft.sampling import candidates as in_python
from paradraft.sampling.candidates import Candidates, assemble, assemble_from
from paradraft.tree import ABSENT, Tree

ASIDES = (0.0, 0.5, 1.0)
KINDS = {
    "random": lambda shape, chooser: torch.randn(shape, generator=chooser).log_softmax(-1),
    "ties": lambda shape, chooser: -torch.randint(0, 3, shape, generator=chooser).float(),
    "all alike": lambda shape, chooser: torch.full(shape, -math.log(2)),
    "few candidates": lambda shape, chooser: torch.where(torch.rand(shape, generator=chooser) < 0.4, -math.inf, -1.0),
    "positions without numbers": lambda shape, chooser: torch.where(
        torch.rand(*shape[:2], 1, generator=chooser) < 0.3,
        math.nan,
        torch.randn(shape, generator=chooser).log_softmax(-1),
    ),
}


def log_probs(kind: str, seed: int) -> Tensor:
    """`[B, K, C]`, the best candidates first; NaN counts as the best, as in `topk`."""
    chooser = random.Random(seed)
    shape = chooser.randint(1, 4), chooser.randint(1, 6), chooser.randint(1, 6)
    generator = torch.Generator().manual_seed(seed)
    return KINDS[kind](shape, generator).double().sort(-1, descending=True).values


@pytest.mark.parametrize("aside", ASIDES)
@pytest.mark.parametrize("kind", KINDS)
def test_trees_are_grown_as_in_python(kind: str, aside: float) -> None:
    """Guards drafts that depend on whether there is a compiler: ties, rows of other sizes, and what is not a number."""
    for seed in range(60):
        found, budget = log_probs(kind, seed), seed % 23 + 1
        assert torch.equal(grow(found, budget, aside=aside), in_python.grow(found, budget, aside=aside))


@pytest.mark.parametrize(
    "wrong", [lambda found: grow(found, 12, aside=0.2), lambda found: grow(found.flip(2), 12, aside=0.5)]
)
def test_another_rule_grows_other_trees(wrong: Callable[[Tensor], Tensor]) -> None:
    """Control: a comparison that another discount, or the worst candidates first, pass would show nothing."""
    cases = [log_probs("random", seed) for seed in range(20)]
    assert not all(torch.equal(wrong(found), in_python.grow(found, 12, aside=0.5)) for found in cases)


def test_nothing_grows_from_nothing() -> None:
    """Guards rounds in which nothing is asked for, and budgets that no position can fill."""
    assert grow(torch.empty(2, 0, 3), 5, aside=0.5).shape == (3, 2, 0)
    assert grow(torch.zeros(2, 1, 1), 5, aside=0.5).tolist() == [[[0], [0]], [[0], [0]], [[ABSENT], [ABSENT]]]


@pytest.mark.parametrize("faster", [None, grow])
@pytest.mark.parametrize("aside", ASIDES)
def test_deep_positions_are_looked_at_only_where_the_tree_reaches(aside: float, faster: object) -> None:
    """Guards trees that end where candidates have not been asked for: they must be those of all positions."""
    depths = set()
    for seed in range(30):
        sharpness = 0.5 + seed % 6  # the flatter, the shallower the tree
        logits = torch.randn(2, 40, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * sharpness
        best = logits.log_softmax(-1).topk(4)
        asked: list[tuple[int, int]] = []

        def some(first: int, last: int, before_BD: Tensor | None, best=best, asked=asked) -> Candidates:
            asked.append((first, last))
            assert first == 0 or torch.equal(before_BD, best.indices[:, :first, 0])
            tokens, values = best.indices[:, first:last], best.values[:, first:last]
            return Candidates(tokens=tokens, log_probs=values, probs=None, confidence=values[:, :, 0])

        tree = Tree(budget=14)
        draft = assemble_from(some, 40, tree, aside=aside, faster=faster)
        whole = assemble(some(0, 40, None), tree, aside=aside)
        assert torch.equal(draft.tokens, whole.tokens) and torch.equal(draft.parents, whole.parents)
        is_there = draft.tokens != ABSENT
        assert torch.equal(draft.confidence[is_there], whole.confidence[is_there])
        depths.add(asked[-2][1])
    assert len(depths) > 1, "all trees are as deep as each other"


def stored(seed: int) -> tuple[kv_cache.Storage, Tensor, Tensor]:
    """A cache of random numbers, first slots, and paths that rise."""
    chooser = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = (torch.float32, torch.bfloat16, torch.float64)[seed % 3]
    layers = [tuple(torch.randn(3, 20, 2, 4, generator=generator).to(dtype) for _ in range(2)) for _ in range(2)]
    paths = [sorted(chooser.sample(range(1, 9), chooser.randint(0, 5))) for _ in range(3)]
    path = torch.tensor([[0, *path] + [ABSENT] * (5 - len(path)) for path in paths])
    return layers, torch.tensor([chooser.randint(0, 10) for _ in range(3)]), path


def test_slots_are_moved_as_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the keys and values of accepted tokens, in every dtype, and those of other rows and slots."""
    cases = [(stored(seed), stored(seed)) for seed in range(30)]
    for (fast, *rest), _ in cases:
        assert in_cpp.compact([tensor for layer in fast for tensor in layer], *rest)
    monkeypatch.setattr(in_cpp, "_library", lambda: None)
    moved = 0
    for (fast, *_), (plain, *rest) in cases:
        before = [tensor.clone() for layer in plain for tensor in layer]
        kv_cache.compact(plain, *rest)
        assert all(
            torch.equal(a, b) for one, other in zip(fast, plain, strict=True) for a, b in zip(one, other, strict=True)
        )
        moved += not all(map(torch.equal, before, (tensor for layer in plain for tensor in layer)))
    assert moved > 20, "a check in which nothing is moved shows nothing"


@pytest.mark.parametrize("path", [[0, 3, 2], [0, 0], [1, 0], [0, 11]])
def test_a_path_that_cannot_be_moved_in_order_is_left_to_python(path: list[int]) -> None:
    """Guards slots that would be read after they were written, and memory outside of the row."""
    layers, _, _ = stored(0)
    flat = [tensor for layer in layers for tensor in layer]
    before = [tensor.clone() for tensor in flat]
    assert in_cpp.compact(flat, torch.tensor([9, 9, 9]), torch.tensor([path] * 3)) is None
    assert all(map(torch.equal, before, flat))


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards machines that cannot build the library: trees are the same, grown in Python."""
    best = torch.randn(2, 5, 9).double().log_softmax(-1).topk(6)
    found = Candidates(tokens=best.indices, log_probs=best.values, probs=None, confidence=None)
    fast = assemble(found, Tree(budget=11), aside=0.5, faster=grow)
    monkeypatch.setattr(in_cpp, "_library", lambda: None)
    assert grow(best.values, 11, aside=0.5) is None
    plain = assemble(found, Tree(budget=11), aside=0.5, faster=grow)
    assert torch.equal(fast.tokens, plain.tokens) and torch.equal(fast.parents, plain.parents)
