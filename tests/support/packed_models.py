"""Folders as GPTQ and AWQ write them: packed bit by bit, as their formats say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.gguf_files import tiny_tokenizer

GROUP = 32
AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The outputs of 8, from the lowest 4 bits of a number to the highest."""


def rounded(weight: Tensor, group: int, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """4-bit values and zeros, float16 scales, and the weights in float64 that they stand for."""
    groups = weight.unflatten(1, (-1, group))
    if symmetric:
        scales = (groups.abs().amax(2) / 7).half()
        zeros = torch.full_like(scales, 8).long()
    else:
        low, high = groups.amin(2), groups.amax(2)
        scales = ((high - low).clamp(min=1e-4) / 15).half()
        zeros = (-low / scales.float()).round().clamp(1, 15).long()
    values = (groups / scales.float()[:, :, None]).round().long() + zeros[:, :, None]
    values = values.clamp(0, 15)
    numbers = scales.double()[:, :, None] * (values - zeros[:, :, None])
    return values.flatten(1), zeros, scales, numbers.flatten(1)


def packed(rows: list[list[int]], order: tuple[int, ...]) -> Tensor:
    """int32 numbers of 8 values in a row, the i-th 4 bits hold the value `order[i]`."""
    numbers = []
    for row in rows:
        numbers.append([])
        for start in range(0, len(row), 8):
            number = sum(row[start + value] << 4 * place for place, value in enumerate(order))
            numbers[-1].append(number - 2**32 if number >= 2**31 else number)
    return torch.tensor(numbers, dtype=torch.int32)


def layer(weight: Tensor, method: str, *, symmetric: bool, group: int = GROUP, v2: bool = False) -> dict[str, Any]:
    """The tensors of a linear layer, and as `numbers` the weights that they stand for."""
    values_NK, zeros_NG, scales_NG, numbers = rounded(weight, group, symmetric=symmetric)
    plain = tuple(range(8))
    if method == "awq":
        qweight = packed(values_NK.T.tolist(), AWQ_OUTPUTS)
        qzeros = packed(zeros_NG.T.tolist(), AWQ_OUTPUTS)
        return {"qweight": qweight, "qzeros": qzeros, "scales": scales_NG.T.contiguous(), "numbers": numbers}
    stored = zeros_NG if v2 else zeros_NG - 1
    return {
        "qweight": packed(values_NK.tolist(), plain).T.contiguous(), "qzeros": packed(stored.T.tolist(), plain),
        "scales": scales_NG.T.contiguous(), "numbers": numbers,
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // group,
    }  # fmt: skip


def write_packed(
    folder: Path, model: PreTrainedModel, method: str, *, symmetric: bool = False, v2: bool = False,
    head: bool = False, **settings: Any,
) -> PreTrainedModel:  # fmt: skip
    """Writes a folder whose layers are packed, and the head if that is wanted; returns the model of the weights that it
    stands for, in float64."""
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    weights, expected = load_file(folder / "model.safetensors"), model.state_dict()
    for name in [name for name in weights if "_proj.weight" in name or (head and name == "lm_head.weight")]:
        place = name.removesuffix(".weight")
        parts = layer(weights.pop(name), method, symmetric=symmetric, v2=v2)
        expected[name] = parts.pop("numbers")
        weights |= {f"{place}.{part}": tensor for part, tensor in parts.items()}
    # Both methods write float16 models.
    weights = {name: weight.half() if weight.is_floating_point() else weight for name, weight in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    told = {"quant_method": method, "bits": 4, "group_size": GROUP}
    told |= {"version": "gemm", "zero_point": True} if method == "awq" else {"sym": symmetric, "desc_act": False}
    told |= {"checkpoint_format": "gptq_v2"} if v2 else {}
    change_config(folder, quantization_config=told | settings, dtype="float16")
    copy = type(model)(model.config).double().eval()
    copy.load_state_dict({name: weight.double() for name, weight in expected.items()})
    return copy.requires_grad_(False)


def change_config(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
