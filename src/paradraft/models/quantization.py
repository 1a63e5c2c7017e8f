"""Weights in 8 or 4 bits: on CPUs by `paradraft.models.quantized`, elsewhere through torchao."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from paradraft.errors import is_out_of_memory
from paradraft.formats.gguf_blocks import Products
from paradraft.models.architectures import spec_of
from paradraft.models.quantized import GROUP, QuantizedTensor, round_linears

NF4_BLOCK, NF4_SCALES = 64, 256
"""Weights that share a scale in NF4, and scales that share a scale (double quantization), as in QLoRA."""


def check_quantization(bits: int, device: torch.device, dtype: torch.dtype) -> None:
    """Raises ValueError, before anything is loaded, if a device has no kernels for 8 or 4 bits with activations of this
    dtype; CPUs always have."""
    if device.type == "cpu":
        return
    _torchao(bits)
    if bits == 4 and device.type != "cuda":
        raise ValueError(f"dtype='int4': torchao's kernels are for CUDA devices only, not for {device.type}: use int8")
    if bits == 4 and dtype != torch.bfloat16:
        raise ValueError("dtype='int4': torchao's kernels compute in bf16, which this GPU does not: use int8")


def quantize(model: PreTrainedModel, bits: int) -> None:
    """Quantizes the weights of all linear layers, the head's too, in place.

    Embeddings and norms are not quantized; a tied head is untied. On CPUs activations are quantized too, and the head
    and the projections of shared keys and values keep 8 bits, see `paradraft.models.quantized`. Elsewhere torchao
    quantizes weights only.

    Args:
        model: on its device.
        bits: 8, with a scale for each output; or 4, with a scale for each `GROUP` inputs.

    Raises:
        ValueError: experts, or torchao fails.
    """
    if spec_of(model.config).has_experts:
        raise ValueError(f"dtype='int{bits}': linear layers are rounded, and experts are none: use bfloat16")
    if model.device.type == "cpu":
        return round_linears(model, bits, model.get_output_embeddings())
    quantize_, config = _torchao(bits)
    try:
        quantize_(model, config)
    except (RuntimeError, NotImplementedError, ImportError, AssertionError) as error:
        if is_out_of_memory(error):
            raise
        device, reason = next(model.parameters()).device, str(error).strip().splitlines()[0]
        raise ValueError(
            f"dtype='int{bits}': torchao cannot do this to {model.config.name_or_path!r} on {device} ({reason}): use "
            "another dtype"
        ) from None


def _torchao(bits: int) -> tuple[Callable[[nn.Module, Any], None], Any]:
    try:
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise ValueError(f"dtype='int{bits}' needs torchao ({error}): pip install 'paradraft[quantized]'") from None
    # By default torchao also changes the settings that other models are compiled with.
    if bits == 8:
        return quantize_, Int8WeightOnlyConfig(set_inductor_config=False)
    packed = Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format="tile_packed_to_4d", set_inductor_config=False)
    return quantize_, packed


def store_in_nf4(model: PreTrainedModel, device: torch.device) -> None:
    """Stores the linear layers of all decoder layers in NF4 (QLoRA, Dettmers et al. 2023), in place, on `device`.

    Embeddings, norms and the head are not quantized. Unlike after `quantize`, gradients pass through on every device.
    The unquantized matrices are on `device` one at a time. Raises ValueError if torchao is not installed.
    """
    try:
        from torchao.quantization import to_nf4
    except ImportError as error:
        raise ValueError(f"nf4=true needs torchao ({error}): pip install 'paradraft[quantized]'") from None
    for layer in model.model.layers.modules():
        if isinstance(layer, nn.Linear) and (blocks := layer.weight.numel() / NF4_BLOCK).is_integer():
            stored = to_nf4(layer.weight.detach().to(device), NF4_BLOCK, math.gcd(int(blocks), NF4_SCALES))
            layer.weight = nn.Parameter(stored, requires_grad=False)
    model.to(device)


def stored_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that store a weight: itself, or the integers, scales and offsets of a quantized one."""
    if isinstance(tensor, QuantizedTensor):
        numbers = [part for part in tensor.parts if part is not None]
        return [each for part in numbers for each in (part.tensors if isinstance(part, Products) else [part])]
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in stored_parts(getattr(tensor, name))]


def stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a weight in memory. Its `element_size` would be that of the dtype before quantization."""
    if isinstance(tensor, QuantizedTensor):
        return tensor.stored_bytes
    return sum(part.numel() * part.element_size() for part in stored_parts(tensor))
