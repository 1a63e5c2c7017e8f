"""Reads and quantizes a checkpoint one matrix at a time, so that it is never in memory as a whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from paradraft.formats.vocab_map import D2T, T2D
from paradraft.models.quantization import bits_of, rounded
from paradraft.models.quantized import GROUP, Parts, QuantizedTensor
from paradraft.models.quantized_format import Format, NumberKind


def files_of(name: str, model: PreTrainedModel) -> dict[str, Path] | None:
    """The safetensors file of each weight of a model on the meta device.

    Returns:
        None if the files do not contain exactly the model's weights, with its names and shapes: then `transformers`
        must read them, because it knows other names and formats.
    """
    if getattr(model.config, "quantization_config", None) is not None or (stored := stored_tensors(name)) is None:
        return None
    if any(not key.startswith("model.rotary_emb.") for key, _ in model.named_buffers()):
        return None
    wanted = {key: list(weight.shape) for key, weight in model.named_parameters()}
    unused = {D2T, T2D}  # read with the reduced output head
    if model.config.tie_word_embeddings:
        unused.add("lm_head.weight")  # because the embedding is the head
    shapes = {key: shape for key, (_, shape) in stored.items() if key not in unused}
    return {key: file for key, (file, _) in stored.items()} if shapes == wanted else None


def stored_tensors(name: str) -> dict[str, tuple[Path, list[int]]] | None:
    """File and shape of each tensor in the safetensors files of a local folder or a Hugging Face id in the cache.

    Returns:
        None if there are no such files or they cannot be read.
    """
    cached = None if Path(name).exists() else try_to_load_from_cache(name, "config.json")
    folder = Path(cached).parent if isinstance(cached, str) else Path(name)
    if (folder / "adapter_config.json").exists():
        return None
    index, single = folder / "model.safetensors.index.json", "model.safetensors"
    stored: dict[str, tuple[Path, list[int]]] = {}
    try:
        parts = {single}
        if not (folder / single).is_file():
            parts = set(json.loads(index.read_text())["weight_map"].values())
        for file in (folder / part for part in sorted(parts)):
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118  # it is no dict
                    stored[key] = file, opened.get_slice(key).get_shape()
    except Exception:  # `transformers` reports the problem
        return None
    return stored


def fill(model: PreTrainedModel, files: dict[str, Path], *, bits: int) -> None:
    """Fills in the weights of a model on the meta device; linear layers are read and rounded lazily, when packed."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = head.weight is embedding.weight
    for prefix, module in model.named_modules():
        for attribute, weight in [*module.named_parameters(recurse=False)]:
            key = f"{prefix}.{attribute}"
            if not isinstance(module, nn.Linear) or attribute != "weight":
                setattr(module, attribute, nn.Parameter(_read(files[key], key, weight.dtype).clone()))
                continue
            if module is head and is_tied:
                read: Callable[[], Tensor] = partial(Tensor.detach, embedding.weight)
            else:
                read = partial(_read, files[key], key, weight.dtype)
            later = _rounded_later(read, weight, 8 if module is head else bits_of(prefix, weight, bits))
            module.weight = nn.Parameter(later, requires_grad=False)
    body: Any = model.model
    body.rotary_emb = type(body.rotary_emb)(config=model.config)


def read_tensor(file: Path, key: str) -> Tensor:
    """A stored tensor."""
    # Opened per tensor, so that the file's mapped pages are freed with the tensor.
    with safe_open(file, framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(key)
        return tensor


def _read(file: Path, key: str, dtype: torch.dtype) -> Tensor:
    return read_tensor(file, key).to(dtype)


def _rounded_later(read: Callable[[], Tensor], weight: Tensor, bits: int) -> QuantizedTensor:
    def parts() -> Parts:
        return rounded(read(), bits).parts

    format = Format(8, 0, NumberKind.FLOATS, NumberKind.NONE)
    if bits == 4:
        format = Format(4, GROUP, NumberKind.HALVES, NumberKind.NONE)
    return QuantizedTensor.elsewhere(
        parts, weight.shape, format=format, group=format.group or weight.shape[1], dtype=weight.dtype
    )
