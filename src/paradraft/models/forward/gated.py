"""Low-rank changes of a model's attention that only some added ids see: gated LoRA.

The projections of a row whose id is one of these add `up (down x)` to what they make of x. All other rows are computed
as without the change, to the last bit, so a frozen model can have rows that were trained for another purpose in the
pass that reads its text (Uno; FlexDraft trains attention alone, too).

Shape letters: L layers, R rank, D hidden size, Q outputs of the projections of queries, keys and values, H inputs of
the output projection, B rows of a batch, N tokens of a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.hooks import RemovableHandle
from transformers import PretrainedConfig, PreTrainedModel

from paradraft.models.architectures import head_size

DOWN, UP = 2.0**-5, 2.0**-3
"""Factors of trained tensors: their entries are then about as large as those of embeddings, and learn at one rate."""
Projected = Callable[[int, str, Tensor, Tensor], Tensor]
"""What a projection returns, from the index of its layer, its name, its inputs and its outputs."""


@dataclass(frozen=True, kw_only=True)
class GatedChange:
    """A change of all layers.

    Args:
        qkv_down: `[L, R, D]` for queries, keys and values together.
        qkv_up: `[L, Q, R]`, those of the queries first, then keys and values.
        output_down: `[L, R, H]` for the output projection.
        output_up: `[L, D, R]`.
    """

    qkv_down: Tensor
    qkv_up: Tensor
    output_down: Tensor
    output_up: Tensor

    @classmethod
    def of(cls, trained: Mapping[str, Tensor]) -> GatedChange:
        """From trained tensors, by name."""
        return cls(**{name: weight * (DOWN if name.endswith("down") else UP) for name, weight in trained.items()})

    def on(self, device: torch.device, dtype: torch.dtype) -> GatedChange:
        """On another device, in another dtype."""
        return GatedChange(**{name: weight.detach().to(device, dtype) for name, weight in vars(self).items()})

    def added(self, config: PretrainedConfig, layer: int, name: str, inputs: Tensor) -> Tensor:
        """What a projection of a layer adds."""
        if name == "o_proj":
            down, up = self.output_down[layer], self.output_up[layer]
        else:
            down, up = self.qkv_down[layer], self.qkv_up[layer].split(outputs_of(config))[QKV.index(name)]
        return linear(linear(inputs, down.to(inputs.dtype)), up.to(inputs.dtype))


QKV = ("q_proj", "k_proj", "v_proj")


def outputs_of(config: PretrainedConfig) -> tuple[int, int, int]:
    """Outputs of the projections of queries, keys and values."""
    size = head_size(config)
    return config.num_attention_heads * size, *[config.num_key_value_heads * size] * 2


def shapes_of(config: PretrainedConfig, rank: int) -> dict[str, tuple[int, int, int]]:
    """The shapes of a change's tensors, by name."""
    layers, width, queries = config.num_hidden_layers, config.hidden_size, outputs_of(config)
    return {
        "qkv_down": (layers, rank, width),
        "qkv_up": (layers, sum(queries), rank),
        "output_down": (layers, rank, queries[0]),
        "output_up": (layers, width, rank),
    }


def hook_projections(model: PreTrainedModel, projected: Projected) -> list[RemovableHandle]:
    """Lets a function replace the outputs of all attention projections in a model's own code.

    Raises:
        ValueError: the layers have other projections.
    """
    handles = []
    for layer, module in enumerate(model.model.layers):
        for name in (*QKV, "o_proj"):
            projection = getattr(module.self_attn, name, None)
            if not isinstance(projection, nn.Module):
                raise ValueError(f"the attention of {model.config.model_type} models has no {name} that could change")

            def hook(_: nn.Module, inputs: Any, outputs: Tensor, *, layer: int = layer, name: str = name) -> Tensor:
                return projected(layer, name, inputs[0], outputs)

            handles.append(projection.register_forward_hook(hook))
    return handles


class GatedProjections:
    """Changes in passes of a model's own code.

    Args:
        changes: each with the ids that see it.
    """

    def __init__(self, model: PreTrainedModel, changes: Sequence[tuple[range, GatedChange]]) -> None:
        self._config = model.config
        self._changes = [(ids, change.on(model.device, model.dtype)) for ids, change in changes]
        self._sees: list[Tensor] = []
        self._handles = hook_projections(model, self._projected)

    def concern(self, tokens_BN: Tensor) -> bool:
        """Whether a pass reads ids that see a change."""
        return bool((tokens_BN >= min(ids.start for ids, _ in self._changes)).any())

    def read(self, tokens_BN: Tensor | None) -> None:
        """Sets the ids of the pass that begins; None ends it."""
        self._sees = []
        if tokens_BN is not None:
            self._sees = [((tokens_BN >= ids.start) & (tokens_BN < ids.stop))[:, :, None] for ids, _ in self._changes]

    def _projected(self, layer: int, name: str, inputs: Tensor, outputs: Tensor) -> Tensor:
        for sees_BN1, (_, change) in zip(self._sees, self._changes, strict=False):
            outputs = torch.where(sees_BN1, outputs + change.added(self._config, layer, name, inputs), outputs)
        return outputs

    def remove(self) -> None:
        """Lets the projections be as they were."""
        for handle in self._handles:
            handle.remove()
