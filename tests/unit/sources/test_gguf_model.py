"""Models of GGUF files: their weights are those of the file, and they compute what `transformers` computes of them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from paradraft.formats.gguf import read_gguf
from paradraft.models import architectures
from paradraft.models.quantized import QuantizedTensor
from paradraft.models.quantized_format import Format, NumberKind
from paradraft.models.runtime import Runtime
from paradraft.sources.gguf_config import shortest
from paradraft.sources.gguf_model import row_order
from paradraft.sources.load_plan import plan_of
from paradraft.sources.loading import load_config, load_generation_config
from paradraft.sources.stored_weights import assembled
from paradraft.sources.target_loading import load_target, weights_bytes
from paradraft.text.generation_config import sampling_defaults
from tests.support.gguf_files import FAMILIES, tiny_model, write_gguf

EAGER = Runtime(compiled=False)
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 4, 3, 150, 299]])
LLAMA3 = {
    "max_position_embeddings": 16384,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
YARN = {
    "max_position_embeddings": 256,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64
    },
}  # fmt: skip


def loaded(path: Path) -> PreTrainedModel:
    return load_target(str(path), EAGER).lm.model


def error_of(model: PreTrainedModel, expected: PreTrainedModel) -> float:
    """Of the logits, in standard deviations of the expected ones."""
    difference = model(IDS).logits.double() - expected(IDS).logits
    return float(difference.square().mean().sqrt() / expected(IDS).logits.std())


def numbers(weight: torch.Tensor) -> torch.Tensor:
    return weight.dequantize() if isinstance(weight, QuantizedTensor) else weight


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1", "Q4_K", "Q6_K", "BF16", "F16", "F32"])
def test_weights_are_those_of_the_file(tmp_path: Path, family: str, kind: str, tied: bool) -> None:
    """Guards names of tensors, the order of Llama's rows, biases, heads of their own, and every type, exactly."""
    model = tiny_model(family, tied=tied, width=256 if "_K" in kind else 64)
    expected = write_gguf(tmp_path / "m.gguf", model, kind)
    found = loaded(tmp_path / "m.gguf")
    assert isinstance(found.lm_head.weight, QuantizedTensor) == (kind[0] == "Q")
    assert (found.lm_head.weight is found.model.embed_tokens.weight) == tied
    for name, weight in found.named_parameters():
        assert torch.equal(numbers(weight), expected.get_parameter(name).to(weight.dtype)), name
    assert error_of(found, expected) < 0.15


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    """Guards angles, norms and heads, where nothing is rounded; types of few bits have the same config."""
    expected = write_gguf(tmp_path / "m.gguf", tiny_model(family), "F32")
    assert error_of(loaded(tmp_path / "m.gguf"), expected) < 1e-5


@pytest.mark.parametrize(
    ("settings", "metadata"),
    [
        (LLAMA3, {}),
        (YARN, {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
            {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
        ),
        ({"attention_bias": True, "mlp_bias": True}, {}),
        ({"head_dim": 32}, {"rope.dimension_count": 32}),
        ({"num_key_value_heads": 4}, {"attention.head_count_kv": None}),
    ],
)
def test_settings_of_llama_files_are_found(tmp_path: Path, settings: dict[str, Any], metadata: dict[str, Any]) -> None:
    """Guards Llama 3's rotary embedding, of which a file has only the result, and what else a few files have."""
    model = tiny_model("llama", **settings)
    more = {f"llama.{key}": value for key, value in metadata.items()}
    expected = write_gguf(tmp_path / "m.gguf", model, "F32", more=more)
    found = loaded(tmp_path / "m.gguf")
    assert error_of(found, expected) < 1e-5
    theirs = model.config.rope_parameters
    assert {key: found.config.rope_parameters[key] for key in theirs} == theirs


def test_the_order_of_rows_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with the rows as they are in the file, the same model computes something else."""
    expected = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), "F32")
    unordered = replace(architectures.FAMILIES["llama"], has_gguf_pairs=False)
    monkeypatch.setitem(architectures.FAMILIES, "llama", unordered)
    assert error_of(loaded(tmp_path / "m.gguf"), expected) > 0.3


def test_the_order_of_rows_is_undone() -> None:
    rows = torch.arange(12)
    stored = rows.view(2, 2, 3).swapaxes(1, 2).flatten()  # as llama.cpp's converter does
    assert torch.equal(stored[row_order(2, 6)], rows)


def test_config_and_ends_are_those_of_the_model(tmp_path: Path) -> None:
    """Guards numbers that a file has in float32: 1e-6 must not become 9.999999974752427e-07."""
    model = tiny_model("qwen3")
    write_gguf(tmp_path / "m.gguf", model, more={"tokenizer.ggml.eot_token_id": 7})
    config = load_config(str(tmp_path / "m.gguf"))
    for key in ("vocab_size", "hidden_size", "head_dim", "rms_norm_eps", "rope_parameters", "max_position_embeddings"):
        assert getattr(config, key) == getattr(model.config, key), key
    assert sorted(load_generation_config(str(tmp_path / "m.gguf")).eos_token_id) == [0, 1, 7]
    assert shortest(1.0000000116860974e-07) == 1e-07


@pytest.mark.parametrize(
    ("keys", "defaults"),
    [
        ({"temp": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "penalty_repeat": 1.1},
         {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.1}),
        ({"temp": 0.0}, {"temperature": 0.0}),
        ({"penalty_repeat": 1.1}, {"repetition_penalty": 1.1}),
        ({}, {}),
    ],
)  # fmt: skip
def test_sampling_that_a_file_asks_for(tmp_path: Path, keys: dict[str, float], defaults: dict[str, float]) -> None:
    """Guards what llama.cpp's converter copies of `generation_config.json`; 0.7 is no 0.699999988079071."""
    more = {f"general.sampling.{key}": value for key, value in keys.items()}
    write_gguf(tmp_path / "m.gguf", tiny_model("qwen3"), more=more)
    assert sampling_defaults(load_generation_config(str(tmp_path / "m.gguf"))) == defaults


def test_other_weights_than_bfloat16_numbers_are_computed_in_float32(tmp_path: Path) -> None:
    """Guards "as stored": a norm that bfloat16 would round must not be rounded."""
    model = tiny_model("qwen3")
    model.model.norm.weight[3] = 1.2345678
    expected = write_gguf(tmp_path / "m.gguf", model, "Q8_0")
    found = loaded(tmp_path / "m.gguf")
    assert found.dtype == torch.float32
    assert torch.equal(found.model.norm.weight.double(), expected.model.norm.weight)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_file_with_all_bits_is_rounded(tmp_path: Path, dtype: str) -> None:
    """Guards a draft that was exported in bfloat16 beside a rounded target: it was taken for a Hugging Face id."""
    write_gguf(tmp_path / "f.gguf", tiny_model("qwen3"), "BF16")
    lm = load_target(str(tmp_path / "f.gguf"), Runtime(device="cpu", dtype=dtype)).lm
    assert isinstance(lm.model.lm_head.weight, QuantizedTensor)


def test_a_dtype_is_refused_for_few_bits_and_taken_otherwise(tmp_path: Path) -> None:
    few, all_bits = str(tmp_path / "q.gguf"), str(tmp_path / "f.gguf")
    write_gguf(Path(few), tiny_model("qwen3"), "Q8_0")
    write_gguf(Path(all_bits), tiny_model("qwen3"), "BF16")
    with pytest.raises(ValueError, match=r"dtype='bfloat16': the weights of .* are stored in few bits"):
        load_target(few, Runtime(dtype="bfloat16"))
    assert plan_of(few, Runtime()).runtime.device == "cpu"
    assert load_target(all_bits, Runtime(dtype="float64", compiled=False)).lm.model.dtype == torch.float64
    assert weights_bytes(plan_of(few, Runtime(dtype="stored"))) < weights_bytes(
        plan_of(all_bits, Runtime(dtype="bfloat16"))
    )


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba'; supported are llama, qwen2, qwen3"),
        ({"qwen3.block_count": None}, r"has no qwen3\.block_count"),
        ({"qwen3.block_count": "2"}, r"qwen3\.block_count is '2', where a int belongs"),
        ({"qwen3.block_count": 3}, r"model\.layers\.2\..* is missing"),
        ({"qwen3.block_count": 1}, r"has the tensor blk\.1\..*which a qwen3 model has not"),
        ({"qwen3.embedding_length": 32}, "has the shape"),
        ({"qwen3.feed_forward_length": 160}, "has the shape"),
        ({"qwen3.attention.head_count": 0}, "64 rows of queries, and its settings say 0 heads of 16"),
        ({"qwen3.attention.head_count_kv": 3}, "num_attention_heads is 4"),
        ({"qwen3.attention.value_length": 4}, "value_length is 4 and heads have 16"),
        ({"qwen3.expert_count": 8}, "mixture of experts"),
        ({"qwen3.attention.sliding_window": 64}, "sliding windows"),
        ({"qwen3.rope.scaling.type": "longrope", "qwen3.rope.scaling.factor": 2.0}, "'longrope'"),
        ({"qwen3.rope.freq_base": -1.0}, r"rope_theta is -1\.0"),
        ({"qwen3.context_length": 0}, "max_position_embeddings is 0"),
    ],
)
def test_what_does_not_fit_is_said_in_a_line(tmp_path: Path, more: dict[str, Any], told: str) -> None:
    """Guards foreign and damaged files: each gives one line with the name of the file."""
    write_gguf(tmp_path / "wrong.gguf", tiny_model("qwen3"), more=more)
    with pytest.raises(ValueError, match=told) as raised:
        load_target(str(tmp_path / "wrong.gguf"), EAGER)
    assert "wrong.gguf" in str(raised.value) and "\n" not in str(raised.value)


def test_any_damage_of_a_header_gives_a_model_or_a_line(tmp_path: Path) -> None:
    """Guards that no exception but ValueError comes of any settings or vocabulary, and that no size is believed."""
    write_gguf(tmp_path / "m.gguf", tiny_model("llama", **LLAMA3), "Q8_0", more={"tokenizer.ggml.bos_token_id": 1})
    whole, chooser, refused = (tmp_path / "m.gguf").read_bytes(), random.Random(11), 0
    first = min(tensor.start for tensor in read_gguf(str(tmp_path / "m.gguf")).tensors.values())
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[chooser.randrange(first)] = chooser.choice([0, 1, 255, chooser.randrange(256)])
        (tmp_path / "x.gguf").write_bytes(damaged)
        try:
            load_target(str(tmp_path / "x.gguf"), EAGER)
        except ValueError:
            refused += 1
    assert refused > 20


def test_the_size_of_a_head_is_not_believed(tmp_path: Path) -> None:
    """Guards memory: the angles of heads of 2**31 numbers were computed before anything else was looked at, and the
    process was killed."""
    more = {"llama.attention.key_length": 2**31, "llama.rope.dimension_count": 2**31}
    write_gguf(tmp_path / "m.gguf", tiny_model("llama", **LLAMA3), more=more)
    with pytest.raises(ValueError, match=r"64 rows of queries, and its settings say 4 heads of 2147483648"):
        load_config(str(tmp_path / "m.gguf"))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    for without, told in (
        ("blk.1.ffn_up.weight", "layers.1.mlp.up_proj.weight is missing"),
        ("token_embd.weight", "has no tensor token_embd.weight"),
        ("output_norm.weight", "model.norm.weight is missing"),
    ):
        write_gguf(tmp_path / "m.gguf", tiny_model("qwen3"), without=(without,))
        with pytest.raises(ValueError, match=told):
            load_target(str(tmp_path / "m.gguf"), EAGER)


def test_angles_that_no_config_has_are_refused(tmp_path: Path) -> None:
    """Guards `rope_freqs.weight` that another tool wrote: it must not be taken for the nearest known one."""
    settings = {
        "max_position_embeddings": 16384,
        "rope_parameters": LLAMA3["rope_parameters"] | {"original_max_position_embeddings": 6000},
        "head_dim": 64,
    }
    write_gguf(tmp_path / "m.gguf", tiny_model("llama", **settings), "Q8_0")
    with pytest.raises(ValueError, match=r"rope_freqs\.weight is not what Llama 3's"):
        load_target(str(tmp_path / "m.gguf"), EAGER)


def test_a_bias_of_few_bits_is_refused(tmp_path: Path) -> None:
    """Guards files of other writers: such a bias was taken for a matrix, and loading ended with a traceback."""
    model = tiny_model("qwen2")

    def read(key: str) -> Tensor:
        weight = model.state_dict()[key]
        if not key.endswith("q_proj.bias"):
            return weight
        form = Format(8, 32, NumberKind.HALVES, NumberKind.NONE)
        return QuantizedTensor.elsewhere(lambda: None, weight.shape, format=form, group=32, dtype=torch.float32)

    with pytest.raises(ValueError, match=r"q_proj\.bias has few bits, which only matrices"):
        assembled(model.config, read, name="m.gguf", dtype=torch.float32, attention="eager")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "F32"])
def test_numbers_that_are_none_are_named(tmp_path: Path, kind: str) -> None:
    """Guards users of a damaged file: they were asked to report a fault of ours."""
    path, name = tmp_path / "m.gguf", "blk.1.ffn_up.weight"
    write_gguf(path, tiny_model("llama", width=256), kind)
    damaged, number = bytearray(path.read_bytes()), np.array([np.inf], "<f4" if kind == "F32" else "<f2").tobytes()
    start = read_gguf(str(path)).tensors[name].start
    damaged[start : start + len(number)] = number
    path.write_bytes(damaged)
    with pytest.warns(
        UserWarning, match=r"m\.gguf' has infinite numbers or NaN in model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        load_target(str(path), Runtime())
