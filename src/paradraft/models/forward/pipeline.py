"""Pipeline parallelism: forward pass of a model whose layers are split over several devices.

Each stage is a causal LM of some of the layers: the first one reads the embeddings, the others read the states of the
previous stage, and the last one has the output head. So every implementation of `Forward` can compute a stage. There is
one pass at a time: a device is idle while the others compute.

Shape letters as in the package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paradraft.models.forward import FINAL_NORM, Forward, ForwardOut
from paradraft.models.forward.eager import part_of
from paradraft.models.forward.gated import GatedChange
from paradraft.models.kv_cache import Storage
from paradraft.placement import Stage, on_cpus

FEW_ROWS = 64
"""Rows of an embedding or an output head that a stage does not need."""


@dataclass(frozen=True, kw_only=True)
class StageModel:
    """One stage of a model, on its device.

    Args:
        stage: its device and CPUs.
        model: a causal LM of its layers alone.
        first: index of its first layer in the whole model, from 0.
    """

    stage: Stage
    model: PreTrainedModel
    first: int

    @property
    def layers(self) -> int:
        """Number of its layers."""
        return len(self.model.model.layers)


def split(model: PreTrainedModel, stages: Sequence[Stage]) -> list[StageModel]:
    """Splits the layers of a model into stages and moves them to their devices; earlier ones may have a layer more.

    The model itself cannot compute with a cache any more, because layer indices are those within their stage. Raises
    ValueError if there are more stages than layers.
    """
    whole, parts = model.model, len(stages)
    if parts > (layers := len(whole.layers)):
        raise ValueError(f"{parts} stages, and {model.config.name_or_path!r} has {layers} layers: use fewer stages")
    bounds = [-(-layers * index // parts) for index in range(parts + 1)]
    stage_models = [
        StageModel(
            stage=stage, model=_part(model, first, stop, torch.empty(0, device=stage.device).device), first=first
        )
        for stage, (first, stop) in zip(stages, pairwise(bounds), strict=True)
    ]
    whole.embed_tokens, last = stage_models[0].model.model.embed_tokens, stage_models[-1].model
    whole.norm, model.lm_head = last.model.norm, last.lm_head
    return stage_models


def _part(model: PreTrainedModel, first: int, stop: int, device: torch.device) -> PreTrainedModel:
    """A causal LM of layers `first` to `stop`, which shares their weights."""
    whole, part = model.model, part_of(model, first, stop)
    body = part.model
    if first and getattr(body, "embedding_multiplier", None) is not None:
        body.embedding_multiplier = 1.0  # it reads states, which Granite does not multiply
    body.layers = body.layers.to(device)
    for index, layer in enumerate(body.layers):
        layer.self_attn.layer_idx = index
    body.embed_tokens = _moved(whole.embed_tokens if first == 0 else _few_rows(whole.embed_tokens), device)
    part.lm_head = _moved(model.lm_head if stop == len(whole.layers) else _few_rows(model.lm_head), device)
    body.norm, body.rotary_emb = _moved(whole.norm, device), _moved(whole.rotary_emb, device)
    return part.eval()


def _moved(module: nn.Module, device: torch.device) -> nn.Module:
    """A module on a device; copied if it is elsewhere, because other stages and tied weights need the original."""
    is_on_device = all(each.device == device for each in (*module.parameters(), *module.buffers()))
    return module if is_on_device else deepcopy(module).to(device)


@torch.no_grad()
def _few_rows(module: nn.Module) -> nn.Module:
    """A copy of an embedding or an output head with its first rows alone."""
    cut = copy(module)
    cut._parameters = {
        name: None if each is None else nn.Parameter(each[:FEW_ROWS].clone(), requires_grad=False)
        for name, each in module._parameters.items()
    }
    return cut


class PipelinePass:
    """Computes the stages of a model in order; `forward_of` makes the forward pass of a stage."""

    def __init__(self, parts: Sequence[StageModel], forward_of: Callable[[PreTrainedModel], Forward]) -> None:
        self._parts = list(parts)
        self._forwards: list[Forward] = []
        for part in parts:
            with on_cpus(part.stage.cpus):
                self._forwards.append(forward_of(part.model))
        self.min_rows = max(forward.min_rows for forward in self._forwards)
        self.warm_up_rounds = max(forward.warm_up_rounds for forward in self._forwards)
        self.is_native = all(forward.is_native for forward in self._forwards)
        self.threads = max(forward.threads for forward in self._forwards)
        self._last = self._forwards[-1]
        self._storage: Storage = []
        self._storages: list[Storage] = []

    def __call__(
        self,
        storage: Storage,
        lengths: list[int],
        tokens_BN: Tensor,
        parents_BN: Tensor,
        *,
        logit_rows: Tensor,
        hidden_layers: Sequence[int] = (),
        vectors: Tensor | None = None,
    ) -> ForwardOut:
        """See `Forward`; results are on the device of the last stage."""
        if storage is not self._storage:
            self._storage = storage
            self._storages = [storage[part.first : part.first + part.layers] for part in self._parts]
        hidden: dict[int, Tensor] = {}
        for part, forward, stored in zip(self._parts, self._forwards, self._storages, strict=True):
            device, is_last = part.model.device, forward is self._last
            requested = [layer for layer in hidden_layers if self._stage_of(layer) is part]
            own = [layer if layer == FINAL_NORM else layer - part.first for layer in requested]
            handed_on = [] if is_last or part.layers in own else [part.layers]
            # A later stage has few rows of the embedding, and reads none.
            ids_BN = tokens_BN if vectors is None else tokens_BN.clamp(max=0)
            with on_cpus(part.stage.cpus):
                out = forward(
                    stored,
                    lengths,
                    ids_BN.to(device),
                    parents_BN.to(device),
                    logit_rows=logit_rows.to(device),
                    hidden_layers=[*own, *handed_on],
                    vectors=None if vectors is None else vectors.to(device),
                )
            hidden |= {layer: out.hidden[index] for layer, index in zip(requested, own, strict=True)}
            vectors = None if is_last else out.hidden[part.layers]
        last_device = out.logits.device
        hidden = {layer: states.to(last_device, out.logits.dtype) for layer, states in hidden.items()}
        return ForwardOut(logits=out.logits, hidden=hidden)

    def _stage_of(self, layer: int) -> StageModel:
        """The stage of a layer, numbered as in `Forward`: the embeddings are on the first."""
        if layer == FINAL_NORM:
            return self._parts[-1]
        return next(part for part in self._parts if layer <= part.first + part.layers)

    def add_embeddings(self, rows_PD: Tensor, changes: Sequence[tuple[range, GatedChange]] = ()) -> None:
        """See `Forward`; the first stage reads them. Raises ValueError if attention would differ."""
        if changes:
            raise ValueError("a target in stages cannot change attention for prompt tokens: leave its stages out")
        self._forwards[0].add_embeddings(rows_PD)

    def head(self, states: Tensor) -> Tensor:
        """See `Forward`; the last stage has it."""
        with on_cpus(self._parts[-1].stage.cpus):
            return self._last.head(states)

    def linear(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """See `Forward`; on the last stage."""
        return self._last.linear(weight, bias)

    def weight_bytes(self, weight: Tensor) -> int:
        """See `Forward`."""
        return self._last.weight_bytes(weight)

    def first(self, layers: int) -> Forward:
        """See `Forward`; refused, because these layers and the output head are on different stages."""
        raise ValueError(
            f"{len(self._parts)} pipeline stages: the target's first layers cannot draft by themselves there, because "
            "the output head is on the last stage: use one device, or another drafter"
        )

    def forget(self) -> None:
        """See `Forward`."""
        self._storage, self._storages = [], []
        for forward in self._forwards:
            forward.forget()
