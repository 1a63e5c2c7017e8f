from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paradraft.train.objectives.rows import Rows, conditional_drop


def drop(n: int, k: int, r: float, r_min: float, seed: int = 0) -> Rows:
    return conditional_drop(n, k=k, r=r, r_min=r_min, generator=torch.Generator().manual_seed(seed))


def pairs(rows: Rows) -> list[tuple[int, int]]:
    return list(zip(rows.position.tolist(), rows.depth.tolist(), strict=True))


@given(st.integers(1, 40), st.integers(1, 8), st.floats(0.1, 1), st.floats(0, 1), st.integers(0, 99))
@settings(deadline=None)
def test_every_kept_row_has_its_whole_chain(n: int, k: int, r: float, r_min: float, seed: int) -> None:
    """Guards against rows whose keys were dropped, rows kept twice, and rows beyond the text."""
    kept = pairs(drop(n, k, r, r_min, seed))
    assert len(set(kept)) == len(kept)
    assert [pair for pair in kept if pair[1] == 0] == [(position, 0) for position in range(n)]
    for position, depth in kept:
        assert position < n and depth < k
        assert depth == 0 or (position - 1, depth - 1) in kept


@pytest.mark.parametrize(("r", "r_min"), [(0.7, 0.2), (0.5, 0.0), (0.9, 0.6)])
def test_counts_are_those_of_equation_11(r: float, r_min: float) -> None:
    """Guards the promised number of rows: depth i keeps N * max(r^i, r_min), but for what the chains' ends cost."""
    n, k = 1000, 8
    counts = torch.bincount(drop(n, k, r, r_min).depth, minlength=k).tolist()
    expected = [n * max(r**depth, r_min) for depth in range(k)]
    for depth in range(1, k):
        # A row at the very end of the text has no successor: at most one is lost per depth.
        assert expected[depth] - depth - 0.5 <= counts[depth] <= expected[depth] + 0.5
    if (r, r_min) == (0.7, 0.2):
        assert sum(counts) == pytest.approx(3.37 * n, rel=0.01)


def test_r_of_one_keeps_everything() -> None:
    """Guards against rows dropped by rounding, or by the floor, when nothing is to be dropped."""
    expected = [(position, depth) for depth in range(4) for position in range(depth, 9)]
    assert pairs(drop(9, 4, r=1.0, r_min=0.0)) == expected
    assert pairs(drop(2, 5, r=1.0, r_min=0.0)) == [(0, 0), (1, 0), (1, 1)]


def test_masks_stand_after_the_positions_that_may_draft_alone() -> None:
    """Guards the training of answers against masks inside prompts, and their number: a share of those positions."""
    may_draft = torch.tensor([False] * 10 + [True] * 20)
    rows = conditional_drop(30, k=3, r=0.5, r_min=0.0, generator=torch.Generator().manual_seed(0), may_draft=may_draft)
    assert rows.position[rows.depth == 0].tolist() == list(range(30))
    assert rows.anchor[rows.depth > 0].min() >= 10
    assert torch.bincount(rows.depth).tolist() == [30, 10, 5]


def test_choice_is_random_but_repeatable() -> None:
    """Guards against always dropping the same positions, and against a run that cannot be resumed."""
    assert pairs(drop(40, 4, 0.5, 0.2, seed=1)) == pairs(drop(40, 4, 0.5, 0.2, seed=1))
    assert pairs(drop(40, 4, 0.5, 0.2, seed=1)) != pairs(drop(40, 4, 0.5, 0.2, seed=2))
    seen = {position for seed in range(60) for position, depth in pairs(drop(10, 2, 0.5, 0.2, seed)) if depth == 1}
    assert seen == set(range(1, 10)), "each position is kept half the time; false alarm 9 * 0.44^60 < 1e-20"
