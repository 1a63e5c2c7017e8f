"""Writes a causal LM of `transformers` as a GGUF file for llama.cpp.

Only token ids are exchanged with llama.cpp, so the file has no vocabulary but its size. Weights keep the dtype of the
model, norms and biases become float32, as in llama.cpp's own converter (`convert_hf_to_gguf.py`).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from paradraft.models.architectures import FAMILIES, head_size, spec_of
from paradraft.sources.gguf_model import INNER, OUTER, ROPE, settings_of

WHOLE = {ours: theirs for theirs, ours in OUTER.items()}
OF_LAYERS = {ours: theirs for theirs, ours in INNER.items()}
"""Names of weights in GGUF by those of `transformers`."""
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
"""GGML's type codes."""
FILE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 32}
"""llama.cpp's file type codes, by the dtype of the matrices."""
ALIGNMENT = 32
"""Bytes; tensors begin at multiples of it."""
UINT32, FLOAT32, STRING = 4, 6, 8
"""Type codes of settings."""

Settings = dict[str, int | float | str]


def write_gguf(model: PreTrainedModel, file: Path) -> None:
    """Writes a model atomically: the file is complete or absent.

    Args:
        model: on the CPU, in float32, float16 or bfloat16.
        file: in an existing folder.

    Raises:
        ValueError: llama.cpp would not compute the same as this model.
    """
    tensors = dict(_tensors(model))
    settings = _settings(model)
    new = file.with_name(f"{file.name}.{os.getpid()}.new")
    try:
        with new.open("wb") as stream:
            _write(stream, settings, tensors)
        os.replace(new, file)
    finally:
        new.unlink(missing_ok=True)


def check_config(config: PretrainedConfig) -> None:
    """Raises ValueError unless models with this config can be written."""
    name = config.name_or_path or config.model_type
    if spec_of(config).gguf is None:
        written = ", ".join(family for family, spec in FAMILIES.items() if spec.gguf is not None)
        raise ValueError(
            f"{name!r} is a {config.model_type} model, and paradraft writes GGUF files of {written} only: leave this "
            "peer out"
        )
    if config.hidden_act != "silu":
        raise ValueError(f"{name!r}: llama.cpp computes silu, not {config.hidden_act!r}: leave this peer out")


def _settings(model: PreTrainedModel) -> Settings:
    config = model.config
    check_config(config)
    architecture = spec_of(config).gguf
    assert architecture is not None  # checked
    return {
        "general.architecture": architecture,
        "general.file_type": FILE_TYPES[model.dtype],
        **{f"{architecture}.{key}": value for key, value in settings_of(config).items()},
        "tokenizer.ggml.model": "none",
    }


def _tensors(model: PreTrainedModel) -> Iterable[tuple[str, Tensor]]:
    """All weights, by their names in GGUF."""
    config = model.config
    check_config(config)
    is_permuted = spec_of(config).has_gguf_pairs
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if is_permuted and "q_proj" in name:
            weight = paired(weight, config.num_attention_heads)
        if is_permuted and "k_proj" in name:
            weight = paired(weight, config.num_key_value_heads)
        yield gguf_name(name), weight if weight.ndim > 1 else weight.float()
    if (factors := _rope_factors(model)) is not None:
        yield ROPE, factors


def gguf_name(name: str) -> str:
    """GGUF's name of a weight.

    >>> gguf_name("model.layers.3.self_attn.o_proj.weight")
    'blk.3.attn_output.weight'
    """
    if name in WHOLE:
        return WHOLE[name]
    part, _, kind = name.rpartition(".")
    layer, _, inner = part.removeprefix("model.layers.").partition(".")
    if inner not in OF_LAYERS:
        raise ValueError(f"llama.cpp has no weight {name!r}: leave this peer out")
    return f"blk.{layer}.{OF_LAYERS[inner]}.{kind}"


def paired(weight: Tensor, heads: int) -> Tensor:
    """The rows of a projection, or a bias, with rows that are rotated together next to each other in each head.

    >>> paired(torch.tensor([0, 1, 2, 3, 10, 11, 12, 13]), heads=2).tolist()
    [0, 2, 1, 3, 10, 12, 11, 13]
    """
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _rope_factors(model: PreTrainedModel) -> Tensor | None:
    """The divisors of the plain frequencies of the rotary embedding; None if all are 1."""
    rope, config = model.model.rotary_emb, model.config
    size = head_size(config)
    plain = float(config.rope_parameters["rope_theta"]) ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    frequencies = rope.inv_freq.float()
    name = config.name_or_path or config.model_type
    if rope.attention_scaling != 1.0 or frequencies.shape != plain.shape:
        kind = config.rope_parameters.get("rope_type", "default")
        raise ValueError(f"{name!r}: paradraft writes no GGUF file with {kind!r} rope settings: leave this peer out")
    factors = plain / frequencies
    if torch.allclose(factors, torch.ones(()), rtol=1e-5):
        return None
    if not spec_of(config).has_gguf_pairs:
        raise ValueError(
            f"{name!r}: llama.cpp reads changed rope frequencies of Llama models only: leave this peer out"
        )
    return factors


def _write(stream: IO[bytes], settings: Settings, tensors: dict[str, Tensor]) -> None:
    """Source: the GGUF specification, version 3 (ggml/docs/gguf.md)."""
    stream.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(settings)))
    for key, value in settings.items():
        stream.write(_text(key) + _value(value))
    offset = 0
    for name, tensor in tensors.items():
        sizes = tuple(reversed(tensor.shape))  # the innermost first
        stream.write(_text(name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes))
        stream.write(struct.pack("<IQ", TYPES[tensor.dtype], offset))
        offset += tensor.nbytes + -tensor.nbytes % ALIGNMENT
    stream.write(bytes(-stream.tell() % ALIGNMENT))
    for tensor in tensors.values():
        stream.write(tensor.detach().contiguous().view(torch.uint8).numpy().data)
        stream.write(bytes(-tensor.nbytes % ALIGNMENT))


def _text(text: str) -> bytes:
    written = text.encode()
    return struct.pack("<Q", len(written)) + written


def _value(value: int | float | str) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _text(value)
    return struct.pack("<If", FLOAT32, value) if isinstance(value, float) else struct.pack("<II", UINT32, value)
