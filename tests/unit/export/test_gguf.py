"""GGUF files without a tokenizer, read back by the package of llama.cpp's authors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, Qwen3Config

from paradraft.export.gguf import check_config, write_gguf
from paradraft.sources.gguf_config import config_of
from tests.support.random_models import random_model


def read(file: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The settings and the tensors of a file, as float32."""
    found = GGUFReader(file)
    settings = {name: field.contents() for name, field in found.fields.items()}
    tensors = {}
    for one in found.tensors:
        assert one.data_offset % 32 == 0
        data = one.data
        if one.tensor_type.name == "BF16":
            data = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        shape = tuple(reversed(one.shape.tolist()))
        tensors[one.name] = np.asarray(data, np.float32).reshape(shape)
    return settings, tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_weights_are_in_the_file(dtype: torch.dtype, tmp_path: Path) -> None:
    """Guards names, shapes and numbers: a weight that is missing or twice is noticed by llama.cpp, a wrong one by
    nobody. Norms are float32 in any case."""
    model = random_model("qwen3", dtype=dtype)
    write_gguf(tmp_path / "model.gguf", model, None, dtype=str(dtype).removeprefix("torch."), name="m")
    settings, tensors = read(tmp_path / "model.gguf")
    names = [one.name for one in GGUFReader(tmp_path / "model.gguf").tensors]
    kinds = {one.name: one.tensor_type.name for one in GGUFReader(tmp_path / "model.gguf").tensors}
    assert len(names) == len(set(names)) == 2 + 3 * 11 + (not model.config.tie_word_embeddings)
    name = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    assert (
        kinds["blk.2.attn_q.weight"] == kinds["token_embd.weight"] == name
        and kinds["blk.2.attn_q_norm.weight"] == "F32"
    )
    assert settings["general.file_type"] == {"F32": 0, "BF16": 32, "F16": 1}[name]
    layer = model.model.layers[1]
    for key, weight in {
        "token_embd.weight": model.model.embed_tokens.weight,
        "output_norm.weight": model.model.norm.weight,
        "output.weight": model.lm_head.weight,
        "blk.1.attn_norm.weight": layer.input_layernorm.weight,
        "blk.1.attn_q.weight": layer.self_attn.q_proj.weight,
        "blk.1.attn_k.weight": layer.self_attn.k_proj.weight,
        "blk.1.attn_v.weight": layer.self_attn.v_proj.weight,
        "blk.1.attn_output.weight": layer.self_attn.o_proj.weight,
        "blk.1.attn_q_norm.weight": layer.self_attn.q_norm.weight,
        "blk.1.attn_k_norm.weight": layer.self_attn.k_norm.weight,
        "blk.1.ffn_norm.weight": layer.post_attention_layernorm.weight,
        "blk.1.ffn_gate.weight": layer.mlp.gate_proj.weight,
        "blk.1.ffn_up.weight": layer.mlp.up_proj.weight,
        "blk.1.ffn_down.weight": layer.mlp.down_proj.weight,
    }.items():
        if key in tensors or key != "output.weight" or not model.config.tie_word_embeddings:
            assert np.array_equal(tensors[key], weight.float().numpy()), key
    config = model.config
    assert settings["general.architecture"] == "qwen3" and settings["tokenizer.ggml.model"] == "none"
    assert settings["qwen3.attention.head_count_kv"] == config.num_key_value_heads
    assert settings["qwen3.attention.key_length"] == settings["qwen3.rope.dimension_count"] == config.head_dim
    assert settings["qwen3.block_count"] == 3 and settings["qwen3.vocab_size"] == config.vocab_size
    assert settings["qwen3.attention.layer_norm_rms_epsilon"] == pytest.approx(config.rms_norm_eps)
    assert [file.name for file in tmp_path.iterdir()] == ["model.gguf"]


def rotated(vectors: np.ndarray, frequencies: np.ndarray, position: int) -> np.ndarray:
    """Heads `[H, D]` with each number rotated with its neighbour, as llama.cpp does it for Llama."""
    first, second = vectors[:, 0::2], vectors[:, 1::2]
    cos, sin = np.cos(position * frequencies), np.sin(position * frequencies)
    return np.stack([first * cos - second * sin, first * sin + second * cos], axis=-1).reshape(vectors.shape)


@pytest.mark.parametrize("kind", ["llama", "llama with biases"])
def test_queries_and_keys_of_llama_are_rotated_by_neighbours(kind: str, tmp_path: Path) -> None:
    """Guards the order of rows, and the frequencies of Llama 3: scores of a head, computed from the file by llama.cpp's
    rule, are those of the model. Texts of a model in the wrong order make sense for a few tokens."""
    model = random_model(kind)
    write_gguf(tmp_path / "model.gguf", model, None, dtype="float32", name="m")
    settings, tensors = read(tmp_path / "model.gguf")
    config, layer = model.config, model.model.layers[0].self_attn
    size, heads, kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    state = torch.randn(1, 40, config.hidden_size, generator=torch.Generator().manual_seed(1))
    cos, sin = model.model.rotary_emb(state, torch.arange(40)[None])

    def theirs(name: str, count: int, position: int) -> np.ndarray:
        made = tensors[f"blk.0.{name}.weight"] @ state[0, position].numpy() + tensors.get(f"blk.0.{name}.bias", 0.0)
        plain = settings["llama.rope.freq_base"] ** (-np.arange(0, size, 2) / size)
        return rotated(made.reshape(count, size), plain / tensors.get("rope_freqs.weight", 1.0), position)

    def ours(projection: torch.nn.Module, count: int, position: int) -> np.ndarray:
        made = projection(state)[0, position].reshape(count, size)
        first, second = made[:, : size // 2], made[:, size // 2 :]
        return (made * cos[0, position] + torch.cat([-second, first], 1) * sin[0, position]).numpy()

    scores = np.einsum("hd,hd->h", theirs("attn_q", heads, 37)[:kv_heads], theirs("attn_k", kv_heads, 11))
    wanted = np.einsum("hd,hd->h", ours(layer.q_proj, heads, 37)[:kv_heads], ours(layer.k_proj, kv_heads, 11))
    assert scores == pytest.approx(wanted, rel=1e-3, abs=1e-3)
    assert ("rope_freqs.weight" in tensors) == (kind == "llama")
    assert ("output.weight" in tensors) != config.tie_word_embeddings


SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def test_other_computations_than_those_of_llama_cpp_are_refused(tmp_path: Path) -> None:
    """Guards against a file that llama.cpp loads and computes differently: nothing is written then."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 2}
    llama3 = random_model("llama").config.rope_parameters
    refused = {
        "settings of YaRN that GGUF files do not hold": LlamaConfig(**SIZES, rope_parameters=yarn),
        "computes silu, not 'gelu'": LlamaConfig(**SIZES, hidden_act="gelu"),
        "changed rope frequencies of Llama models only": Qwen3Config(**SIZES, rope_parameters=llama3),
    }
    for message, config in refused.items():
        with pytest.raises(ValueError, match=message):
            check_config(config, "m")
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.model.layers[0].self_attn.sinks = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    with pytest.raises(ValueError, match=r"no weight 'model.layers.0.self_attn.sinks'"):
        write_gguf(tmp_path / "model.gguf", model, None, dtype="float32", name="m")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("config", [LlamaConfig, MistralConfig])
def test_mistral_is_llama_and_linear_scaling_is_metadata(config: type[Any], tmp_path: Path) -> None:
    """Guards models that GGUF has no name of their own for, and factors that llama.cpp applies itself."""
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    model = AutoModelForCausalLM.from_config(config(**SIZES, rope_parameters=linear))
    write_gguf(tmp_path / "model.gguf", model, None, dtype="float32", name="m")
    settings, tensors = read(tmp_path / "model.gguf")
    assert settings["general.architecture"] == "llama" and settings["llama.rope.scaling.type"] == "linear"
    assert settings["llama.rope.scaling.factor"] == 4.0 and "rope_freqs.weight" not in tensors
    assert config_of(str(tmp_path / "model.gguf")).rope_parameters == linear
    queries = model.model.layers[0].self_attn.q_proj.weight.detach()
    paired = queries.unflatten(0, (2, 2, -1)).transpose(1, 2).flatten(0, 2)
    assert np.array_equal(tensors["blk.0.attn_q.weight"], paired.numpy())
