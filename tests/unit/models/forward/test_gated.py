"""Gated changes: rows with other ids are what they are without, and changed ones what merged weights make of them."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor

from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward import FINAL_NORM
from paradraft.models.forward.gated import QKV, GatedChange, outputs_of, shapes_of
from paradraft.models.forward.pipeline import split
from paradraft.placement import stages_of
from tests.conftest import VOCAB, tiny_model

KINDS = [
    (torch.float32, None),
    (torch.bfloat16, None),
    (torch.float64, False),
    pytest.param(torch.float64, True, marks=pytest.mark.slow),
    (torch.bfloat16, False),
]
PROMPTS = [[1, 2, 3, 4], [5, 6]]
WIDTH = 32
ROWS_PD = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
PARENTS_BN = torch.tensor([[-1, 0, 1, 1, 3], [-1, 0, 0, 2, -1]])


def change_for(lm: CausalLM, rank: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> GatedChange:
    generator = torch.Generator().manual_seed(seed)
    shapes = shapes_of(lm.model.config, rank)
    return GatedChange.of({name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()})


def model_for(dtype: torch.dtype, compiled: bool | None) -> CausalLM:
    lm = CausalLM(tiny_model(1).to(dtype), vocab_size=VOCAB, compiled=compiled)
    assert lm.is_native == (compiled is None)
    lm.start()
    lm.cache.join(len(PROMPTS))
    lm.prefill(PROMPTS)
    return lm


def read(lm: CausalLM, ids: range, layers: tuple[int, ...] = (1, FINAL_NORM)) -> dict[int, Tensor]:
    """States of a pass in which some rows read `ids` after a token or after each other; logits are at -2."""
    tokens_BN = torch.tensor([[4, 7, ids[0], 9, ids[1]], [6, ids[0], 3, ids[0], -1]])
    out = lm.forward(tokens_BN, PARENTS_BN, hidden_layers=layers)
    return {**out.hidden, -2: out.logits}


IS_ADDED = torch.tensor([[False, False, True, False, True], [False, True, False, True, True]])  # or absent


@pytest.mark.parametrize(("dtype", "compiled"), KINDS)
@pytest.mark.parametrize("rank", [1, 4])
def test_other_rows_are_not_changed(dtype: torch.dtype, compiled: bool | None, rank: int) -> None:
    """Guards text: with a change loaded, and large, rows of other ids are the same to the last bit in the same pass;
    two changes do not meet; and ids without a change stay as they are."""
    lm = model_for(dtype, compiled)
    plain = lm.add_embeddings(ROWS_PD)
    before = read(lm, plain)
    ids = [lm.add_embeddings(ROWS_PD, change_for(lm, rank, seed)) for seed in (1, 2)]
    after, one, other = read(lm, plain), *(read(lm, each) for each in ids)
    for layer, states in before.items():
        assert torch.equal(states, after[layer])
        assert torch.equal(one[layer][~IS_ADDED], states[~IS_ADDED])
        for pair in ((one, before), (other, before), (one, other)):
            different = (pair[0][layer] - pair[1][layer]).abs()[IS_ADDED].max()
            assert different > 1e-3


@pytest.mark.parametrize("compiled", [None, False])
def test_a_change_ends(compiled: bool | None) -> None:
    """Guards an engine whose drafter is replaced: a change that has ended concerns no row, and costs nothing in passes
    of the model's own code; the other one stays."""
    lm = model_for(torch.float32, compiled)
    before = lm.add_embeddings(ROWS_PD)
    one, other = (lm.add_embeddings(ROWS_PD, change_for(lm, 2, seed)) for seed in (1, 2))
    plain, changed = read(lm, before), read(lm, other)
    lm.end_change(one)
    lm.end_change(before)
    assert all(torch.equal(plain[layer], states) for layer, states in read(lm, one).items())
    assert all(torch.equal(changed[layer], states) for layer, states in read(lm, other).items())
    lm.end_change(other)
    assert all(torch.equal(plain[layer], states) for layer, states in read(lm, other).items())
    projections = [layer.self_attn.q_proj for layer in lm.model.model.layers]
    assert not any(projection._forward_hooks for projection in projections)


def test_a_change_has_the_dtype_of_its_model() -> None:
    """Guards products of bfloat16 inputs with float32 weights, which C++ does not have."""
    lm = model_for(torch.bfloat16, None)
    found = read(lm, lm.add_embeddings(ROWS_PD, change_for(lm, 3, 1, torch.float32)))
    rounded = read(lm, lm.add_embeddings(ROWS_PD, change_for(lm, 3, 1)))
    assert all(torch.equal(states, rounded[layer]) for layer, states in found.items())


@pytest.mark.parametrize(("dtype", "compiled"), KINDS)
def test_a_changed_row_is_what_merged_weights_make_of_it(dtype: torch.dtype, compiled: bool | None) -> None:
    """Guards each projection of each layer, the order of queries, keys and values included: a chain of added ids after
    nothing else, against the model's own code with merged weights in float64."""
    lm = CausalLM(tiny_model(1).to(dtype), vocab_size=VOCAB, compiled=compiled)
    change, merged = change_for(lm, 3, 1), deepcopy(lm.model).double()
    for number, layer in enumerate(merged.model.layers):
        ups = change.qkv_up[number].double().split(outputs_of(merged.config))
        for name, up in zip(QKV, ups, strict=True):
            getattr(layer.self_attn, name).weight.data += up @ change.qkv_down[number].double()
        layer.self_attn.o_proj.weight.data += change.output_up[number].double() @ change.output_down[number].double()
    lm.start()
    lm.cache.join(1)
    ids = lm.add_embeddings(ROWS_PD, change)
    found = lm.forward(torch.tensor([[*ids, ids[0]]]), hidden_layers=(1, 2, FINAL_NORM)).hidden
    vectors = torch.cat([ROWS_PD, ROWS_PD[:1]])[None].double()
    with torch.no_grad():
        states = merged.model(inputs_embeds=vectors, output_hidden_states=True)
    expected = {1: states.hidden_states[1], FINAL_NORM: states.last_hidden_state}
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float64: 1e-6}[dtype]
    for layer, states_BND in expected.items():
        differences = torch.linalg.vector_norm(found[layer].double() - states_BND, dim=-1)
        assert (differences / torch.linalg.vector_norm(states_BND, dim=-1)).max() < tolerance


@pytest.mark.parametrize(("dtype", "compiled"), KINDS[:3])
def test_the_last_layer_computes_wanted_rows_only(dtype: torch.dtype, compiled: bool | None) -> None:
    """Guards which rows a change belongs to where C++ computes the last layer only for some of them."""
    lm = model_for(dtype, compiled)
    ids = lm.add_embeddings(ROWS_PD, change_for(lm, 4, 1))
    whole = read(lm, ids)[-2]
    tokens_BN = torch.tensor([[4, 7, ids[0], 9, ids[1]], [6, ids[0], 3, ids[0], -1]])
    wanted = torch.tensor([[4, 1, 2], [3, 0, 1]])
    some = lm.forward(tokens_BN, PARENTS_BN, logit_rows=wanted).logits
    torch.testing.assert_close(some, whole.gather(1, wanted[:, :, None].expand_as(some)), rtol=1e-9, atol=1e-9)


def test_passes_that_cannot_change_attention_refuse_it() -> None:
    """Guards against a change that is silently left out in pipeline stages and tensor parallelism."""
    model = tiny_model(1)
    staged = CausalLM(model, vocab_size=VOCAB, stages=split(model, stages_of("cpu/cpu") or ()))
    parallel = CausalLM(tiny_model(1), vocab_size=VOCAB, ranks=2)
    for lm, told in ((staged, "in stages"), (parallel, "tensor-parallel")):
        with pytest.raises(ValueError, match=told):
            lm.add_embeddings(ROWS_PD, change_for(lm, 2, 1))
