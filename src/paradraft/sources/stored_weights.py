"""A model whose weights are taken one by one from a file, as they are stored there: those of few bits stay so."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from paradraft.formats.gguf_blocks import Blocks
from paradraft.models.devices import device_of
from paradraft.models.quantized import QuantizedTensor
from paradraft.models.runtime import AUTO, STORED, Runtime

Weight = Blocks | Tensor
"""Of few bits, or numbers; a `QuantizedTensor` is of few bits that are not read yet."""
HEAD = "lm_head.weight"


def quantized(blocks: Blocks, dtype: torch.dtype) -> QuantizedTensor:
    """Weights of few bits, whose products are in a dtype."""
    return QuantizedTensor(
        blocks.values, blocks.scales, blocks.offsets, bits=blocks.bits, group=blocks.group, dtype=dtype
    )


def lossless_dtype(numbers: Iterable[Tensor], wanted: torch.dtype) -> torch.dtype:
    """What passes compute in beside weights of few bits: float32 where bfloat16 would round one of the other weights.

    Args:
        numbers: those weights.
        wanted: bfloat16 or float32.

    >>> lossless_dtype([torch.tensor([0.5, 3.0])], torch.bfloat16), lossless_dtype([torch.tensor(0.1)], torch.bfloat16)
    (torch.bfloat16, torch.float32)
    """
    is_exact = all(torch.equal(each.to(wanted).float(), each.float()) for each in numbers)
    return wanted if is_exact else torch.float32


def settled_as_stored(runtime: Runtime, name: str) -> Runtime:
    """How a model runs whose weights are stored in few bits, without "auto".

    Args:
        runtime: as it was asked for.
        name: of the model, for messages.

    Raises:
        ValueError: another dtype was asked for, or another device than CPUs.
    """
    if runtime.dtype not in (AUTO, STORED):
        raise ValueError(
            f"dtype={runtime.dtype!r}: the weights of {name!r} are stored in few bits, and decoded as they are: leave "
            "the dtype out, or use the model before that"
        )
    device = "cpu" if runtime.device == AUTO else device_of(runtime.device)
    if torch.device(device).type != "cpu":
        raise ValueError(
            f"device={device!r}: the weights of {name!r} are stored in few bits, which run on CPUs: use cpu"
        )
    return replace(runtime, device=device, dtype=STORED)


def assembled(
    config: PretrainedConfig,
    read: Callable[[str], Weight | None],
    *,
    name: str,
    dtype: torch.dtype,
    attention: str,
) -> PreTrainedModel:
    """Builds a model of the weights of a file.

    Args:
        config: the model's.
        read: what gives the weight of a name, as `transformers` has it; None if there is none.
        name: of the model, for messages.
        dtype: of activations, and of the weights that are numbers.
        attention: `attn_implementation`.

    Raises:
        ValueError: a weight is missing, has another shape than the config says, or has few bits where it may not.
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


def _put(model: PreTrainedModel, key: str, found: Weight | None, *, name: str, dtype: torch.dtype) -> None:
    place, _, last = key.rpartition(".")
    module = model.get_submodule(place)
    shape = getattr(module, last).shape
    if found is None:
        raise ValueError(f"model {name!r}: its weights do not fit its config, {key} is missing")
    weight = quantized(found, dtype) if isinstance(found, Blocks) else found
    weight = weight if isinstance(weight, QuantizedTensor) else weight.to(dtype)
    if weight.shape != shape:
        raise ValueError(
            f"model {name!r}: its weights do not fit its config, {key} has the shape {tuple(weight.shape)}, not "
            f"{tuple(shape)}"
        )
    if isinstance(weight, QuantizedTensor) and not (isinstance(module, nn.Linear | nn.Embedding) and last == "weight"):
        raise ValueError(f"model {name!r}: {key} has few bits, which only matrices of weights may have")
    setattr(module, last, nn.Parameter(weight, requires_grad=False))


def _compute_buffers(model: PreTrainedModel) -> None:
    """Makes anew the modules that compute what they hold: those of the angles of rotary embeddings."""
    for place, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            parent, _, last = place.rpartition(".")
            setattr(model.get_submodule(parent), last, type(module)(model.config))
    assert not any(part.is_meta for part in (*model.parameters(), *model.buffers()))
