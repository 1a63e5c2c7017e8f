"""Medusa with parallel drafting (ParallelSpec; Xiao et al. 2024, section 4.3): Eq. 3, including the real token's term.

The paper does not give λ_k: 0.8^k as for Medusa, and 1 for the real token, as in Eq. 3.

Shape letters as in `heads.py`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from paradraft.train.drafters.draft_layers import LayersObjective, MaskEmbeddings, ParallelRecipe, layers_trainee
from paradraft.train.drafters.heads import HeadTrainee, embedding_scale
from paradraft.train.drafters.output_heads import MedusaWeights
from paradraft.train.objectives.batch import TrainingBatch
from paradraft.train.objectives.teacher import Teacher
from paradraft.train.recipe_parts import Part
from paradraft.train.trainee import RunData


class MedusaParallelRecipe(MedusaWeights, ParallelRecipe):
    """Settings of `paradraft train medusa_parallel`."""

    PARTS = (
        *ParallelRecipe.PARTS,
        Part(
            settings=("mask_state", "target_layers"), wanted="reads=state", is_on=lambda recipe: recipe.reads == "state"
        ),
    )

    reads: Literal["embedding", "state"] = Field(
        default="state", description="a token's embedding alone, or with the state from which the target predicted it"
    )


class MedusaParallel(LayersObjective):
    """Decoder layers and masks in training; see `LayersObjective`."""

    def __init__(self, target: Teacher, recipe: MedusaParallelRecipe, *, on_gpu: bool, bf16: bool = False) -> None:
        super().__init__(target, recipe, on_gpu=on_gpu, bf16=bf16)
        self.reads_states = recipe.reads == "state"
        self.scale = embedding_scale(target) if self.reads_states else 1.0
        self.masks = MaskEmbeddings(recipe, target, reads_states=self.reads_states)

    def vectors(self, batch: TrainingBatch, embeddings_SRD: Tensor, states_SRD: Tensor) -> Tensor:
        """Adds the scaled embedding to the state, if states are read."""
        embeddings_SRD, states_SRD = self.masks(batch, embeddings_SRD, states_SRD)
        scaled_SRD = self.scale * embeddings_SRD
        return scaled_SRD + states_SRD if self.reads_states else scaled_SRD


def build(recipe: MedusaParallelRecipe, data: RunData) -> HeadTrainee:
    """Checks the memory, then loads the target. See `Builder`."""
    on_gpu = data.device.type == "cuda"

    def objective(target: Teacher) -> MedusaParallel:
        return MedusaParallel(target, recipe, on_gpu=on_gpu, bf16=data.bf16)

    def settings(target: Teacher) -> dict[str, object]:
        return {"reads": recipe.reads, "embedding_scale": embedding_scale(target) if recipe.reads == "state" else 1.0}

    return layers_trainee("medusa_parallel", recipe, data, objective, joined=False, settings=settings)
