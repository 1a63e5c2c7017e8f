"""Weights in 8 or 4 bits, through torchao: less memory, and less to read in every pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

GROUP = 32
"""Weights that share a scale in 4 bits."""


def quantize(model: nn.Module, bits: int) -> None:
    """Rounds the weights of all linear layers, the head's too, in place; what is multiplied with them is not rounded.

    Embeddings and norms stay as they are. A head that was the embedding becomes a matrix of its own.

    Args:
        model: on the device it is to run on.
        bits: 8, a scale for each output; or 4, a scale for `GROUP` inputs, on CUDA and in bf16 only.

    Raises:
        ValueError: torchao is not installed, or cannot do it on this device.
    """
    parameter = next(model.parameters())
    if bits == 4 and (parameter.device.type != "cuda" or parameter.dtype != torch.bfloat16):
        raise ValueError(
            f"dtype='int4': torchao's kernels are for CUDA devices only, not for {parameter.device.type}: use int8"
        )
    quantize_, config = _torchao(bits)
    try:
        quantize_(model, config)
    except (RuntimeError, NotImplementedError, ImportError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"dtype='int{bits}': torchao cannot do this on {parameter.device}: {reason}") from None


def _torchao(bits: int) -> tuple[Callable[[nn.Module, Any], None], Any]:
    try:
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise ValueError(f"dtype='int{bits}' needs torchao ({error}): pip install 'paradraft[quantized]'") from None
    if bits == 8:
        return quantize_, Int8WeightOnlyConfig()
    packed = Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format="tile_packed_to_4d", set_inductor_config=False)
    return quantize_, packed


def stored_bytes(tensor: torch.Tensor) -> int:
    """What a weight takes in memory: of a quantized one its parts, whose element size would be the original's."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.numel() * tensor.element_size()
    names, _ = tensor.__tensor_flatten__()
    return sum(stored_bytes(getattr(tensor, name)) for name in names)
