"""Writes a model as a GGUF file, optionally with its tokenizer and a PARD drafter's mask token.

To llama.cpp the file is an ordinary model. Matrices have the requested type if their rows are whole blocks of it; norms
and biases are F32, as in files of llama.cpp's converter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from paradraft.export.gguf_vocabulary import metadata_of
from paradraft.formats.gguf import PARD_MASKS, PARD_TOKEN
from paradraft.formats.gguf_blocks import KINDS, NAMES
from paradraft.formats.pard import declared_mask_id
from paradraft.models.architectures import FAMILIES, head_size, spec_of
from paradraft.sources.gguf_config import ROPE, llama3_factors, settings_of
from paradraft.sources.gguf_model import INNER, names_of, row_order
from paradraft.text.generation_config import end_ids

FILE = "model.gguf"
TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int8": "Q8_0", "int4": "Q4_0"}
"""GGUF types of matrices by `--draft-dtype`."""
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32}
"""Their ids in `general.file_type`."""
_YARN = {"beta_fast": 32, "beta_slow": 1, "truncate": True}
"""YaRN settings that GGUF files do not store, with the values that llama.cpp uses."""


def check_can_write(config: PretrainedConfig, dtype: str, name: str) -> None:
    """Checks that a model can be written, before its weights are loaded.

    Args:
        dtype: of its matrices, one of `TYPES`.

    Raises:
        ValueError: dtype, architecture or YaRN settings are unsupported, or the `gguf` package is not installed.
    """
    check_dtype(dtype)
    check_config(config, name)


def check_dtype(dtype: str) -> None:
    """Raises ValueError if files cannot be written, or not in a dtype."""
    if dtype not in TYPES:
        raise ValueError(f"--draft-dtype {dtype} with --to gguf: use one of {', '.join(TYPES)}")
    _check_package()


def _check_package() -> None:
    if find_spec("gguf") is None:
        raise ValueError("writing GGUF files needs the gguf package: pip install 'paradraft[gguf]'")


def check_config(config: PretrainedConfig, name: str) -> None:
    """Checks that models of a config can be written, and that llama.cpp computes the same as they do.

    Raises:
        ValueError: architecture, activation or rope settings are unsupported, or the `gguf` package is not installed.
    """
    _check_package()
    if spec_of(config).gguf is None:
        written = [family for family, spec in FAMILIES.items() if spec.gguf is not None]
        raise ValueError(
            f"{name!r} is a {config.model_type} model; GGUF files are written of {', '.join(written)} models"
        )
    if config.hidden_act != "silu":
        raise ValueError(f"{name!r}: llama.cpp computes silu, not {config.hidden_act!r}")
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3" and not spec_of(config).has_gguf_pairs:
        raise ValueError(f"{name!r}: llama.cpp reads changed rope frequencies of Llama models only")
    if rope.get("rope_type") == "yarn" and any(
        rope.get(key, value) != value for key, value in (*_YARN.items(), ("attention_factor", None), ("mscale", None))
    ):
        raise ValueError(f"{name!r} has settings of YaRN that GGUF files do not hold")


def write_gguf(
    file: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, *, dtype: str, name: str
) -> None:
    """Writes a model that `check_config` accepts.

    Args:
        model: on the CPU; its config may declare mask tokens, and its generation config names the end tokens.
        tokenizer: None for a file without a vocabulary, for programs that exchange token ids.
        dtype: of the matrices, one of `TYPES`.
        name: for `general.name`.

    Raises:
        ValueError: the tokenizer is of an unsupported kind, or the format has no name for a weight.
    """
    config, arch = model.config, spec_of(model.config).gguf
    assert arch is not None  # checked
    tensors = dict(_tensors(model, name))
    metadata = model_metadata(arch, config, dtype=dtype, name=name)
    if tokenizer is None:
        metadata["tokenizer.ggml.model"] = "none"
    else:
        metadata |= metadata_of(tokenizer, config.vocab_size, name)
        metadata |= end_metadata(model.generation_config, tokenizer.eos_token_id)
        if (mask := declared_mask_id(config)) is not None:
            masks = getattr(config, "pard_masks", 1)
            metadata |= {"tokenizer.ggml.mask_token_id": mask, PARD_TOKEN: mask, PARD_MASKS: masks}
    write_tensors(file, arch, metadata, tensors, dtype=dtype)


def model_metadata(arch: str, config: PretrainedConfig, *, dtype: str, name: str) -> dict[str, Any]:
    """The metadata of a file of an architecture, but its tokenizer; see `write_gguf`."""
    return {
        "general.type": "model", "general.name": name, "general.file_type": _FILE_TYPES[TYPES[dtype]],
        "general.quantization_version": 2, **{f"{arch}.{key}": value for key, value in _settings(config).items()},
    }  # fmt: skip


def write_tensors(
    file: Path, arch: str, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], *, dtype: str
) -> None:
    """Writes a file.

    Args:
        tensors: by their GGUF names; integers stay integers.
        dtype: of the matrices, one of `TYPES`.
    """
    import gguf

    writer = gguf.GGUFWriter(file, arch)
    for key, value in metadata.items():
        _add(writer, key, value)
    for tensor, weight in tensors.items():
        if not weight.is_floating_point():
            writer.add_tensor(tensor, weight.numpy())
            continue
        kind = _kind(weight, dtype)
        writer.add_tensor(tensor, gguf.quants.quantize(weight.float().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, key: str, value: object) -> None:
    """Adds a metadata value with the type that llama.cpp reads."""
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
    settings: dict[str, object] = {**settings_of(config)}
    if rope.get("rope_type") in ("linear", "yarn"):
        settings |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope.get("rope_type") == "yarn":
        settings["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return settings


def end_metadata(generation: GenerationConfig, first: int | None) -> dict[str, int]:
    """The end tokens by metadata key, the tokenizer's own first; the format has keys for three."""
    ends = sorted(end_ids(generation), key=lambda token: (token != first, token))
    return {f"tokenizer.ggml.{key}_token_id": token for key, token in zip(("eos", "eot", "eom"), ends, strict=False)}


def _tensors(model: PreTrainedModel, name: str) -> Iterator[tuple[str, Tensor]]:
    config = model.config
    weights = dict(model.named_parameters())
    if unknown := weights.keys() - {ours for _, ours in names_of(config.num_hidden_layers)}:
        raise ValueError(f"{name!r}: llama.cpp has no weight {min(unknown)!r}")
    size = head_size(config)
    heads = {INNER["attn_q"]: config.num_attention_heads, INNER["attn_k"]: config.num_key_value_heads}
    for theirs, ours in names_of(config.num_hidden_layers):
        if ours not in weights:
            continue
        weight = weights[ours].detach()
        layer = ".".join(ours.split(".")[3:-1])
        if spec_of(config).has_gguf_pairs and layer in heads:
            weight = weight[row_order(heads[layer], size).argsort()]
        yield theirs, weight
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        yield (
            ROPE,
            llama3_factors(size=size, theta=rope["rope_theta"], **{k: v for k, v in rope.items() if k != "rope_theta"}),
        )


def _kind(weight: Tensor, dtype: str) -> Any:
    """The GGUF type of a tensor; a matrix whose rows are no whole blocks becomes BF16 if that is exact, else F32."""
    import gguf

    kinds = {name: type_id for type_id, name in NAMES.items()}
    name = "F32" if weight.ndim == 1 else TYPES[dtype]
    if weight.shape[-1] % KINDS[kinds[name]].weights:
        name = "BF16" if torch.equal(weight.bfloat16().to(weight.dtype), weight) else "F32"
    return gguf.GGMLQuantizationType[name]
