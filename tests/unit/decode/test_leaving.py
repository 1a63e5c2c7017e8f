"""Which rows leave a batch, and when."""

from __future__ import annotations

import pytest
import torch

from paradraft.core import Draft, Verdict
from paradraft.decode.generation import Stops


def after_one_round(limits: list[int]) -> Stops:
    """Each row has got one token."""
    rows = len(limits)
    stops = Stops(limits=limits, eos_ids=frozenset())
    nothing, tokens = torch.empty(rows, 0, dtype=torch.long), torch.ones(rows, 1, dtype=torch.long)
    stops.cut(Draft.empty(rows, tokens.device), Verdict(path=nothing, accepted=torch.zeros(rows).long(), tokens=tokens))
    return stops


@pytest.mark.parametrize(
    ("ended", "batch", "is_enough"),
    [(0, 1, False), (0, 4, False), (1, 2, True), (1, 4, True), (1, 5, False), (2, 8, True), (3, 16, False)],
)
def test_rows_leave_from_a_quarter_of_the_batch_on(ended: int, batch: int, is_enough: bool) -> None:
    """Guards throughput: rows that ended cost time in every pass, and moving the others costs some once."""
    rows = after_one_round([1] * ended + [9] * (batch - ended)).leave()
    assert (rows is not None) == is_enough
    if rows is not None:
        assert rows.tolist() == list(range(ended, batch))


def test_nobody_leaves_a_batch_that_is_over() -> None:
    """Guards against a batch of no rows."""
    assert after_one_round([1, 1, 1]).leave() is None
