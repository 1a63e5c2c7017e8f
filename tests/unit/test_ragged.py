from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paradraft import ragged
from paradraft.tree import ABSENT

ROWS = st.lists(st.tuples(*[st.lists(st.integers(0, 3), max_size=4)] * 2), min_size=1, max_size=4)


def filled(rows: list[list[int]], spare: int = 0) -> torch.Tensor:
    width = max(map(len, rows)) + spare
    return torch.tensor([row + [ABSENT] * (width - len(row)) for row in rows], dtype=torch.long).view(len(rows), width)


@given(ROWS, st.integers(0, 2))
@settings(deadline=None)
def test_rows_are_joined_as_lists_are(rows: list[tuple[list[int], list[int]]], spare: int) -> None:
    """Guards against holes between tokens, token 0 taken for a hole, and columns that hold nothing."""
    first, second = ([row[i] for row in rows] for i in range(2))
    joined = [a + b for a, b in zip(first, second, strict=True)]
    assert ragged.to_lists(filled(first, spare)) == first
    assert torch.equal(ragged.from_lists(first), filled(first))
    assert torch.equal(ragged.append(filled(first, spare), filled(second, spare)), filled(joined))
