"""Settings of a block drafter, in a checkpoint of the format of `paradraft.formats.head`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paradraft.formats.head import Head

COUNTS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings",
)  # fmt: skip
SIZES = (*COUNTS, "rms_norm_eps", "rope_parameters")
"""Entries of the config that are sizes of its layers, by their names in `transformers`."""
MOST_K, MOST_LAYERS = 255, 64
"""Larger numbers in a config are damage."""
OWN_EMBEDDING, OWN_HEAD = "embed_tokens.weight", "output_head.weight"
"""Names of an embedding `[V, D]` and an output head `[U, D]` in place of the target's, which other trainers store."""


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
