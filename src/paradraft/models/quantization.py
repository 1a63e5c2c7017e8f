"""Weights in 8 or 4 bits, through torchao: less memory, and less to read in every pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from paradraft.out_of_memory import is_out_of_memory

GROUP = 32
"""Weights that share a scale in 4 bits."""


def check_quantization(bits: int, device: torch.device, dtype: torch.dtype) -> None:
    """Raises ValueError, before anything is loaded, if torchao is not installed or has no kernels for this.

    Args:
        bits: 8 or 4.
        device: where the model is to run.
        dtype: what passes compute in.
    """
    _torchao(bits)
    if bits == 4 and device.type != "cuda":
        raise ValueError(f"dtype='int4': torchao's kernels are for CUDA devices only, not for {device.type}: use int8")
    if bits == 4 and dtype != torch.bfloat16:
        raise ValueError("dtype='int4': torchao's kernels compute in bf16, which this GPU does not: use int8")


def quantize(model: PreTrainedModel, bits: int) -> None:
    """Rounds the weights of all linear layers, the head's too, in place; what is multiplied with them is not rounded.

    Embeddings and norms stay as they are. A head that was the embedding becomes a matrix of its own.

    Args:
        model: on the device it is to run on.
        bits: 8, a scale for each output; or 4, a scale for `GROUP` inputs.

    Raises:
        ValueError: torchao cannot do it.
    """
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
    # By default it would also change the settings that other models are compiled with.
    if bits == 8:
        return quantize_, Int8WeightOnlyConfig(set_inductor_config=False)
    packed = Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format="tile_packed_to_4d", set_inductor_config=False)
    return quantize_, packed


def stored_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a weight is stored in: itself, or the whole numbers and scales of a quantized one."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in stored_parts(getattr(tensor, name))]


def stored_bytes(tensor: torch.Tensor) -> int:
    """What a weight takes in memory; the element size of a quantized one would be the original's."""
    return sum(part.numel() * part.element_size() for part in stored_parts(tensor))
