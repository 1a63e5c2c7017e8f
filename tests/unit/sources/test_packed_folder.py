"""Folders of GPTQ and AWQ against an independent packer: their weights are those that were packed."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paradraft.digests import weights_digest
from paradraft.models.quantized import QuantizedTensor
from paradraft.models.runtime import STORED, Runtime
from paradraft.sources.load_plan import plan_of
from paradraft.sources.packed_folder import Packing, blocks_of
from paradraft.sources.stored_weights import quantized
from paradraft.sources.target_loading import load_target, weights_bytes
from tests.support.gguf_files import FAMILIES, tiny_model
from tests.support.packed_models import GROUP, change_config, layer, write_packed

EAGER = Runtime(compiled=False)
KINDS: dict[str, dict[str, Any]] = {
    "gptq": {"method": "gptq"}, "gptq, symmetric": {"method": "gptq", "symmetric": True},
    "gptq_v2": {"method": "gptq", "v2": True}, "awq": {"method": "awq"},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_that_were_packed(tmp_path: Path, family: str, kind: str) -> None:
    """Guards the order of values in a number, zeros and their shift by one, groups, and layers that are not packed."""
    expected = write_packed(tmp_path, tiny_model(family), **KINDS[kind])
    model = load_target(str(tmp_path), EAGER).lm.model
    packed = [name for name, weight in model.named_parameters() if isinstance(weight, QuantizedTensor)]
    assert len(packed) == 14 and all("_proj.weight" in name for name in packed)
    for name, weight in model.named_parameters():
        numbers = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
        assert torch.equal(numbers, expected.get_parameter(name).to(weight.dtype)), name
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 4, 3]])
    wanted = expected(ids).logits
    assert (model(ids).logits.double() - wanted).square().mean().sqrt() < 0.1 * wanted.std()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_exact_in_float32(kind: str) -> None:
    """Guards `scale * value + offset` in place of `scale * (value - zero)`, and zeros that need no offsets."""
    parts = layer(torch.randn(64, 96, generator=torch.Generator().manual_seed(1)), **{"symmetric": False} | KINDS[kind])
    numbers = parts.pop("numbers")
    packing = Packing(method=KINDS[kind]["method"], group=GROUP, zeros_are_less=kind != "gptq_v2")
    blocks = blocks_of(parts, packing)
    assert (blocks.offsets is None) == ("symmetric" in kind)
    assert torch.equal(quantized(blocks, torch.float32).dequantize().double(), numbers)


def test_another_format_gives_other_weights() -> None:
    """The control: zeros of the second format read as the first one's, or AWQ's outputs in plain order, differ."""
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    parts = layer(weight, "gptq", symmetric=False, v2=True)
    numbers = parts.pop("numbers")
    right, wrong = (
        quantized(blocks_of(parts, Packing(method="gptq", group=GROUP, zeros_are_less=less)), torch.float32)
        for less in (False, True)
    )
    assert torch.equal(right.dequantize().double(), numbers)
    assert not torch.equal(wrong.dequantize().double(), numbers)


def test_one_group_for_all_inputs(tmp_path: Path) -> None:
    weight = torch.randn(32, 48, generator=torch.Generator().manual_seed(1))
    parts = layer(weight, "gptq", symmetric=True, group=48)
    numbers = parts.pop("numbers")
    blocks = blocks_of(parts, Packing(method="gptq", group=-1, zeros_are_less=True))
    assert torch.equal(quantized(blocks, torch.float32).dequantize().double(), numbers)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"bits": 8}, "rounded to 8 bits by 'gptq'"),
        ({"bits": 3}, "rounded to 3 bits by 'gptq'"),
        ({"quant_method": "bitsandbytes"}, "rounded by 'bitsandbytes'"),
        ({"quant_method": "compressed-tensors"}, "rounded by 'compressed-tensors'"),
        ({"quant_method": "fp8"}, "rounded by 'fp8'"),
        ({"quant_method": "awq", "version": "gemv"}, "packed by 'awq' as 'gemv', and only gemm"),
        ({"checkpoint_format": "marlin"}, "packed by 'gptq' as 'marlin', and only gptq, gptq_v2"),
        ({"is_marlin_format": True}, "packed by 'gptq' as 'marlin'"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}, "rounded by 'auto-round'"),
        ({"dynamic": {r"-:.*\.down_proj": {}, r".*\.layers\.1\.": {"bits": 8}}}, "(dynamic, '.*"),
        ({"group_size": 24}, "group_size is 24"),
        ({"group_size": None}, "group_size is None"),
        ({"group_size": 64}, "has scales of shape"),
        ({"quant_method": None}, "rounded by None"),
    ],
)
def test_other_methods_are_refused_in_a_line(tmp_path: Path, settings: dict[str, Any], told: str) -> None:
    """Guards that nobody is asked for packages that would not help, and that nothing is read wrongly."""
    write_packed(tmp_path, tiny_model("qwen3"), "gptq", **settings)
    with pytest.raises(ValueError, match=re.escape(told)) as raised:
        load_target(str(tmp_path), EAGER)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("method", "file"), [("gptq", "quantize_config.json"), ("awq", "quant_config.json")])
def test_folders_of_older_versions_say_in_another_file_how_they_are_packed(
    tmp_path: Path, method: str, file: str
) -> None:
    """Guards folders before `quantization_config` was in config.json: all their weights were said to be missing."""
    expected = write_packed(tmp_path, tiny_model("llama"), method)
    config = json.loads((tmp_path / "config.json").read_text())
    told = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    old = {"w_bit": 4, "q_group_size": GROUP, "version": "GEMM"} if method == "awq" else told
    (tmp_path / file).write_text(json.dumps({key: value for key, value in old.items() if key != "quant_method"}))
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.rand(8)  # such versions stored them
    save_file(weights, tmp_path / "gptq_model-4bit-32g.safetensors", metadata={"format": "pt"})
    (tmp_path / "model.safetensors").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weight = load_target(str(tmp_path), EAGER).lm.model.model.layers[1].mlp.up_proj.weight
    assert isinstance(weight, QuantizedTensor)
    assert torch.equal(weight.dequantize(), expected.model.layers[1].mlp.up_proj.weight.to(weight.dtype))
    (tmp_path / file).write_text("{")
    with pytest.raises(ValueError, match=rf"cannot read .*{file}"):
        load_target(str(tmp_path), EAGER)


def test_a_head_may_be_packed(tmp_path: Path) -> None:
    """Guards GPTQModel's `lm_head`; one beside a config that ties it to the embedding was left out without a word."""
    expected = write_packed(tmp_path, tiny_model("qwen3", tied=False, vocab_size=320), "gptq", head=True)
    head = load_target(str(tmp_path), EAGER).lm.model.lm_head.weight
    assert isinstance(head, QuantizedTensor)
    assert torch.equal(head.dequantize().double(), expected.lm_head.weight.to(head.dtype).double())
    change_config(tmp_path, tie_word_embeddings=True)
    with pytest.warns(UserWarning, match=r"weights that are not used: lm_head\.g_idx, and 3 more"):
        load_target(str(tmp_path), EAGER)


def test_layers_may_be_left_as_they_are(tmp_path: Path) -> None:
    """Guards `modules_to_not_convert` and negative patterns of `dynamic`, which the weights themselves say."""
    model = tiny_model("qwen3")
    write_packed(tmp_path, model, "gptq", dynamic={r"-:.*\.layers\.1\.mlp\.up_proj": {}})
    weights, place = load_file(tmp_path / "model.safetensors"), "model.layers.1.mlp.up_proj"
    weights = {name: weight for name, weight in weights.items() if not name.startswith(place)}
    weights[f"{place}.weight"] = model.get_parameter(f"{place}.weight").half()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = load_target(str(tmp_path), EAGER).lm.model.get_parameter(f"{place}.weight")
    assert torch.equal(found.float(), model.get_parameter(f"{place}.weight").float())


def test_inputs_in_another_order_are_refused(tmp_path: Path) -> None:
    """Guards desc_act, where inputs belong to groups by `g_idx` alone."""
    write_packed(tmp_path, tiny_model("qwen3"), "gptq", desc_act=True)
    load_target(str(tmp_path), EAGER)  # the order is the plain one
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.g_idx"] = weights["model.layers.1.mlp.up_proj.g_idx"].flip(0)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj has inputs in another order .*desc_act=false"):
        load_target(str(tmp_path), EAGER)


def test_damaged_folders_are_refused_in_a_line(tmp_path: Path) -> None:
    write_packed(tmp_path, tiny_model("qwen3"), "awq")
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    place = "model.layers.0.self_attn.q_proj"
    for change, told in (
        ({f"{place}.qzeros": None}, f"{place} has no qzeros"),
        ({f"{place}.qweight": None}, f"{place}.weight is missing"),
        ({f"{place}.scales": whole[f"{place}.scales"][:1]}, "has scales of shape [1, 64]"),
        ({f"{place}.qweight": whole[f"{place}.qweight"].long()}, "packed in torch.int64"),
        ({f"{place}.qweight": whole[f"{place}.qweight"][:32]}, "has scales of shape"),
    ):
        weights = {name: weight for name, weight in (whole | change).items() if weight is not None}
        save_file(weights, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=re.escape(told)):
            load_target(str(tmp_path), EAGER)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match="one of its files seems damaged"):
        load_target(str(tmp_path), EAGER)
    file.unlink()
    with pytest.raises(ValueError, match="has no safetensors"):
        load_target(str(tmp_path), EAGER)


def test_biases_of_nothing_are_no_weights_too_many(tmp_path: Path) -> None:
    """Guards AutoGPTQ's folders, which have a bias of zeros for every layer; others are named in a warning."""
    write_packed(tmp_path, tiny_model("qwen3"), "gptq")
    weights = load_file(tmp_path / "model.safetensors")
    bias = "model.layers.0.mlp.up_proj.bias"
    for number in (0.0, 1.0):
        save_file(
            weights | {bias: torch.full((128,), number)}, tmp_path / "model.safetensors", metadata={"format": "pt"}
        )
        if number:
            with pytest.warns(UserWarning, match=re.escape(f"weights that are not used: {bias}")):
                load_target(str(tmp_path), EAGER)
        else:
            load_target(str(tmp_path), EAGER)


def test_memory_of_embeddings_is_counted_too(tmp_path: Path) -> None:
    """Guards vocabularies of a fifth of all weights: each number of theirs was counted as a byte and a fourth."""
    model = tiny_model("qwen3", tied=False, vocab_size=4000)
    write_packed(tmp_path, model, "gptq")
    plan = plan_of(str(tmp_path), Runtime())
    found = load_target(str(tmp_path), Runtime(compiled=False)).lm.model
    whole = sum(weight.nbytes for weight in found.parameters() if not isinstance(weight, QuantizedTensor))
    packed = sum(weight.numel() for weight in found.parameters() if isinstance(weight, QuantizedTensor))
    assert weights_bytes(plan) == whole + 1.25 * packed


def test_how_packed_models_run(tmp_path: Path) -> None:
    """Guards the dtype, which is nobody's to choose, and drafters of the model before, which fit this one."""
    write_packed(tmp_path, tiny_model("qwen3"), "gptq")
    assert plan_of(str(tmp_path), Runtime()).runtime.dtype == STORED
    with pytest.raises(ValueError, match=r"dtype='int8': the weights of .* are stored in few bits"):
        load_target(str(tmp_path), Runtime(dtype="int8"))
    assert weights_digest(str(tmp_path)) is None
    change_config(tmp_path, model_type="olmo2")
    with pytest.raises(ValueError, match=r"an? olmo2 model packed by 'gptq'"):
        load_target(str(tmp_path), EAGER)
