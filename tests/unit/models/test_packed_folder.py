"""Folders of GPTQ and AWQ against an independent packer: their weights are those that were packed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paradraft.digests import weights_digest
from paradraft.models.loading import load_target, settled
from paradraft.models.packed_folder import Packing, blocks_of
from paradraft.models.quantized import QuantizedTensor
from paradraft.models.runtime import STORED, Runtime
from paradraft.models.stored_weights import quantized
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


def test_how_packed_models_run(tmp_path: Path) -> None:
    """Guards the dtype, which is nobody's to choose, and drafters of the model before, which fit this one."""
    write_packed(tmp_path, tiny_model("qwen3"), "gptq")
    assert settled(Runtime(), str(tmp_path)).dtype == STORED
    with pytest.raises(ValueError, match=r"dtype='int8': the weights of .* are stored in few bits"):
        load_target(str(tmp_path), Runtime(dtype="int8"))
    assert weights_digest(str(tmp_path)) is None
    change_config(tmp_path, model_type="olmo2")
    with pytest.raises(ValueError, match=r"an? olmo2 model packed by 'gptq'"):
        load_target(str(tmp_path), EAGER)
