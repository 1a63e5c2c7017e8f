"""PARD-2 training: PARD whose inputs also have the target's states (An et al. 2026); see `paradraft.drafters.pard2`.

The projection W of the states begins with zeros, or as it is in the model's folder, so a run that begins with a PARD
drafter begins with its drafts. Some samples are trained without states (`state_dropout`), so that the result serves
without them too.

Shape letters as in `heads.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from transformers import PretrainedConfig

from paradraft.data.samples import Sample
from paradraft.drafters.pard2 import target_layer
from paradraft.formats.pard2 import SCALE, WEIGHT, StateProjection, read_projection, reads_states
from paradraft.models.forward import FINAL_NORM
from paradraft.sources.loading import load_config
from paradraft.train.drafters.heads import states_before
from paradraft.train.drafters.kept_states import features_of
from paradraft.train.drafters.pard import PardTrainee, Prepared, objective_of, prepared
from paradraft.train.drafters.pard_recipe import PardRecipe
from paradraft.train.objectives.batch import TrainingBatch
from paradraft.train.objectives.teacher_loading import teacher_folder
from paradraft.train.trainee import RunData

APART = 8
"""Layers from one to the next whose states are read by default, from the last one down, as in AMD's recipes."""
MOST_LAYERS = 4
ADDED = "added."
"""Prefix of the projection's names in checkpoints."""


class Pard2Recipe(PardRecipe):
    """Settings of `paradraft train pard2`."""

    ROLES: ClassVar[dict[str, str]] = {"model": "pard", "teacher": "target", "target": "target"}

    teacher: str = Field(description="the target whose states are read, and whose probabilities are learnt")
    k: int = Field(default=8, ge=2, description="tokens that one draft pass learns to predict")
    weighting: str = Field(default="chain", description=PardRecipe.model_fields["weighting"].description)
    target_layers: list[int] | None = Field(
        default=None,
        min_length=1,
        description="teacher layers whose states are read: 0 for the embeddings, i after the i-th layer, -1 after the "
        "final norm; by default the last one and up to three more, 8 layers apart",
    )
    state_scale: float = Field(
        default=SCALE, gt=0, description="factor on what is added to the embeddings; that of a model with states stays"
    )
    state_dropout: float = Field(
        default=0.1, ge=0, le=1, description="share of samples that are trained without states"
    )

    @model_validator(mode="after")
    def _check_states(self) -> Self:
        if self.lora is not None:
            raise ValueError("lora: the adapters of a draft that reads states are not stored, leave it out")
        return self

    @property
    def uses_teacher(self) -> bool:
        """See `PardRecipe`: its states are read."""
        return True

    def layers_of(self, config: PretrainedConfig) -> list[int]:
        """The teacher's layers whose states are read; raises ValueError if it has not all of them."""
        count = config.num_hidden_layers
        if self.target_layers is None:
            return [FINAL_NORM, *range(count + 1 - APART, 0, -APART)][:MOST_LAYERS]
        for layer in self.target_layers:
            if not FINAL_NORM <= layer < count:
                raise ValueError(
                    f"target_layers: {layer} is no layer of teacher {self.teacher!r}: use 0 to {count - 1}, or -1"
                )
        if len(set(self.target_layers)) < len(self.target_layers):
            raise ValueError(f"target_layers={self.target_layers}: name each layer once")
        return self.target_layers


class AddedStates(nn.Module):
    """What is added to the embeddings of rows: the projected states before their anchors.

    Args:
        projection: the initial one.
        layers: of the teacher's, whose states are read.
        features: all layers whose states are given.
    """

    def __init__(self, projection: StateProjection, layers: list[int], features: list[int]) -> None:
        super().__init__()
        self.layers, self.scale, self._features = projection.layers, projection.scale, features
        self._places = [features.index(layer) for layer in layers]
        outputs, inputs = projection.weight.shape
        self.target_proj = nn.Linear(inputs, outputs, bias=projection.bias is not None)
        with torch.no_grad():
            self.target_proj.weight.copy_(projection.weight)
            if projection.bias is not None:
                self.target_proj.bias.copy_(projection.bias)

    def forward(self, batch: TrainingBatch, states_SNX: Tensor) -> Tensor:
        """Returns `[S, R, D]`."""
        parts = states_SNX.chunk(len(self._features), dim=-1)
        read_SNX = torch.cat([parts[place] for place in self._places], dim=-1).to(self.target_proj.weight.dtype)
        added_SRD = states_before(batch, self.scale * self.target_proj(read_SNX))
        if batch.is_bare is None or not self.training:
            return added_SRD
        return added_SRD.masked_fill(batch.is_bare[:, :, None], 0.0)

    def projection(self, weights: dict[str, Tensor]) -> StateProjection:
        """The trained projection, as it is stored, from its state dict."""
        stored = {name: weight.detach().to(torch.bfloat16) for name, weight in weights.items()}
        return StateProjection(
            layers=self.layers, scale=self.scale, weight=stored[WEIGHT], bias=stored.get("target_proj.bias")
        )


class Pard2Trainee(PardTrainee):
    """The `Trainee` of a PARD draft model that reads the target's states."""

    def __init__(
        self, recipe: Pard2Recipe, data: RunData, run: Prepared, added: AddedStates, layers: list[int]
    ) -> None:
        assert run.teacher is not None
        objective = objective_of(recipe, data, run, features_of(recipe, run.teacher, layers), added)
        super().__init__(recipe, data.tokenizer, run.drafter, objective, run.needed, name="pard2")
        self._added, self._dropout = added, recipe.state_dropout

    def collate(self, groups: list[list[Sample]], generators: list[list[torch.Generator]]) -> TrainingBatch:
        """Makes the rows that COD keeps, and draws the samples that are trained without states."""
        batch = super().collate(groups, generators)
        most = max(map(len, groups))
        is_bare = [[bool(torch.rand((), generator=each) < self._dropout) for each in group] for group in generators]
        is_bare_SG = torch.tensor([group + [False] * (most - len(group)) for group in is_bare])
        return replace(batch, is_bare=is_bare_SG.gather(1, batch.documents.clamp(min=0)))

    def save(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Writes the draft, and the projection in bf16; see `paradraft.formats.pard2`."""
        own = {name.removeprefix(ADDED): weight for name, weight in weights.items() if name.startswith(ADDED)}
        others = {name: weight for name, weight in weights.items() if not name.startswith(ADDED)}
        self.write(folder, others, self._added.projection(own))


def build(recipe: Pard2Recipe, data: RunData) -> Pard2Trainee:
    """Checks the memory, then loads model and teacher. See `Builder`."""
    config, teacher = load_config(recipe.model_folder), load_config(teacher_folder(recipe.teacher))
    layers = recipe.layers_of(teacher)
    run = prepared(recipe, data, beside=config.hidden_size * len(layers) * teacher.hidden_size)
    features = list(dict.fromkeys([FINAL_NORM, *layers]))
    projection = _initial(recipe, config, teacher, layers)
    return Pard2Trainee(recipe, data, run, AddedStates(projection, layers, features), features)


def _initial(
    recipe: Pard2Recipe, config: PretrainedConfig, teacher: PretrainedConfig, layers: list[int]
) -> StateProjection:
    """The model's own projection if it reads the same layers, else zeros."""
    if reads_states(config):
        own = read_projection(config, width=teacher.hidden_size)
        if [target_layer(index, teacher.num_hidden_layers) for index in own.layers] == layers:
            return own
    zeros = torch.zeros(config.hidden_size, len(layers) * teacher.hidden_size)
    return StateProjection(layers=tuple(layers), scale=recipe.state_scale, weight=zeros)
