"""Sources of a new draft's weights: pruned target, random initialization, or pretrained sibling."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

from paradraft.formats.pard import CONFIG_KEYS
from paradraft.models.architectures import spec_of


@dataclass(frozen=True, kw_only=True)
class PrunedTarget:
    """Some of the target's layers, with its embedding and head.

    Args:
        layers: count of layers, evenly spaced, including the first and the last; None for a quarter.
        every: keep every n-th layer instead, from the first on, and the last.
        intermediate_size: MLP neurons to keep per layer, those with the largest weights; None keeps all.

    Raises:
        ValueError: both `layers` and `every` are given, or a value is less than 1.
    """

    layers: int | None = None
    every: int | None = None
    intermediate_size: int | None = None

    def __post_init__(self) -> None:
        if self.layers is not None and self.every is not None:
            raise ValueError("give either layers or every")
        for name in ("layers", "every", "intermediate_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value}: use at least 1")

    def of(self, target_layers: int) -> tuple[int, ...]:
        """Indices of the layers to keep of a target with `target_layers` layers.

        Raises:
            ValueError: the target has too few layers.

        Example:
            >>> PrunedTarget(layers=4).of(8), PrunedTarget(every=3).of(8), PrunedTarget().of(28)
            ((0, 2, 5, 7), (0, 3, 6, 7), (0, 5, 9, 14, 18, 23, 27))
        """
        if self.every is not None:
            if self.every > target_layers:
                raise ValueError(f"every={self.every}: the target has {target_layers} layers, use at most that")
            return tuple(sorted({*range(0, target_layers, self.every), target_layers - 1}))
        wanted = -(-target_layers // 4) if self.layers is None else self.layers
        if wanted > target_layers:
            raise ValueError(f"layers={wanted}: the target has {target_layers}, keep at most that many")
        gaps = max(wanted - 1, 1)
        return tuple((index * (target_layers - 1) + gaps // 2) // gaps for index in range(wanted))

    def check_narrower(self, target: PretrainedConfig) -> None:
        """Raises ValueError if the target's MLPs have fewer neurons than are to be kept, or not three matrices."""
        size, spec = target.intermediate_size, spec_of(target)
        if self.intermediate_size is not None and (spec.is_fused or spec.has_experts):
            raise ValueError(
                f"intermediate_size={self.intermediate_size}: the MLPs of {target.model_type} models cannot be cut: "
                "leave it out"
            )
        if self.intermediate_size is not None and self.intermediate_size > size:
            raise ValueError(
                f"intermediate_size={self.intermediate_size}: the target's layers have {size}, keep at most that many"
            )


@dataclass(frozen=True, kw_only=True)
class RandomInit:
    """A small model of the target's architecture with random weights and tied embeddings.

    Args:
        layers: at least 1. Parallel drafts want many narrow layers rather than few wide ones.
        intermediate_size: of the MLPs; by default 8/3 of the hidden size, rounded up to a multiple of 64.
        heads: attention heads; the hidden size is an even multiple of their count.

    Raises:
        ValueError: a size is less than 1, or the heads do not divide the hidden size.
    """

    layers: int = 6
    hidden_size: int = 256
    intermediate_size: int | None = None
    heads: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden_size", "intermediate_size", "heads"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value}: use at least 1")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed}: use a number from 0 to 2**63 - 1")
        if self.hidden_size % (2 * self.heads):
            nearest = -(-self.hidden_size // (2 * self.heads)) * 2 * self.heads
            raise ValueError(
                f"heads={self.heads} do not divide hidden_size={self.hidden_size} into even parts, "
                f"which rotary positions need: use hidden_size={nearest}, or other heads"
            )

    @property
    def width(self) -> int:
        """Intermediate size of the MLPs."""
        return self.intermediate_size or -(-self.hidden_size * 8 // (3 * 64)) * 64

    def check_smaller(self, target: PretrainedConfig, parameters: int) -> None:
        """Raises ValueError, before memory is allocated, if the draft would exceed the target's `parameters`."""
        per_layer = (4 * self.hidden_size + 3 * self.width) * self.hidden_size
        if self.layers * per_layer + target.vocab_size * self.hidden_size > parameters:
            raise ValueError(
                f"layers={self.layers}, hidden_size={self.hidden_size}: the draft would be larger than the target "
                f"with its {parameters:,} parameters, choose smaller sizes"
            )

    def config(self, target: PretrainedConfig) -> PretrainedConfig:
        """Returns the target's config with these sizes; vocabulary, positions and special ids stay."""
        settings = target.to_dict()
        for key in (*CONFIG_KEYS, "layer_types", "quantization_config", "max_window_layers"):
            settings.pop(key, None)
        settings |= {
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.width,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "head_dim": self.hidden_size // self.heads,
            "tie_word_embeddings": True,
        }
        if spec_of(target).has_rope_by_type:
            settings["layer_types"] = ["full_attention"] * self.layers
        if spec_of(target).has_experts:
            settings["mlp_only_layers"] = list(range(self.layers))  # a small draft has no experts
        return type(target).from_dict(settings)


@dataclass(frozen=True, kw_only=True)
class PretrainedSibling:
    """A small model of the target's family whose embedding size differs."""

    name: str


InitFrom = PrunedTarget | RandomInit | PretrainedSibling
"""Source of a new draft's weights."""
