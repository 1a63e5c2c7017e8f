"""A gated change of a frozen model's attention in training; see `paradraft.models.forward.gated`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paradraft.models.forward.gated import GatedChange, hook_projections, shapes_of


class TrainedChange(nn.ParameterDict):
    """The tensors of a change, in training, which begins as no change.

    Args:
        rank: R.
    """

    def __init__(self, model: PreTrainedModel, rank: int, generator: torch.Generator) -> None:
        shapes = shapes_of(model.config, rank).items()
        downs = {name: torch.randn(shape, generator=generator) for name, shape in shapes if name.endswith("down")}
        ups = {name: torch.zeros(shape) for name, shape in shapes if name.endswith("up")}
        super().__init__({name: nn.Parameter(each) for name, each in (downs | ups).items()})
        self._is_on, self._config = False, model.config
        hook_projections(model, self._projected)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Changes all rows of the passes inside."""
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def _projected(self, layer: int, name: str, inputs: Tensor, outputs: Tensor) -> Tensor:
        if not self._is_on:
            return outputs
        of_layer = {each: weight[layer : layer + 1] for each, weight in self.items()}
        return outputs + GatedChange.of(of_layer).added(self._config, 0, name, inputs)
