from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from paradraft.data.samples import Sample
from paradraft.train.objectives.batch import Drop, collate, pack
from paradraft.train.objectives.losses import IGNORED
from paradraft.train.objectives.rows import FILLING, attention_rule
from tests.conftest import VOCAB

MASK = VOCAB + 1


def generators(number: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in range(number)]


def sample_of(*tokens: int) -> Sample:
    return Sample(tokens=list(tokens), is_label=[True] * len(tokens))


def test_only_labels_count() -> None:
    """Guards against learning the prompt, against masks inside the prompt, where nothing is ever drafted, and against
    a shifted label flag: the flag is that of the next token."""
    sample = Sample(tokens=[1, 2, 3, 4, 5], is_label=[False, False, True, True, False])
    batch = collate([[sample]], Drop(k=2, r=1.0, r_min=0.0, mask_id=MASK), [generators(1)])
    assert batch.positions[0].tolist() == [0, 1, 2, 3, 2, 3]
    assert batch.tokens[0].tolist() == [1, 2, 3, 4, MASK, MASK]
    assert batch.labels[0].tolist() == [IGNORED, 3, 4, IGNORED, 4, IGNORED]


def test_a_first_token_that_is_not_read_has_no_rows() -> None:
    """Guards drafters that never read it: nothing may see it, and no mask follows it. A sample of two tokens has
    nothing else, and a batch without rows would be none."""
    drop = Drop(k=3, r=1.0, r_min=1.0, mask_id=MASK, reads_first=False)
    batch = collate([[sample_of(1, 2, 3, 4), sample_of(5, 6, 7)]], drop, [generators(2)])
    assert batch.positions[0].tolist() == [1, 2, 2, 1]
    assert batch.tokens[0].tolist() == [2, 3, MASK, 6]
    assert batch.labels[0].tolist() == [3, 4, 4, 7]
    assert batch.text_indices[0].tolist() == [1, 2, 2, 4]
    assert collate([[sample_of(1, 2)]], drop, [generators(1)]).tokens.tolist() == [[1]]


def test_filling_sees_nobody_and_is_seen_by_nobody() -> None:
    """Guards against rows that only fill up: nobody learns from them, and their softmax is not over nothing."""
    samples = [sample_of(*range(1, 13)), sample_of(1, 2, 3)]
    drop = Drop(k=4, r=0.6, r_min=0.2, mask_id=MASK)
    batch = collate([[sample] for sample in samples], drop, [[g] for g in generators(2)])
    filling = batch.documents[1] == FILLING
    R = int((~filling).sum())
    assert 0 < R < batch.tokens.shape[1] and not filling[:R].any()
    sees = attention_rule(batch.rows)[1]
    assert not sees[:R, R:].any() and not sees[R:, :R].any()
    assert sees.diagonal().all()
    assert (batch.labels[1, R:] == IGNORED).all() and (batch.labels[1, :R] != IGNORED).all()


def test_packed_samples_are_those_that_stand_alone() -> None:
    """Guards packing: positions begin again, nobody sees another sample, the same rows are dropped, and the teacher is
    asked about the right tokens."""
    samples = [sample_of(*range(1, 13)), sample_of(1, 2, 3), sample_of(9, 8, 7, 6)]
    drop = Drop(k=4, r=0.6, r_min=0.2, mask_id=MASK)
    alone = [collate([[sample]], drop, [[g]]) for sample, g in zip(samples, generators(3), strict=True)]
    packed = collate([samples], drop, [generators(3)])
    for name in ("tokens", "positions", "depths", "labels"):
        assert getattr(packed, name)[0].tolist() == [x for batch in alone for x in getattr(batch, name)[0].tolist()]
    expected = torch.block_diag(*(attention_rule(batch.rows)[0].int() for batch in alone)).bool()
    assert torch.equal(attention_rule(packed.rows)[0], expected)
    real = packed.depths[0] == 0
    assert torch.equal(packed.texts.tokens[0][packed.text_indices[0]][real], packed.tokens[0][real])
    assert torch.equal(packed.texts.positions[0][packed.text_indices[0]], packed.positions[0])
    assert torch.equal(packed.texts.documents[0][packed.text_indices[0]], packed.documents[0])


@given(st.lists(st.integers(2, 30), max_size=12), st.integers(30, 60))
@settings(deadline=None)
def test_packing_loses_nobody_and_overfills_nothing(lengths: list[int], room: int) -> None:
    """Guards against samples that are dropped, learnt twice, or packed beyond the memory that was counted."""
    samples = [sample_of(*[1] * length) for length in lengths]
    groups = pack(samples, room)
    assert sorted(index for group in groups for index in group) == list(range(len(samples)))
    filled = [sum(lengths[index] for index in group) for group in groups]
    assert all(0 < tokens <= room for tokens in filled)
    assert all(a + b > room for i, a in enumerate(filled) for b in filled[:i] if len(filled) == 2)


class Largest(TorchDispatchMode):
    """Remembers the most elements of any tensor that was made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.untyped_storage().nbytes() // result.element_size())
        return result


@pytest.mark.parametrize("r", [0.5, 1.0])
def test_no_dense_mask_is_built_before_dropping(r: float) -> None:
    """Guards against a (K N)^2 tensor: 1 GiB per sample at N = 1024 and K = 16. Nothing is larger than the mask over
    the kept rows; the control, without dropping, must see the dense one."""
    n, k = 100, 16
    with Largest() as largest:
        batch = collate([[sample_of(*[1] * (n + 1))]], Drop(k=k, r=r, r_min=0.05, mask_id=MASK), [generators(1)])
        attention_rule(batch.rows)
    R = batch.tokens.shape[1]
    assert largest.elements == R**2
    assert (R**2 < (k * n) ** 2 / 10) == (r < 1)
    assert r < 1 or R**2 > (k * n) ** 2 / 2
