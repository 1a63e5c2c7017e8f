from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paradraft.train.objectives import rows as module
from paradraft.train.objectives.rows import FILLING, FLEX, Rows, attention_mask, attention_rule, mask_function
from tests.conftest import tiny_model

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
    """Guards against a mask that sees real tokens after its anchor, other chains, or later masks of its own."""
    position = torch.tensor([anchor + depth for anchor, depth in pairs])
    rows = Rows.of_sample(position, torch.tensor([depth for _, depth in pairs]))
    assert rows.anchor.tolist() == [anchor for anchor, _ in pairs]
    assert attention_rule(rows).tolist() == oracle(pairs)


@given(PAIRS, PAIRS)
@settings(deadline=None)
def test_packed_samples_do_not_see_each_other(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    """Guards packing, and both ways in which the rule is asked for: as a matrix, and pair by pair in `flex_attention`.
    What fills a batch up sees itself and nothing else."""
    pairs, filling = first + second, 2
    anchor, depth = (torch.tensor([pair[part] for pair in pairs] + [0] * filling) for part in (0, 1))
    document = torch.tensor([0] * len(first) + [1] * len(second) + [FILLING] * filling)
    rows = Rows(
        position=torch.stack([anchor + depth] * 2), depth=torch.stack([depth] * 2), document=document.expand(2, -1)
    )
    expected = torch.block_diag(*(torch.tensor(oracle(some)) for some in (first, second)), torch.ones(filling, filling))
    assert torch.equal(attention_rule(rows), expected.bool().expand(2, -1, -1))
    index = torch.arange(len(document))
    sees = mask_function(rows)(torch.tensor(1), torch.tensor(0), index[:, None], index[None, :])
    assert torch.equal(sees, expected.bool())


@pytest.mark.parametrize(
    ("position", "depth", "document"),
    [
        ([1], [1, 0], [0]),
        ([1, 1], [1, 0], [0]),
        ([1, 1], [0, -1], [0, 0]),
        ([[[1]]], [[[1]]], [[[0]]]),
    ],
)
def test_rows_fit_together(position: list[int], depth: list[int], document: list[int]) -> None:
    """Guards against rows of one shape beside depths of another, which would be broadcast."""
    with pytest.raises(AssertionError):
        Rows(position=torch.tensor(position), depth=torch.tensor(depth), document=torch.tensor(document))


def test_rows_before_the_text_do_not_exist() -> None:
    """Guards against rows whose anchor is below 0: they would predict from nothing."""
    with pytest.raises(AssertionError):
        Rows.of_sample(torch.tensor([1]), torch.tensor([2]))


def test_each_sample_of_a_batch_has_blocks_of_its_own() -> None:
    """Guards training on a GPU, where blocks that a sample's rows see nothing of are skipped; a CPU asks the rule for
    every pair, and would not notice the blocks of another sample."""
    place = torch.arange(256)
    whole, halves = torch.zeros_like(place), place // 128
    rows = Rows(
        position=torch.stack([place, place % 128]),
        depth=torch.zeros(2, 256, dtype=torch.long),
        document=torch.stack([whole, halves]),
    )
    mask = attention_mask(rows, SimpleNamespace(config=SimpleNamespace(_attn_implementation=FLEX)))
    assert mask.shape == (2, 1, 256, 256)
    assert mask.to_dense()[:, 0].tolist() == [[[1, 0], [1, 1]], [[1, 0], [0, 1]]]


@given(PAIRS, st.integers(1, 50))
@settings(deadline=None)
def test_the_mask_is_the_same_in_blocks(pairs: list[tuple[int, int]], size: int) -> None:
    """Guards the masks of long samples, which are made some rows at a time; the last block may be smaller."""
    position = torch.tensor([[anchor + depth for anchor, depth in pairs]] * 2)
    depth = torch.tensor([[depth for _, depth in pairs]] * 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PAIRS", size)
        sees = attention_rule(Rows(position=position, depth=depth, document=torch.zeros_like(depth)))
    assert sees.tolist() == [oracle(pairs)] * 2


@pytest.mark.parametrize("autocast", [False, True])
def test_all_layers_keep_one_mask(autocast: bool) -> None:
    """Guards the memory of long samples on CPUs: SDPA makes numbers of booleans, and each layer kept its own, 3 GB of
    8000 tokens. Losses and gradients stay what they were, to the bit."""
    model = tiny_model(1, layers=3).float()
    model.set_attn_implementation("sdpa")
    rows = Rows.of_sample(torch.tensor([*range(20), 1, 2, 9]), torch.tensor([0] * 20 + [1, 2, 1]))
    rows = Rows(**{name: value[None] for name, value in vars(rows).items()})
    R, found = rows.position.shape[1], []
    for mask_of in (lambda: attention_mask(rows, model), lambda: attention_rule(rows)[:, None]):
        kept: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor, kept: dict[int, torch.Tensor] = kept) -> torch.Tensor:
            if tensor.shape[-2:] == (R, R):
                kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        model.zero_grad()
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            out = model(input_ids=rows.position, attention_mask=mask_of(), position_ids=rows.position, use_cache=False)
        out.logits.float().logsumexp(-1).sum().backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        found.append((len(kept), out.logits, gradients))
    (mine, logits, gradients), (theirs, expected, expected_gradients) = found
    assert mine == 1 < theirs
    assert torch.equal(logits, expected)
    assert all(map(torch.equal, gradients, expected_gradients))
