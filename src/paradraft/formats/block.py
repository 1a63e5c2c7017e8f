"""Checkpoint of a block drafter: settings, and folders as DFlash publishes them (Chen et al. 2026).

A drafter that was trained here has the format of `paradraft.formats.head`. A published folder has a `config.json` of
Qwen3 with the architecture DFlashDraftModel, and names no weights of a target.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from safetensors.torch import load_file
from transformers import PretrainedConfig

from paradraft.formats.head import CONFIG, WEIGHTS, Head, TargetIdentity, file_of, is_head, read_head, reading

COUNTS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings",
)  # fmt: skip
SIZES = (*COUNTS, "rms_norm_eps", "rope_parameters")
"""Entries of the config that are sizes of its layers, by their names in `transformers`."""
MOST_K, MOST_LAYERS = 255, 64
"""Larger numbers in a config are damage."""
PUBLISHED = "DFlashDraftModel"
OTHERS = {"DFlash2DraftModel": "DFlash 2", "Qwen3DSparkModel": "DSpark"}
"""Architectures whose blocks have a head that is not read yet."""


@dataclass(frozen=True, kw_only=True)
class BlockSettings:
    """The settings of a block drafter.

    Args:
        sizes: of its layers, see `SIZES`.
        layers: their number.
        target_layers: the target's layers whose states are read, numbered as in `Forward`.
        mask_token_id: the token of the target whose embedding the masks have.
        k: tokens of a draft in training.
        causal: whether a token of a block sees only those before it; else all.
        anchor_first: whether the anchor drafts the first token, so that K tokens need K - 1 masks; else K masks draft.
    """

    sizes: dict[str, Any]
    layers: int
    target_layers: tuple[int, ...]
    mask_token_id: int
    k: int
    causal: bool
    anchor_first: bool

    @property
    def width(self) -> int:
        """D."""
        return int(self.sizes["hidden_size"])

    @property
    def first(self) -> int:
        """Place in the block of what drafts the first token."""
        return 0 if self.anchor_first else 1

    @classmethod
    def of(cls, head: Head) -> BlockSettings:
        """The settings of a checkpoint; raises ValueError if one is missing or wrong."""

        def checked(key: str, is_right: Callable[[Any], bool]) -> Any:
            if not is_right(value := head.config.get(key)):
                raise ValueError(f"draft {head.name!r}: {key} in its config.json is {value!r}: train it again")
            return value

        sizes: dict[str, Any] = {name: head.setting(name, int) for name in COUNTS}
        checked("head_dim", lambda size: size % 2 == 0)
        checked("num_attention_heads", lambda heads: heads % sizes["num_key_value_heads"] == 0)
        sizes["rms_norm_eps"] = checked("rms_norm_eps", lambda eps: type(eps) is float and 0 < eps < 1)
        sizes["rope_parameters"] = checked("rope_parameters", _is_unscaled)
        return cls(
            sizes=sizes,
            layers=checked("num_hidden_layers", lambda count: type(count) is int and 1 <= count <= MOST_LAYERS),
            target_layers=tuple(checked("target_layers", _are_layers)),
            mask_token_id=checked("mask_token_id", lambda mask: type(mask) is int and mask >= 0),
            k=checked("k", lambda k: type(k) is int and 1 <= k <= MOST_K),
            causal=head.setting("causal", bool),
            anchor_first=head.setting("anchor_first", bool),
        )

    def entries(self) -> dict[str, Any]:
        """Entries of a checkpoint's config."""
        return self.sizes | {
            "num_hidden_layers": self.layers,
            "target_layers": list(self.target_layers),
            "mask_token_id": self.mask_token_id,
            "k": self.k,
            "causal": self.causal,
            "anchor_first": self.anchor_first,
        }


def _is_unscaled(rope: Any) -> bool:
    """Whether angles are proportional to positions: other kinds are not computed."""
    if not isinstance(rope, dict) or rope.get("rope_type", "default") != "default":
        return False
    return isinstance(theta := rope.get("rope_theta"), int | float) and theta > 1


def _are_layers(layers: Any) -> bool:
    is_list = isinstance(layers, list) and len(layers) > 0
    return is_list and all(type(layer) is int and layer >= -1 for layer in layers)


def is_published_block(config: PretrainedConfig) -> bool:
    """Whether a folder's config is of DFlash or a relative; such a folder looks like a small Qwen3."""
    architectures = config.architectures
    return isinstance(architectures, list) and any(each in (PUBLISHED, *OTHERS) for each in architectures)


def published_k(config: PretrainedConfig) -> int | None:
    """Most tokens of the drafts of a published folder; None for others, and if any number is."""
    size, own = getattr(config, "block_size", None), getattr(config, "dflash_config", None)
    is_causal = isinstance(own, dict) and own.get("causal") is True
    return size - 1 if is_published_block(config) and type(size) is int and size > 1 and not is_causal else None


def read_block(name: str, kind: str, config: PretrainedConfig) -> Head:
    """Reads a checkpoint that was trained here or published; raises ValueError as `read_head`.

    Args:
        name: a folder, or a Hugging Face id.
        kind: the drafter's name.
        config: the target's.
    """
    if is_head(name):
        return read_head(name, kind, config)
    with reading(name, kind):
        published = json.loads(file_of(name, CONFIG).read_bytes())
        entries = _entries(name, published)
        identity = TargetIdentity(
            hidden_size=published.get("hidden_size"),
            num_hidden_layers=published.get("num_target_layers", config.num_hidden_layers),
            vocab_size=published.get("vocab_size", config.vocab_size),
            weights=None,
        )
        identity.check(TargetIdentity.of(config, reads_weights=False), name)
        return Head(config=entries, target=identity, weights=load_file(file_of(name, WEIGHTS)), name=name)


def _entries(name: str, published: Any) -> dict[str, Any]:
    """The entries of `BlockSettings` in a published config."""
    if not isinstance(published, dict):
        raise TypeError("its config.json is no config of a drafter")
    architectures, own = published.get("architectures"), published.get("dflash_config")
    for other in OTHERS:
        if architectures == [other]:
            raise ValueError(f"draft {name!r} is of {OTHERS[other]}, whose head is not read: use one of DFlash")
    if architectures != [PUBLISHED] or not isinstance(own, dict):
        raise ValueError(f"draft {name!r} has the architectures {architectures!r}: use one of {PUBLISHED}")
    windows = (
        own.get("use_swa"),
        published.get("use_sliding_window"),
        "sliding_attention" in str(published.get("layer_types")),
    )
    if any(windows):
        raise ValueError(f"draft {name!r} has layers with a sliding window, which passes do not compute: use another")
    if published.get("attention_bias") or published.get("hidden_act", "silu") != "silu":
        raise ValueError(f"draft {name!r} has layers with biases or another activation than silu: use another")
    layers, size = own.get("target_layer_ids"), published.get("block_size")
    if not isinstance(layers, list) or any(type(layer) is not int or layer < 0 for layer in layers):
        raise ValueError(f"draft {name!r}: target_layer_ids in its config.json is {layers!r}: use another")
    scaling = published.get("rope_scaling") or {"rope_type": "default"}
    rope = published.get("rope_parameters") or scaling | {"rope_theta": published.get("rope_theta", 10000.0)}
    return {key: published.get(key) for key in SIZES} | {
        "model_type": "dflash",
        "rope_parameters": rope,
        "num_hidden_layers": published.get("num_hidden_layers"),
        "target_layers": [layer + 1 for layer in layers],  # its ids are of outputs, from 0 on
        "mask_token_id": own.get("mask_token_id"),
        "k": size - 1 if type(size) is int else size,
        "causal": own.get("causal", False),
        "anchor_first": False,
    }
