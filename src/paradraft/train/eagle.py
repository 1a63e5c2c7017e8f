"""EAGLE training: a layer learns the target's next state, and the token after it (Li et al. 2024, section 3.2).

The loss of a token is Eq. 4 of ParallelSpec (`LayersObjective.loss`). Training gives the layer the target's states;
drafting gives it its own from the second token on.

Shape letters as in `heads.py`.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from paradraft.train.batch import TrainingBatch
from paradraft.train.draft_layers import LayersObjective, LayersRecipe, layers_trainee, sum_of_inputs
from paradraft.train.heads import HeadTrainee
from paradraft.train.teacher import Teacher
from paradraft.train.trainee import RunData


class EagleRecipe(LayersRecipe):
    """Settings of `paradraft train eagle`."""

    regression: float = Field(default=1.0, ge=0, description="what the loss of the states weighs (Eq. 4)")
    classification: float = Field(default=0.1, ge=0, description="what the loss of the tokens weighs")

    @property
    def depths(self) -> int:
        """One: every token is learnt after the target's own state."""
        return 1


class Eagle(LayersObjective):
    """A linear layer and decoder layers in training.

    Args:
        target: whose states they read.
        recipe: the run.
        on_gpu: see `LayersObjective`.
        bf16: see `HeadObjective`.
    """

    def __init__(self, target: Teacher, recipe: EagleRecipe, *, on_gpu: bool, bf16: bool = False) -> None:
        super().__init__(target, recipe, on_gpu=on_gpu, bf16=bf16)
        self.fc = sum_of_inputs(target)

    def vectors(self, batch: TrainingBatch, embeddings_SRD: Tensor, states_SRD: Tensor) -> Tensor:
        """Embedding and state, joined."""
        joined: Tensor = self.fc(torch.cat([embeddings_SRD, states_SRD], dim=-1))
        return joined


def build(recipe: EagleRecipe, data: RunData) -> HeadTrainee:
    """Loads the target, once it is known that the run fits into memory.

    Raises:
        ValueError: the target cannot be used, or there is not enough memory.
    """
    on_gpu = data.device.type == "cuda"

    def objective(target: Teacher) -> Eagle:
        return Eagle(target, recipe, on_gpu=on_gpu, bf16=data.bf16)

    return layers_trainee("eagle", recipe, data, objective, joined=True)
