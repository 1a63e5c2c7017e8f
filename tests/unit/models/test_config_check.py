"""Models that cannot be decoded exactly are refused by their config, in one line, before any weights are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CohereConfig, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from paradraft.engine.loader import load
from paradraft.models.architectures import FAMILIES, context_of
from paradraft.models.causal_lm import CausalLM
from paradraft.models.config_check import check_architecture
from paradraft.models.runtime import Runtime
from paradraft.sources.loading import load_config, load_model
from tests.conftest import tiny_model, tiny_tokenizer
from tests.support.random_models import LLAMA3_ROPE

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "bos_token_id": None,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4, "factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
GEMMA = {"model_type": "gemma3_text", "sliding_window_pattern": 2}
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
each_kind = pytest.mark.parametrize("kind", CONFIGS)


def config_of(kind: str, **settings: Any) -> PretrainedConfig:
    return CONFIGS[kind](**SIZES | settings)


def folder_of(folder: Path, **settings: Any) -> str:
    """A folder with nothing but a config, as it is published: nothing checks it before it is loaded."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"} | SIZES | settings))
    return str(folder)


@each_kind
@pytest.mark.parametrize("rope", [None, {}, {"rope_type": "default"}, LINEAR, LLAMA3_ROPE, YARN], ids=str)
def test_static_ropes_are_served(kind: str, rope: dict[str, Any] | None) -> None:
    """Guards against a check that refuses what works."""
    config = config_of(kind, rope_parameters=rope)
    check_architecture(config, "some/model")
    assert config.rope_parameters["rope_type"] == (rope or {}).get("rope_type", "default")


@pytest.mark.parametrize("rope", [None, LINEAR, LLAMA3_ROPE])
def test_gemmas_ropes_are_served(tmp_path: Path, rope: dict[str, Any] | None) -> None:
    """Guards Gemma 3 as it is published: windows have angles of their own, and long texts linear ones."""
    config = load_config(folder_of(tmp_path / "model", **GEMMA, rope_scaling=rope, sliding_window=64))
    assert context_of(config) == 64 and set(config.rope_parameters) == {"full_attention", "sliding_attention"}


@each_kind
@pytest.mark.parametrize("rope", [DYNAMIC, LONGROPE], ids=lambda rope: str(rope["rope_type"]))
def test_ropes_that_depend_on_the_length_are_refused(kind: str, rope: dict[str, Any]) -> None:
    """Guards texts that depended on the drafter, the batch and the chunks of the prompt: such angles change as a text
    grows, and keys in the cache have the old ones."""
    with pytest.raises(ValueError, match=f"'some/model' has a rotary embedding of the type '{rope['rope_type']}'"):
        check_architecture(config_of(kind, rope_parameters=rope), "some/model")


@pytest.mark.parametrize(
    "published",
    [
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "dynamic", "type": "linear", "factor": 2.0}},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": LINEAR},
        {"rope_scaling": {key: value for key, value in LONGROPE.items() if key != "rope_type"} | {"type": "longrope"}},
        {"rope_parameters": DYNAMIC},
        {"rope_parameters": {"type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}},
        {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"rope_type": "no_such_type"}},
    ],
    ids=str,
)
def test_the_names_of_all_years_are_read(tmp_path: Path, published: dict[str, Any]) -> None:
    """Guards `rope_scaling` and `type` of older configs, and against "seems damaged (KeyError: 'mrope')" about a model
    that is not damaged but not supported."""
    with pytest.raises(ValueError, match=r"has a rotary embedding of the type '\w+', which is not supported: use a"):
        load_config(folder_of(tmp_path / "model", **published))


def test_published_ropes_are_served(tmp_path: Path) -> None:
    """Guards Llama 3 and Qwen's long context as `transformers` 4 wrote them."""
    for rope in (LLAMA3_ROPE, YARN, {"type": "linear", "factor": 2.0}, None):
        load_config(folder_of(tmp_path / "model", rope_scaling=rope, rope_theta=1e6))


@each_kind
def test_ropes_for_each_type_of_layer_are_refused(tmp_path: Path, kind: str) -> None:
    """Guards settings that the models of these architectures do not read: Llama silently took its defaults instead."""
    rope = {"full_attention": LINEAR}
    with pytest.raises(ValueError, match="has rope settings for each type of layer"):
        load_config(folder_of(tmp_path / "model", model_type=kind, rope_parameters=rope))


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "linear"}, r"Missing required keys .*: \{'factor'\}"),
        (LINEAR | {"factor": None}, "rope settings cannot be computed"),
        (LINEAR | {"factor": "x"}, "rope settings cannot be computed"),
        (LINEAR | {"factor": [1.0, 2.0]}, "rope settings cannot be computed"),
        (LINEAR | {"factor": 0}, "do not give finite angles"),
        (LINEAR | {"partial_rotary_factor": 0.5}, "do not give finite angles for heads of 8 numbers"),
        (YARN | {"factor": 0}, "rope settings|finite angles"),
        (YARN | {"attention_factor": "x"}, "rope settings cannot be computed"),
        (YARN | {"original_max_position_embeddings": 0}, "cannot load|rope settings"),
        (YARN | {"beta_fast": "x"}, "cannot load|rope settings"),
        (LLAMA3_ROPE | {"low_freq_factor": 0}, "rope settings cannot be computed"),
        (LLAMA3_ROPE | {"high_freq_factor": None}, "cannot load|rope settings"),
        ({"rope_type": "default", "rope_theta": 0}, "rope_theta is 0 in its config.json"),
        ({"rope_type": "default", "rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"rope_type": "default", "rope_theta": "x"}, "rope_theta is 'x'"),
        ({"rope_type": "default", "rope_theta": [1.0]}, "rope_theta is"),
        ({"rope_type": ["linear"]}, "cannot load|rotary embedding of the type"),
    ],
    ids=str,
)
def test_rope_settings_that_cannot_be_computed(tmp_path: Path, rope: dict[str, Any], named: str) -> None:
    """Guards against a traceback, at the first pass only, and against angles that are no numbers."""
    with pytest.raises(ValueError, match=named) as error:
        load_config(folder_of(tmp_path / "model", rope_parameters=rope))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0 in its config.json, where a number of at least 1 belongs"),
        ({"num_hidden_layers": 0, "layer_types": []}, "num_hidden_layers is 0"),
        ({"num_attention_heads": -4}, "num_attention_heads is -4"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4 .* cannot be shared evenly by num_key_value_heads=3"),
        ({"head_dim": 7}, "cannot load|heads of 7 numbers cannot be rotated"),
        ({"head_dim": 3}, "heads of 3 numbers cannot be rotated"),
        ({"head_dim": 0}, "cannot load|heads of 0 numbers"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"hidden_size": -32}, "hidden_size is -32"),
        ({"intermediate_size": 0}, "intermediate_size is 0"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"max_position_embeddings": None}, "config.json is wrong: .*max_position_embeddings.* expected int"),
        ({"rms_norm_eps": "x"}, "config.json is wrong: .*rms_norm_eps.* expected float"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
        ({"tie_word_embeddings": "yes"}, "config.json is wrong: .*tie_word_embeddings.* expected bool"),
        ({"hidden_act": "no_such"}, "transformers knows no activation hidden_act='no_such'"),
        ({"layer_types": ["chunked_attention", "full_attention"]}, "layers of the type 'chunked_attention'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "has sliding-window layers"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layers of the type 'linear_attention'"),
        ({"layer_types": ["full_attention"]}, "config.json is wrong: .*num_hidden_layers"),
        ({"layer_types": ["no_such", "full_attention"]}, "config.json is wrong: .*layer_types.*no_such"),
        ({"model_type": "gpt2"}, f"is a gpt2 model; supported architectures are {', '.join(FAMILIES)}"),
        (
            {"model_type": "granite", "logits_scaling": 0.0},
            "logits_scaling is 0.0 in its config.json, where a number above",
        ),
        ({"model_type": "granite", "embedding_multiplier": -1.0}, "embedding_multiplier is -1.0"),
        ({"model_type": "gemma3_text", "hidden_activation": "no_such"}, "no activation hidden_activation='no_such'"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "lets tokens see later ones"),
        (GEMMA | {"rope_scaling": DYNAMIC}, "rotary embedding of the type 'dynamic'"),
        (GEMMA | {"rope_scaling": LINEAR | {"factor": 0}}, "do not give finite angles"),
        ({"model_type": "gemma3_text", "rope_local_base_freq": -1.0}, "rope_theta is -1.0"),
        ({"model_type": "qwen3_moe", "num_experts": 0}, "num_experts is 0"),
        ({"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok is 5 .*, of 4"),
    ],
    ids=str,
)
def test_configs_that_make_no_sense(tmp_path: Path, settings: dict[str, Any], named: str) -> None:
    """Guards against tracebacks, and against "one of its files seems damaged" without the setting's name."""
    folder = folder_of(tmp_path / "model", **settings)
    with pytest.raises(ValueError, match=named) as error:
        load_config(folder)
    assert folder in str(error.value) and "\n" not in str(error.value)


def test_a_model_that_was_loaded_elsewhere_is_checked_too() -> None:
    """Guards users of `CausalLM`, who may hand it any model of `transformers`."""
    model = tiny_model(3)
    model.config.rope_parameters = dict(DYNAMIC)
    with pytest.raises(ValueError, match="'qwen3' has a rotary embedding of the type 'dynamic'"):
        CausalLM(model, vocab_size=64)
    model.config.rope_parameters, model.config.layer_types = None, ["full_attention", "chunked_attention"]
    with pytest.raises(ValueError, match="'chunked_attention'"):
        CausalLM(model, vocab_size=64)
    with pytest.raises(ValueError, match="is a cohere model"):
        check_architecture(CohereConfig(**SIZES), "some/model")


@pytest.mark.parametrize("drafter", ["autoregressive", "pard"])
def test_drafts_are_checked_too(family: Path, tmp_path: Path, drafter: str) -> None:
    """Guards drafts: the text stays right, but what they draft would depend on how they read it."""
    draft = folder_of(tmp_path / "draft", rope_parameters=DYNAMIC)
    tiny_tokenizer().save_pretrained(draft)
    with pytest.raises(ValueError, match=r"draft' has a rotary embedding of the type 'dynamic'"):
        load(str(family / "target"), drafter=drafter, draft=draft, runtime=Runtime(dtype="float64"), lengths="fixed")


def test_nothing_of_the_weights_is_read(tmp_path: Path) -> None:
    """Guards the minutes that weights take: the folder has none."""
    with pytest.raises(ValueError, match="rotary embedding"):
        load_model(folder_of(tmp_path / "model", rope_parameters=LONGROPE), Runtime(dtype="float64"))


def test_a_config_cannot_choose_the_attention(family: Path, tmp_path: Path) -> None:
    """Guards against kernels, which are code: `attn_implementation` in a config may name a repository of the hub."""
    settings = json.loads((family / "target" / "config.json").read_text())
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes((family / "target" / "model.safetensors").read_bytes())
    (folder / "config.json").write_text(json.dumps(settings | {"attn_implementation": "kernels-community/no-such"}))
    model = load_model(str(folder), Runtime(dtype="float64"))
    assert model.config._attn_implementation == "sdpa"
    text = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(text).logits, tiny_model(1)(text).logits)
