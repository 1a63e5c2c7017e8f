"""Weights in 8 or 4 bits: on CPUs by `paradraft.models.quantized`, elsewhere through torchao."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from paradraft.errors import is_out_of_memory
from paradraft.formats.gguf_blocks import Products
from paradraft.models.architectures import spec_of
from paradraft.models.quantized import GROUP, LARGEST, QuantizedTensor

SHRINKINGS = 16
"""Candidate scales of a group of 4-bit weights."""
ROUNDED_AT_ONCE = 2**17
"""Weights that are quantized at a time, so that all intermediate results stay in the CPU cache."""
KEPT_IN_8_BITS = ("k_proj", "v_proj")
"""Layers that keep 8 bits where others get 4, if several query heads share a key/value head."""
ROUNDING = 2
"""Version of the quantization; weights that another version has stored are not reused."""

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


def round_linears(model: nn.Module, bits: int, head: nn.Module) -> None:
    """Quantizes the linear layers of a model on the CPU, in place: the head to 8 bits, the others as `bits_of` says.

    A tied head is untied.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            weight = rounded(module.weight, 8 if module is head else bits_of(name, module.weight, bits))
            module.weight = nn.Parameter(weight, requires_grad=False)


def bits_of(name: str, weight: Tensor, bits: int) -> int:
    """The bits of a linear layer, other than the head, of a model that is quantized to 8 or 4 bits.

    In a 4-bit model, projections of shared keys and values keep 8 bits, because an error in one of them is an error in
    all query heads that share it. With fewer key/value heads than query heads these are a few percent of the weights.
    With as many of both they are half of an attention's weights, and get 4 bits like all others.

    Args:
        name: of the layer; its last part decides.
        weight: `[N, K]`.
        bits: of the model, 8 or 4.

    >>> bits_of("layers.0.self_attn.v_proj", torch.zeros(192, 576), 4)
    8
    >>> bits_of("layers.0.mlp.down_proj", torch.zeros(576, 1536), 4)
    4
    """
    is_shared = name.endswith(KEPT_IN_8_BITS) and weight.shape[0] < weight.shape[1]
    return 8 if is_shared else bits


def rounded(weight: Tensor, bits: int) -> QuantizedTensor:
    """Quantizes weights `[N, K]` to 8 or 4 bits."""
    return rounded_to_8_bits(weight) if bits == 8 else rounded_to_4_bits(weight)


def rounded_to_8_bits(weight: Tensor) -> QuantizedTensor:
    """Quantizes weights `[N, K]` to 8 bits, with a scale for each output.

    >>> rounded_to_8_bits(torch.tensor([[1.0, -0.5, 0.004]])).parts[0].tolist()
    [[127, -64, 1]]
    """
    outputs, inputs = weight.shape
    values = torch.empty(outputs, inputs, dtype=torch.int8, device=weight.device)
    scales = torch.empty(outputs, 1, dtype=torch.float32, device=weight.device)
    for rows in _slices(weight):
        numbers = weight[rows].detach().float()
        scales[rows] = numbers.abs().amax(dim=1, keepdim=True) / LARGEST
        values[rows] = (numbers / scales[rows].where(scales[rows] > 0, 1.0)).round_().clamp_(-LARGEST, LARGEST)
    return QuantizedTensor(values, scales, bits=8, group=inputs, dtype=weight.dtype)


def rounded_to_4_bits(weight: Tensor) -> QuantizedTensor:
    """Quantizes weights `[N, K]` to 4 bits, with a float16 scale for each `GROUP` inputs.

    As in Q4_0 of llama.cpp, the scale maps the weight of the largest magnitude to -8, or to a value near it: of
    `SHRINKINGS` scales the one with the smallest sum of squared errors is taken.
    """
    outputs, inputs = weight.shape
    values = torch.empty(outputs, inputs, dtype=torch.int8, device=weight.device)
    scales = torch.empty(outputs, -(-inputs // GROUP), dtype=torch.float16, device=weight.device)
    for rows in _slices(weight):
        numbers = functional.pad(weight[rows].detach().float(), (0, -inputs % GROUP)).unflatten(1, (-1, GROUP))
        best = _best_scales(numbers)
        values[rows] = _integers(numbers, best).flatten(1)[:, :inputs]
        scales[rows] = best[:, :, 0]
    return QuantizedTensor(values, scales, bits=4, group=GROUP, dtype=weight.dtype)


def _slices(weight: Tensor) -> Iterator[slice]:
    """The outputs in pieces that are quantized at a time."""
    rows = max(ROUNDED_AT_ONCE // max(weight.shape[1], 1), 1)
    return (slice(first, first + rows) for first in range(0, len(weight), rows))


def _best_scales(numbers: Tensor) -> Tensor:
    """`[N, G, 1]` the scales of `rounded_to_4_bits`, as float32, for groups `[N, G, GROUP]`."""
    largest = numbers.gather(2, numbers.abs().argmax(dim=2, keepdim=True))
    best_error, best_scales = torch.full_like(largest, torch.inf), torch.zeros_like(largest)
    for step in range(SHRINKINGS):
        scales = (largest / (-8.5 + step / SHRINKINGS * 2)).half().float()
        error = _integers(numbers, scales).mul_(scales).sub_(numbers).square_().sum(dim=2, keepdim=True)
        is_better = error < best_error
        best_error, best_scales = error.where(is_better, best_error), scales.where(is_better, best_scales)
    return best_scales


def _integers(numbers: Tensor, scales: Tensor) -> Tensor:
    """The 4-bit integers of numbers, as float32."""
    return (numbers / scales.where(scales != 0, 1.0)).round_().clamp_(-8, 7)
