"""Assembles a model from the weights of a file, one by one; quantized weights stay quantized."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from paradraft.formats.gguf_blocks import Blocks
from paradraft.models.quantized import QuantizedTensor

Weight = Blocks | Tensor
"""Quantized or plain weights; a `QuantizedTensor` is read lazily."""
HEAD = "lm_head.weight"


def quantized(blocks: Blocks, dtype: torch.dtype) -> QuantizedTensor:
    """Quantized weights whose products have a dtype."""
    return QuantizedTensor(
        blocks.values, blocks.scales, blocks.offsets, bits=blocks.bits, group=blocks.group, dtype=dtype
    )


def lossless_dtype(numbers: Iterable[Tensor], wanted: torch.dtype) -> torch.dtype:
    """The dtype for passes with quantized weights: `wanted`, or float32 if that would round one of the plain weights.

    >>> lossless_dtype([torch.tensor([0.5, 3.0])], torch.bfloat16), lossless_dtype([torch.tensor(0.1)], torch.bfloat16)
    (torch.bfloat16, torch.float32)
    """
    is_exact = all(torch.equal(weight.to(wanted).float(), weight.float()) for weight in numbers)
    return wanted if is_exact else torch.float32


def assembled(
    config: PretrainedConfig,
    read: Callable[[str], Weight | None],
    *,
    name: str,
    dtype: torch.dtype,
    attention: str,
) -> PreTrainedModel:
    """Builds a model from the weights of a file.

    Args:
        read: returns the weight of a `transformers` name; None if there is none.
        dtype: of activations and plain weights.

    Raises:
        ValueError: a weight is missing, contradicts the config's shape, or is quantized where it must not be.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=False, attn_implementation=attention
        )
    for key, _ in list(model.named_parameters(remove_duplicate=False)):
        if not (config.tie_word_embeddings and key == HEAD):
            _put(model, key, read(key), name=name, dtype=dtype)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.get_input_embeddings().weight
    _compute_buffers(model)
    config.name_or_path = name
    return model.eval().requires_grad_(False)


def _put(model: PreTrainedModel, key: str, stored: Weight | None, *, name: str, dtype: torch.dtype) -> None:
    parent, _, attribute = key.rpartition(".")
    module = model.get_submodule(parent)
    shape = getattr(module, attribute).shape
    if stored is None:
        raise ValueError(f"model {name!r}: its weights do not fit its config, {key} is missing")
    weight = quantized(stored, dtype) if isinstance(stored, Blocks) else stored
    weight = weight if isinstance(weight, QuantizedTensor) else weight.to(dtype)
    if weight.shape != shape:
        raise ValueError(
            f"model {name!r}: its weights do not fit its config, {key} has the shape {tuple(weight.shape)}, not "
            f"{tuple(shape)}"
        )
    if isinstance(weight, QuantizedTensor) and not (
        isinstance(module, nn.Linear | nn.Embedding) and attribute == "weight"
    ):
        raise ValueError(f"model {name!r}: {key} has few bits, which only matrices of weights may have")
    setattr(module, attribute, nn.Parameter(weight, requires_grad=False))


def _compute_buffers(model: PreTrainedModel) -> None:
    """Recreates modules with computed buffers: the frequencies of rotary embeddings."""
    for path, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            parent, _, attribute = path.rpartition(".")
            setattr(model.get_submodule(parent), attribute, type(module)(model.config))
    assert not any(part.is_meta for part in (*model.parameters(), *model.buffers()))
