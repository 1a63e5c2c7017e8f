"""Checks a model's config before its weights are loaded: family, sizes, layer types and rotary embedding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from paradraft.models.architectures import FAMILIES, SLIDING, head_size, ropes_of, spec_of

STATIC_ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles depend on a token's position alone.

Those of "dynamic" and "longrope" depend also on the length of the text that a pass reads. Cached keys would have to be
rotated again, so the text would depend on how it was cut into passes: on the drafter, the batch and the prefill
chunks."""
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
"""Settings of every supported architecture that are positive integers."""
MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
"""Settings of some architectures that are positive."""
EXPERT_SIZES = ("moe_intermediate_size", "num_experts", "num_experts_per_tok", "decoder_sparse_step")
"""Further settings of mixtures of experts that are positive integers."""


def check_architecture(config: PretrainedConfig, name: str) -> None:
    """Raises ValueError for an unsupported architecture, layer type or rotary embedding, and for settings that make no
    sense."""
    if config.model_type not in FAMILIES:
        raise ValueError(f"{name!r} is a {config.model_type} model; supported architectures are {', '.join(FAMILIES)}")
    _check_layers(config, name)
    _check_sizes(config, name)
    for layer_type, rope in ropes_of(config).items():
        _check_rope(rope, config, name, layer_type)


def check_capacity(capacity: int | None, most: int) -> None:
    """Raises ValueError unless the capacity of a row is from 1 to `most` tokens, or None for `most`."""
    if capacity is not None and not 1 <= capacity <= most:
        raise ValueError(f"capacity={capacity}: this model has room for 1 to {most} tokens")


def _check_layers(config: PretrainedConfig, name: str) -> None:
    layer_types, window = set(getattr(config, "layer_types", None) or ()), getattr(config, "sliding_window", None)
    if (window is None and SLIDING in layer_types) or not (window is None or (type(window) is int and window > 0)):
        raise ValueError(f"{name!r} has sliding-window layers, but its config.json has sliding_window={window!r}")
    layer_types -= {"full_attention", SLIDING}
    if layer_types:
        raise ValueError(
            f"{name!r} has layers of the type {min(layer_types)!r}, which are not supported: use a full-attention model"
        )
    if getattr(config, "is_heterogeneous", False):
        raise ValueError(f"{name!r} has layers of different sizes (per_layer_config), which are not supported")
    if getattr(config, "use_bidirectional_attention", False):
        raise ValueError(f"{name!r} lets tokens see later ones (use_bidirectional_attention): it writes no texts")


def _check_sizes(config: PretrainedConfig, name: str) -> None:
    for setting in (*SIZES, *(EXPERT_SIZES if spec_of(config).has_experts else ())):
        value = getattr(config, setting)
        if type(value) is not int or value < 1:
            raise ValueError(
                f"{name!r}: {setting} is {value!r} in its config.json, where a number of at least 1 belongs"
            )
    if spec_of(config).has_experts and config.num_experts_per_tok > config.num_experts:
        raise ValueError(
            f"{name!r}: num_experts_per_tok is {config.num_experts_per_tok} in its config.json, of {config.num_experts}"
        )
    for setting in MULTIPLIERS:
        if not 0 < (value := getattr(config, setting, 1.0)) < math.inf:
            raise ValueError(f"{name!r}: {setting} is {value!r} in its config.json, where a number above 0 belongs")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise ValueError(
            f"{name!r}: num_attention_heads is {heads} in its config.json, "
            f"which cannot be shared evenly by num_key_value_heads={kv_heads}"
        )
    size = head_size(config)
    if type(size) is not int or size < 2 or size % 2:
        raise ValueError(f"{name!r}: heads of {size!r} numbers cannot be rotated: head_dim must be even and above 0")
    act = spec_of(config).activation
    if (activation := getattr(config, act)) not in ACT2FN:
        raise ValueError(f"{name!r}: transformers knows no activation {act}={activation!r}")
    if not 0 <= config.rms_norm_eps < math.inf:
        raise ValueError(
            f"{name!r}: rms_norm_eps is {config.rms_norm_eps!r}, where a small number of at least 0 belongs"
        )


def _check_rope(rope: Mapping[str, Any], config: PretrainedConfig, name: str, layer_type: str | None) -> None:
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(
            f"{name!r} has rope settings for each type of layer, which is not supported: use a model whose layers have "
            "the same"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in STATIC_ROPES:
        raise ValueError(
            f"{name!r} has a rotary embedding of the type {kind!r}, which is not supported: use a model whose "
            f"rope_type is one of {', '.join(STATIC_ROPES)}"
        )
    theta = rope.get("rope_theta", 1.0)
    if type(theta) not in (int, float) or not 0 < theta < math.inf:
        raise ValueError(f"{name!r}: rope_theta is {theta!r} in its config.json, where a number above 0 belongs")
    if kind != "default":
        _check_angles(config, kind, name, layer_type)


def _check_angles(config: PretrainedConfig, kind: str, name: str, layer_type: str | None) -> None:
    """Raises ValueError unless `transformers` computes finite angles, as many as a head needs."""
    try:
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), layer_type=layer_type)
        is_right = bool(frequencies.isfinite().all()) and math.isfinite(scale)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"{name!r}: its {kind!r} rope settings cannot be computed ({problem})") from None
    if not is_right or 2 * len(frequencies) != head_size(config):
        raise ValueError(
            f"{name!r}: its {kind!r} rope settings do not give finite angles for heads of {head_size(config)} numbers"
        )
