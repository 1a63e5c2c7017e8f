"""Hydra training: sequentially dependent heads, which also read the text's tokens (Ankner et al. 2024, section 3).

The loss is Medusa's (ParallelSpec, Eq. 2), with the same weights.

Shape letters as in `heads.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from paradraft.sources.loading import load_config, locate
from paradraft.train.drafters.heads import (
    HeadObjective,
    HeadTrainee,
    check_memory,
    embedding_scale,
    states_before,
)
from paradraft.train.drafters.output_heads import MedusaWeights, trimmed_target
from paradraft.train.objectives.batch import Drop, TrainingBatch, by_depth
from paradraft.train.objectives.teacher import Teacher
from paradraft.train.trainee import RunData


class HydraRecipe(MedusaWeights):
    """Settings of `paradraft train hydra`."""


class HydraHeads(HeadObjective):
    """K heads in training, initialized to the target's own head; see `HeadObjective`."""

    def __init__(self, target: Teacher, recipe: HydraRecipe, *, bf16: bool = False) -> None:
        super().__init__(target, recipe, bf16=bf16)
        width = target.model.config.hidden_size
        self.scale = embedding_scale(target)
        self.blocks = nn.ModuleList(nn.Linear((depth + 2) * width, width) for depth in range(recipe.k))
        for parameter in self.blocks.parameters():
            nn.init.zeros_(parameter)

    def hidden(self, batch: TrainingBatch, read_SND: Tensor) -> Tensor:
        """Applies the head of each row's depth to the state before its anchor, and to the tokens from the anchor on."""
        states_SRD = states_before(batch, read_SND)
        embed = self.target.model.get_input_embeddings()
        vectors_SND = self.scale * embed(batch.texts.tokens).to(states_SRD.dtype)
        depths_SR = batch.depths
        sample_SR = torch.arange(len(depths_SR), device=depths_SR.device)[:, None].expand_as(depths_SR)
        parts = []
        for depth, block in enumerate(self.blocks):
            has_depth_SR = depths_SR == depth
            sample_m, anchor_m, states_mD = (
                sample_SR[has_depth_SR],
                (batch.text_indices - depth)[has_depth_SR],
                states_SRD[has_depth_SR],
            )
            tokens = [vectors_SND[sample_m, anchor_m + step] for step in range(depth + 1)]
            parts.append(states_mD + silu(block(torch.cat([states_mD, *tokens], dim=1))))
        return by_depth(parts, batch, states_SRD)


def build(recipe: HydraRecipe, data: RunData) -> HeadTrainee:
    """Checks the memory, then loads the target. See `Builder`."""
    config = load_config(locate(recipe.model, "target"))
    width = config.hidden_size
    trained = sum((depth + 2) * width**2 + width for depth in range(recipe.k))
    needed = check_memory(recipe, data, trained=trained, kept=4.0 * width * (recipe.k + 5), rows_per_token=recipe.k)
    objective = HydraHeads(trimmed_target(recipe, data), recipe, bf16=data.bf16).to(data.device)
    settings = {"hidden_size": width, "num_heads": recipe.k, "embedding_scale": objective.scale}
    return HeadTrainee("hydra", recipe, objective, settings, Drop(k=recipe.k, r=1.0, r_min=1.0, mask_id=0), needed)
