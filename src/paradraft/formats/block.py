"""Checkpoint of a block drafter: settings, and folders as DFlash publishes them (Chen et al. 2026).

A drafter that was trained here has the format of `paradraft.formats.head`. A published folder has a `config.json` of
Qwen3 with the architecture DFlashDraftModel, and names no weights of a target.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from safetensors.torch import load_file
from transformers import PretrainedConfig

from paradraft.formats.head import CONFIG, WEIGHTS, Head, TargetIdentity, file_of, is_head, read_head, reading

SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "max_position_embeddings", "rms_norm_eps", "rope_parameters",
)  # fmt: skip
"""Entries of the config that are sizes of its layers, by their names in `transformers`."""
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
        layers, mask = head.config.get("target_layers"), head.config.get("mask_token_id")
        if not isinstance(layers, list) or not layers or any(type(layer) is not int for layer in layers):
            raise ValueError(f"draft {head.name!r}: target_layers in its config.json is {layers!r}: train it again")
        if type(mask) is not int or mask < 0:
            raise ValueError(f"draft {head.name!r}: mask_token_id in its config.json is {mask!r}: train it again")
        return cls(
            sizes={name: head.config[name] for name in SIZES if name in head.config},
            layers=head.setting("num_hidden_layers", int),
            target_layers=tuple(layers),
            mask_token_id=mask,
            k=head.setting("k", int),
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


def is_published_block(config: PretrainedConfig) -> bool:
    """Whether a folder's config is of DFlash or a relative; such a folder looks like a small Qwen3."""
    return bool({PUBLISHED, *OTHERS} & set(config.architectures or ()))


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
            hidden_size=published["hidden_size"],
            num_hidden_layers=published.get("num_target_layers", config.num_hidden_layers),
            vocab_size=published["vocab_size"],
            weights=None,
        )
        identity.check(TargetIdentity.of(config, reads_weights=False), name)
        return Head(config=entries, target=identity, weights=load_file(file_of(name, WEIGHTS)), name=name)


def _entries(name: str, published: Any) -> dict[str, Any]:
    """The entries of `BlockSettings` in a published config."""
    if not isinstance(published, dict):
        raise TypeError("its config.json is no config of a drafter")
    (architecture,) = published.get("architectures") or [None]
    if architecture in OTHERS:
        raise ValueError(f"draft {name!r} is of {OTHERS[architecture]}, whose head is not read: use one of DFlash")
    own = published.get("dflash_config")
    if architecture != PUBLISHED or not isinstance(own, dict):
        raise ValueError(f"draft {name!r} has the architecture {architecture!r}: use one of {PUBLISHED}")
    if own.get("use_swa") or "sliding_attention" in (published.get("layer_types") or []):
        raise ValueError(f"draft {name!r} has layers with a sliding window, which passes do not compute: use another")
    sizes = {key: published[key] for key in SIZES if key in published}
    if "rope_parameters" not in sizes:
        scaling = published.get("rope_scaling") or {"rope_type": "default"}
        sizes["rope_parameters"] = scaling | {"rope_theta": published.get("rope_theta", 10000.0)}
    layers = own.get("target_layer_ids", [])
    return sizes | {
        "model_type": "dflash",
        "num_hidden_layers": published.get("num_hidden_layers"),
        "target_layers": [layer + 1 for layer in layers],  # its ids are of outputs, from 0 on
        "mask_token_id": own.get("mask_token_id"),
        "k": published.get("block_size", 0) - 1,
        "causal": bool(own.get("causal", False)),
        "anchor_first": False,
    }
