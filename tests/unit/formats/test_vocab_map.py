from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paradraft.formats.vocab_map import VocabMap


def stored_tensors(ids: list[int], vocabulary: int) -> tuple[Tensor, Tensor]:
    """As speculators and SpecForge write them, in their own words: `d2t[i] = used[i] - i`, `t2d[id] = id in used`."""
    d2t = torch.tensor([token - row for row, token in enumerate(ids)])
    return d2t, torch.tensor([token in ids for token in range(vocabulary)])


def test_offsets_become_ids() -> None:
    """Guards the meaning of `d2t`: offsets, and not ids; with all ids it is zeros."""
    for ids in ([1, 2, 5, 7], [0], list(range(8))):
        d2t, t2d = stored_tensors(ids, 8)
        for given in (t2d, None):
            found = VocabMap.stored(d2t, given, rows=len(ids), vocabulary=8, name="draft")
            assert found.to_target.tolist() == ids
    assert VocabMap.stored(d2t.int(), None, rows=8, vocabulary=8, name="draft").to_target.dtype == torch.long


@pytest.mark.parametrize(
    ("d2t", "t2d", "problem"),
    [
        ([0, 0], None, r"d2t is torch.int64 of the shape \(2,\): it needs an integer for each of the 3 rows"),
        ([0.0, 0.0, 0.0], None, "d2t is torch.float32 of the shape"),
        ([True, False, False], None, "d2t is torch.bool of the shape"),
        ([0, 0, 4], None, "d2t names the token 6, and its embedding has 6 rows"),
        ([-1, 0, 0], None, "d2t names the token -1, and its embedding has 6 rows"),
        ([1, 0, 0], None, "d2t gives the rows 0 and 1 of the output head the tokens 1 and 1: they must increase"),
        ([0, 3, 1], None, "d2t gives the rows 1 and 2 of the output head the tokens 4 and 3: they must increase"),
        ([0, 1, 1], [1, 0, 0, 1, 0, 1], "d2t and t2d disagree about the token 2"),
        ([0, 1, 1], [1, 0, 1, 1, 0, 1], "d2t and t2d disagree about the token 5"),
    ],
)
def test_a_damaged_map_is_refused(d2t: list[int], t2d: list[int] | None, problem: str) -> None:
    """Guards against drafts of other tokens than the head means, which are slow and not wrong, so that no text shows
    them."""
    flags = None if t2d is None else torch.tensor(t2d, dtype=torch.bool)
    with pytest.raises(ValueError, match=f"^draft 'name': {problem}"):
        VocabMap.stored(torch.tensor(d2t), flags, rows=3, vocabulary=6, name="name")


def test_logits_go_to_their_ids() -> None:
    """Guards the shape, the -inf of all other ids, and padding: ids that the target does not have are left out."""
    found = VocabMap(to_target=torch.tensor([1, 3, 6])).below(5, torch.device("cpu"))
    logits = torch.arange(12.0, dtype=torch.float64).view(2, 2, 3)
    spread = found.spread(logits, 5)
    assert spread.dtype == logits.dtype
    assert torch.equal(spread[..., [1, 3]], logits[..., :2])
    assert bool((spread[..., [0, 2, 4]] == -torch.inf).all())
