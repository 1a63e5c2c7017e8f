from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paradraft.train.rows import Rows, attention_rule

PAIRS = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 4)), min_size=1, max_size=20)


def oracle(pairs: list[tuple[int, int]]) -> list[list[bool]]:
    """The rule of design section 4, pair by pair; each pair is (anchor, depth)."""
    result = []
    for anchor, depth in pairs:
        row = []
        for other_anchor, other_depth in pairs:
            other_position = other_anchor + other_depth
            row.append(
                (other_depth == 0 and other_position <= anchor) or (other_anchor == anchor and other_depth <= depth)
            )
        result.append(row)
    return result


@given(PAIRS)
@settings(deadline=None)
def test_attention_rule_equals_a_double_loop(pairs: list[tuple[int, int]]) -> None:
    """Guards against a mask that sees real tokens behind its anchor, other chains, or later masks of its own."""
    position = torch.tensor([anchor + depth for anchor, depth in pairs])
    rows = Rows.of_sample(position, torch.tensor([depth for _, depth in pairs]))
    assert rows.anchor.tolist() == [anchor for anchor, _ in pairs]
    assert attention_rule(rows).tolist() == oracle(pairs)


def test_rows_before_the_text_do_not_exist() -> None:
    """Guards against rows whose anchor is below 0: they would predict from nothing."""
    with pytest.raises(AssertionError):
        Rows.of_sample(torch.tensor([1]), torch.tensor([2]))
