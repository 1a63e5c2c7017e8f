"""EAGLE with parallel drafting (ParallelSpec; Xiao et al. 2024, section 4.3): sums EAGLE's loss over each group.

The loss of a row is that of `LayersObjective`, Eq. 4.

Shape letters as in `heads.py`.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from paradraft.train.drafters.draft_layers import (
    LayersObjective,
    MaskEmbeddings,
    ParallelRecipe,
    layers_trainee,
    sum_of_inputs,
)
from paradraft.train.drafters.heads import HeadTrainee
from paradraft.train.objectives.batch import TrainingBatch
from paradraft.train.objectives.teacher import Teacher
from paradraft.train.trainee import RunData


class EagleParallelRecipe(ParallelRecipe):
    """Settings of `paradraft train eagle_parallel`."""

    regression: float = Field(default=1.0, ge=0, description="weight of the loss of the states (Eq. 4)")
    classification: float = Field(default=0.1, ge=0, description="weight of the loss of the tokens")


class EagleParallel(LayersObjective):
    """EAGLE's linear layer and decoder layers, and masks, in training; see `LayersObjective`."""

    def __init__(self, target: Teacher, recipe: EagleParallelRecipe, *, on_gpu: bool, bf16: bool = False) -> None:
        super().__init__(target, recipe, on_gpu=on_gpu, bf16=bf16)
        self.fc = sum_of_inputs(target, recipe.target_layers)
        self.masks = MaskEmbeddings(recipe, target)

    def vectors(self, batch: TrainingBatch, embeddings_SRD: Tensor, states_SRD: Tensor) -> Tensor:
        """Joins embedding and state."""
        joined: Tensor = self.fc(torch.cat(self.masks(batch, embeddings_SRD, states_SRD), dim=-1))
        return joined


def build(recipe: EagleParallelRecipe, data: RunData) -> HeadTrainee:
    """Checks the memory, then loads the target. See `Builder`."""
    on_gpu = data.device.type == "cuda"
    return layers_trainee(
        "eagle_parallel",
        recipe,
        data,
        lambda target: EagleParallel(target, recipe, on_gpu=on_gpu, bf16=data.bf16),
        joined=True,
    )
