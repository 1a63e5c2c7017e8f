"""The table of shapes, and what is made of one."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from paradraft.drafters.parts.draft_loading import load_draft_lm
from paradraft.models.runtime import Runtime
from paradraft.sources.loading import locate
from paradraft.sources.presets import SHAPES, random_model, shape_of
from paradraft.sources.target_loading import load_target

PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.2-1b": 1_235_814_400,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-8b": 8_190_735_360,
    "qwen3-0.6b": 596_049_920,
    "smollm2-360m": 361_821_120,
    "smollm2-135m": 134_515_008,
}
"""Parameters of the published weights."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shape_has_the_parameters_of_the_published_weights(name: str) -> None:
    """Guards against a slip of the pen in the table, which would time another model."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(SHAPES[name].config())
    assert model.num_parameters() == PUBLISHED[name]


@pytest.mark.parametrize("name", SHAPES)
def test_the_mask_is_an_id_that_no_prompt_has(name: str) -> None:
    """Guards against a mask token outside the embedding, or one that the target could say."""
    shape = shape_of(f"shape:{name}")
    assert shape.config().mask_token_id == shape.mask_id < shape.rows
    assert shape.mask_id in (shape.tokens, shape.rows - 1)


def test_weights_are_made_in_the_wanted_dtype_and_always_the_same() -> None:
    """Guards against twice the memory in float32 on the way, and against drawing from the caller's random numbers."""
    before = torch.random.get_rng_state()
    one, other = (random_model("shape:tiny-target", dtype=torch.bfloat16, device="cpu") for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert {weight.dtype for weight in one.parameters()} == {torch.bfloat16}
    assert not one.training
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_shape_is_a_target_and_a_draft() -> None:
    """Guards against shapes of one family that do not fit each other: their embeddings are padded differently."""
    runtime = Runtime(dtype="float64")
    target = load_target("shape:tiny-target", runtime)
    draft = load_draft_lm(locate("shape:tiny-draft", "pard"), target, runtime)
    assert target.lm.vocab_size == draft.vocab_size == 96
    assert target.eos_ids == frozenset()
    assert target.capacity == draft.capacity == 512


def test_an_unknown_shape_is_named_with_those_that_are_known() -> None:
    """Guards against a question to Hugging Face about a name that cannot be there."""
    with pytest.raises(ValueError, match=r"'shape:llama-9'.*llama-3.1-8b"):
        locate("shape:llama-9", "target")
