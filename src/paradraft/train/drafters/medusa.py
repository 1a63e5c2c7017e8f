"""Medusa training: K heads learn the tokens after the next one from the target's last state (Cai et al. 2024, 2.2.1).

Loss: the cross-entropy of head k with the token k + 1 positions ahead, weighted by λ_k (ParallelSpec, Eq. 2). The
papers give no λ; the default is 0.8^k as in the official code.

Shape letters as in `heads.py`.
"""

from __future__ import annotations

from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PretrainedConfig

from paradraft.models.output_head import logits_scale
from paradraft.sources.loading import load_config, locate
from paradraft.train.drafters.heads import (
    CPU,
    HeadObjective,
    HeadTrainee,
    check_memory,
    states_before,
)
from paradraft.train.drafters.output_heads import MedusaWeights, trimmed_target
from paradraft.train.objectives.batch import Drop, TrainingBatch, by_depth
from paradraft.train.objectives.teacher import Teacher
from paradraft.train.trainee import RunData


class MedusaRecipe(MedusaWeights):
    """Settings of `paradraft train medusa`."""

    layers: int = Field(default=1, ge=1, description="residual blocks of each head")
    own_heads: bool = Field(
        default=False, description="an output head for each, as published; by default all use the target's, frozen"
    )

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.own_heads and self.head_rank is not None:
            raise ValueError(f"own_heads=true, head_rank={self.head_rank}: these are two kinds of heads, leave one out")
        return self


class Block(nn.Module):
    """Residual blocks of a head, h + SiLU(A h + b), initialized to the identity; `width` is D."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, states: Tensor) -> Tensor:
        """Maps states `[…, D]` to `[…, D]`."""
        for layer in self.layers:
            states = states + silu(layer(states))
        return states


class MedusaHeads(HeadObjective):
    """K heads in training; see `HeadObjective`."""

    def __init__(self, target: Teacher, recipe: MedusaRecipe, *, bf16: bool = False) -> None:
        super().__init__(target, recipe, bf16=bf16)
        self.blocks = nn.ModuleList(Block(recipe.layers, target.model.config.hidden_size) for _ in range(recipe.k))
        self.lm_heads = nn.ModuleList()
        for _ in range(recipe.k if recipe.own_heads else 0):
            weight_UD = target.head(CPU, torch.float32).weight
            own = nn.Linear(weight_UD.shape[1], len(weight_UD), bias=False)
            own.weight.data.copy_(weight_UD / logits_scale(target.model.config))
            self.lm_heads.append(own)

    def hidden(self, batch: TrainingBatch, read_SND: Tensor) -> Tensor:
        """Applies the head of each row's depth to the state before the row's anchor."""
        states_SRD = states_before(batch, read_SND)
        # Every head must have a gradient in every process, so each is called, even for no row.
        parts = [block(states_SRD[batch.depths == depth]) for depth, block in enumerate(self.blocks)]
        return by_depth(parts, batch, states_SRD)

    def head(self, hidden_mD: Tensor, depths_m: Tensor) -> Tensor:
        """Returns logits by the target's head, or by the heads of the rows' depths."""
        if not self.lm_heads:
            return super().head(hidden_mD, depths_m)
        parts = [own(hidden_mD[depths_m == depth]) for depth, own in enumerate(self.lm_heads)]
        logits_mV = torch.zeros(len(hidden_mD), parts[0].shape[1], dtype=parts[0].dtype, device=hidden_mD.device)
        for depth, part in enumerate(parts):
            logits_mV = logits_mV.masked_scatter((depths_m == depth)[:, None], part)
        return logits_mV


def _parameters(recipe: MedusaRecipe, config: PretrainedConfig) -> int:
    own = recipe.draft_ids(config.vocab_size) * config.hidden_size if recipe.own_heads else 0
    return recipe.k * (recipe.layers * config.hidden_size * (config.hidden_size + 1) + own)


def build(recipe: MedusaRecipe, data: RunData) -> HeadTrainee:
    """Checks the memory, then loads the target; the heads are initialized to its own. See `Builder`."""
    config = load_config(locate(recipe.model, "target"))
    kept = 4.0 * config.hidden_size * (2 + 3 * recipe.layers)
    needed = check_memory(recipe, data, trained=_parameters(recipe, config), kept=kept, rows_per_token=recipe.k)
    objective = MedusaHeads(trimmed_target(recipe, data), recipe, bf16=data.bf16).to(data.device)
    settings = {
        "architectures": ["MedusaModel"],
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_heads": recipe.k,
        "num_hidden_layers": recipe.layers,
        "medusa_fc_bias": True,
        "original_lm_head": not recipe.own_heads,
    }
    drop = Drop(k=recipe.k, r=1.0, r_min=1.0, mask_id=0)
    return HeadTrainee("medusa", recipe, objective, settings, drop, needed)
