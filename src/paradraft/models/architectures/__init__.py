"""Model families: one `DecoderSpec` each, in the files of this folder.

Whatever depends on the family reads its spec, so a family like Llama is added by one entry or file. A file has `SPECS`,
by the `model_type` of the configs of `transformers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import torch
from transformers import PretrainedConfig

SLIDING = "sliding_attention"
"""The name of sliding-window layers in `layer_types`."""


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """How a family's decoder differs from a plain one, whose cache, masks and output head are those of `CausalLM`.

    Args:
        activation: the setting of the config that names the activation of MLPs.
        logits_scale: the setting by which logits are divided, if any.
        softcap: the setting of the logits' soft cap, if any.
        norm_offset: added to the weights of norms.
        norms: per layer, without those of queries and keys.
        is_fused: whether queries, keys and values have one matrix, and gate and up as well.
        has_experts: whether layers are mixtures of experts.
        has_rope_by_type: whether the rotary embedding depends on a layer's type.
        is_in_cpp: whether the C++ pass computes it; packed folders are read of such families.
        gguf: the architecture of its GGUF files, if any; files are read as the family of that name.
        has_gguf_pairs: whether llama.cpp rotates neighbouring elements of a head, and files have other rows of queries
            and keys.
        allows_vllm_layers: whether the layers of vLLM's EAGLE fit: no embedding multiplier, one rotary embedding.
    """

    activation: str = "hidden_act"
    logits_scale: str | None = None
    softcap: str | None = None
    norm_offset: float = 0.0
    norms: int = 2
    is_fused: bool = False
    has_experts: bool = False
    has_rope_by_type: bool = False
    is_in_cpp: bool = False
    gguf: str | None = None
    has_gguf_pairs: bool = False
    allows_vllm_layers: bool = False


def spec_of(config: PretrainedConfig) -> DecoderSpec:
    """The spec of a supported model."""
    return FAMILIES[config.model_type]


def head_size(config: PretrainedConfig) -> int:
    """The size of an attention head, also where the config has no `head_dim`."""
    size: int | None = getattr(config, "head_dim", None)
    return config.hidden_size // config.num_attention_heads if size is None else size


def context_of(config: PretrainedConfig) -> int:
    """The context length; of a model with sliding windows the size of a window.

    Because within a window every token sees all before it, passes with full attention are exact there.
    """
    most, types = int(config.max_position_embeddings), getattr(config, "layer_types", None)
    window: int | None = getattr(config, "sliding_window", None)
    slides = (types is None or SLIDING in types) and getattr(config, "use_sliding_window", True)
    return min(most, window) if window is not None and slides else most


def experts_settings(dtype: torch.dtype, config: PretrainedConfig) -> dict[str, Any]:
    """Arguments of `from_pretrained` for mixtures of experts: `transformers`' default, grouped products, except where
    torch has none: for float64, and for rows that are no multiple of 16 bytes."""
    if not spec_of(config).has_experts:
        return {}
    sizes = (config.hidden_size, config.moe_intermediate_size)
    is_grouped = dtype != torch.float64 and all(size * dtype.itemsize % 16 == 0 for size in sizes)
    return {} if is_grouped else {"experts_implementation": "eager"}


def ropes_of(config: PretrainedConfig) -> dict[str | None, Mapping[str, Any]]:
    """The rotary embedding's settings by layer type; under the key None if all layers share them."""
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    if not spec_of(config).has_rope_by_type:
        return {None: rope}
    return {layer_type: rope.get(layer_type) or {} for layer_type in sorted(set(config.layer_types))}


def families_in(folders: Iterable[str]) -> dict[str, DecoderSpec]:
    """The specs of all files of this package's `folders`, sorted by `model_type`."""
    modules = [import_module(f"{__name__}.{file.name}") for file in iter_modules(folders)]
    return dict(sorted(entry for module in modules for entry in module.SPECS.items()))


FAMILIES = families_in(__path__)
"""Supported families by `model_type`."""
