"""A model as a GGUF file, with its tokenizer and, of a PARD drafter, its mask token.

To llama.cpp the file is an ordinary model. What is multiplied has the type that is asked for, where rows are whole
blocks of it, and norms and biases are F32, as in the files that llama.cpp's converter writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from paradraft.export.gguf_vocabulary import metadata_of
from paradraft.formats.gguf import PARD_MASKS, PARD_TOKEN
from paradraft.formats.gguf_blocks import KINDS, NAMES
from paradraft.formats.pard import declared_mask_id
from paradraft.sources.gguf_model import (
    CONFIGS,
    INNER,
    PERMUTED,
    ROPE,
    llama3_factors,
    names_of,
    row_order,
    settings_of,
)
from paradraft.text.generation_config import end_ids

FILE = "model.gguf"
TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int8": "Q8_0", "int4": "Q4_0"}
"""The types of matrices, by our names of dtypes."""
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32}
"""What `general.file_type` calls them."""
_YARN = {"beta_fast": 32, "beta_slow": 1, "truncate": True}
"""Settings of YaRN that llama.cpp has these values for."""


def check_can_write(config: PretrainedConfig, dtype: str, name: str) -> None:
    """Checks that a model can be written, before its weights are loaded.

    Args:
        config: the model's.
        dtype: of its matrices, one of `TYPES`.
        name: of the model, for messages.

    Raises:
        ValueError: the format has no such architecture here, or the `gguf` package is not installed.
    """
    try:
        import gguf  # noqa: F401  # whether it is there
    except ImportError:
        raise ValueError("--to gguf needs the gguf package: pip install 'paradraft[gguf]'") from None
    if dtype not in TYPES:
        raise ValueError(f"--draft-dtype {dtype} with --to gguf: use one of {', '.join(TYPES)}")
    if config.model_type not in CONFIGS:
        raise ValueError(
            f"{name!r} is a {config.model_type} model; GGUF files are written of {', '.join(CONFIGS)} models"
        )
    rope = config.rope_parameters
    if rope.get("rope_type") == "yarn" and any(
        rope.get(key, value) != value for key, value in (*_YARN.items(), ("attention_factor", None), ("mscale", None))
    ):
        raise ValueError(f"{name!r} has settings of YaRN that GGUF files do not hold")


def write_gguf(
    file: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    generation: GenerationConfig,
    *,
    dtype: str,
    name: str,
) -> None:
    """Writes a model.

    Args:
        file: to write.
        model: what `check_can_write` accepts, on the CPU; its config may declare mask tokens.
        tokenizer: its tokenizer.
        generation: how its texts end.
        dtype: of its matrices, one of `TYPES`.
        name: of the model.

    Raises:
        ValueError: the tokenizer is of a kind that is not written.
    """
    import gguf

    config, arch = model.config, model.config.model_type
    writer = gguf.GGUFWriter(file, arch)
    told = {
        "general.type": "model", "general.name": name, "general.file_type": _FILE_TYPES[TYPES[dtype]],
        "general.quantization_version": 2, **{f"{arch}.{key}": value for key, value in _settings(config).items()},
        **metadata_of(tokenizer, config.vocab_size, name), **_ends(generation, tokenizer.eos_token_id),
    }  # fmt: skip
    if (mask := declared_mask_id(config)) is not None:
        told |= {"tokenizer.ggml.mask_token_id": mask, PARD_TOKEN: mask, PARD_MASKS: getattr(config, "pard_masks", 1)}
    for key, value in told.items():
        _add(writer, key, value)
    for tensor, weight in _tensors(model):
        kind = _kind(weight, dtype)
        writer.add_tensor(tensor, gguf.quants.quantize(weight.float().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, key: str, value: object) -> None:
    """Adds metadata of the type that llama.cpp reads."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _settings(config: PretrainedConfig) -> Mapping[str, object]:
    rope = config.rope_parameters
    found: dict[str, object] = {**settings_of(config)}
    if rope.get("rope_type") in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope.get("rope_type") == "yarn":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return found


def _ends(generation: GenerationConfig, first: int | None) -> Mapping[str, int]:
    """The tokens that end a text, as many as the format has keys for, and the tokenizer's own before all others."""
    ends = sorted(end_ids(generation), key=lambda token: (token != first, token))
    return {f"tokenizer.ggml.{key}_token_id": token for key, token in zip(("eos", "eot", "eom"), ends, strict=False)}


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    config = model.config
    weights = dict(model.named_parameters())
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = {INNER["attn_q"]: config.num_attention_heads, INNER["attn_k"]: config.num_key_value_heads}
    for theirs, ours in names_of(config.num_hidden_layers):
        if ours not in weights:
            continue
        weight = weights[ours].detach()
        layer = ".".join(ours.split(".")[3:-1])
        if config.model_type in PERMUTED and layer in heads:
            weight = weight[row_order(heads[layer], size).argsort()]
        yield theirs, weight
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        yield (
            ROPE,
            llama3_factors(size=size, theta=rope["rope_theta"], **{k: v for k, v in rope.items() if k != "rope_theta"}),
        )


def _kind(weight: Tensor, dtype: str) -> Any:
    """The type of a tensor: a matrix whose rows are no whole blocks is BF16, as nearly all weights are."""
    import gguf

    kinds = {name: number for number, name in NAMES.items()}
    name = "F32" if weight.ndim == 1 else TYPES[dtype]
    if weight.shape[-1] % KINDS[kinds[name]].weights:
        name = "BF16" if torch.equal(weight.bfloat16().to(weight.dtype), weight) else "F32"
    return gguf.GGMLQuantizationType[name]
