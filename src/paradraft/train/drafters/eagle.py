"""EAGLE training: a layer learns the target's next state, and the token after it (Li et al. 2024, section 3.2).

The loss of a token is Eq. 4 of ParallelSpec (`LayersObjective.loss`). In training the layer reads the target's states;
in drafting it reads its own outputs from the second token on. With `own_steps`, training does the same (training-time
test; Li et al. 2025, EAGLE-3).

Shape letters as in `heads.py`.
"""

from __future__ import annotations

from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from transformers import DynamicCache

from paradraft.models.forward import FINAL_NORM
from paradraft.models.target import gathered
from paradraft.train.drafters.draft_layers import LayersObjective, LayersRecipe, layers_trainee, sum_of_inputs
from paradraft.train.drafters.heads import DECAY, HeadTrainee, states_before
from paradraft.train.objectives.batch import TrainingBatch
from paradraft.train.objectives.losses import IGNORED
from paradraft.train.objectives.rows import FILLING, FLEX, as_mask, attention_rule
from paradraft.train.objectives.teacher import Teacher
from paradraft.train.trainee import RunData


class EagleRecipe(LayersRecipe):
    """Settings of `paradraft train eagle`."""

    regression: float = Field(default=1.0, ge=0, description="weight of the loss of the states (Eq. 4)")
    classification: float = Field(default=0.1, ge=0, description="weight of the loss of the tokens")

    for_vllm: bool = Field(
        default=False,
        description="train a drafter that vLLM supports (paradraft export): Mistral's layers, no bias where embedding "
        "and state are joined, and the first token of a text, before which there is no state, is not read",
    )
    own_steps: int = Field(
        default=1,
        ge=1,
        description="consecutive tokens that are learnt, all but the first from the layer's own states, as in EAGLE-3; "
        "1: every token from the target's state",
    )

    @model_validator(mode="after")
    def _check_own_steps(self) -> Self:
        if self.own_steps > 1 and (self.gradient_checkpointing or self.attention == FLEX):
            other = "gradient_checkpointing" if self.gradient_checkpointing else f"attention={FLEX}"
            raise ValueError(f"own_steps={self.own_steps}: its passes have a cache, leave {other} out")
        return self

    @model_validator(mode="after")
    def _check_for_vllm(self) -> Self:
        if self.for_vllm and self.target_layers != [FINAL_NORM]:
            raise ValueError("for_vllm=true: there the layers read the target's last states, leave target_layers out")
        if self.for_vllm and not self.final_norm:
            raise ValueError("for_vllm=true: there a norm follows the layers, leave final_norm out")
        return self

    @property
    def depths(self) -> int:
        """Consecutive tokens that are learnt."""
        return self.own_steps

    @property
    def weights_by_depth(self) -> list[float]:
        """0.8^i by default, as in EAGLE-3's code."""
        return self.depth_weights or [DECAY**depth for depth in range(self.depths)]


class Eagle(LayersObjective):
    """EAGLE's linear layer and decoder layers in training; see `LayersObjective`.

    Passes with a KV cache (`own_steps`) use SDPA, also on GPUs.
    """

    def __init__(self, target: Teacher, recipe: EagleRecipe, *, on_gpu: bool, bf16: bool = False) -> None:
        super().__init__(
            target, recipe, on_gpu=on_gpu and recipe.own_steps == 1, bf16=bf16, mistral=recipe.for_vllm
        )  # fmt: skip
        self.fc = sum_of_inputs(target, recipe.target_layers, bias=not recipe.for_vllm)

    def vectors(self, batch: TrainingBatch, embeddings_SRD: Tensor, states_SRD: Tensor) -> Tensor:
        """Joins embedding and state."""
        joined: Tensor = self.fc(torch.cat([embeddings_SRD, states_SRD], dim=-1))
        return joined

    def hidden(self, batch: TrainingBatch, read_SNX: Tensor) -> Tensor:
        """Returns the layers' output for each row, computed depth by depth.

        A row of depth i simulates a drafted token: it reads the text's token, and the layers' output for the previous
        row of its chain, as in drafting (Li et al. 2025, EAGLE-3, section 3.2).
        """
        if not batch.depths.any():
            return super().hidden(batch, read_SNX)
        (model,) = self._model
        dtype = next(self.layers[0].parameters()).dtype
        embed, (S, R) = self.target.model.get_input_embeddings(), batch.depths.shape
        embeddings_SRD = embed(batch.texts.tokens.gather(1, batch.text_indices)).to(dtype)
        states_SRD = states_before(batch, self._fused(read_SNX)).to(dtype)
        sees_SRR, before_SR = attention_rule(batch.rows), batch.before().view(S, R)
        outputs_XD = torch.zeros_like(states_SRD).flatten(0, 1)
        samples_S1 = torch.arange(S, device=before_SR.device)[:, None]
        keys_SY, is_real_SY = before_SR[:, :0], batch.labels[:, :0] == IGNORED
        cache = DynamicCache()
        for depth in range(int(batch.depths.max()) + 1):
            rows_SM, is_real_SM = _rows_of(batch, depth)
            drafted_SMD = outputs_XD[before_SR.gather(1, rows_SM)].to(dtype)
            states_SMD = drafted_SMD if depth else gathered(states_SRD, rows_SM)
            keys_SY = torch.cat([keys_SY, rows_SM], dim=1)
            is_real_SY = torch.cat([is_real_SY, is_real_SM], dim=1)
            sees_SMY = sees_SRR[samples_S1[:, :, None], rows_SM[:, :, None], keys_SY[:, None]] & is_real_SY[:, None]
            hidden_SMD = model.model(
                inputs_embeds=self.vectors(batch, gathered(embeddings_SRD, rows_SM), states_SMD),
                attention_mask=as_mask(sees_SMY, model),
                position_ids=batch.positions.gather(1, rows_SM),
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state
            index_m = (samples_S1 * R + rows_SM)[is_real_SM]
            outputs_XD = outputs_XD.index_copy(0, index_m, hidden_SMD[is_real_SM].to(outputs_XD.dtype))
        return outputs_XD.view(S, R, -1)


def _rows_of(batch: TrainingBatch, depth: int) -> tuple[Tensor, Tensor]:
    """Indices `[S, M]` of each group's rows of a depth, and whether each is real: shorter lists are padded with 0."""
    has_depth_SR = (batch.depths == depth) & (batch.documents != FILLING)
    most = int(has_depth_SR.sum(1).max())
    rows_SM = (~has_depth_SR).long().argsort(dim=1, stable=True)[:, :most]
    is_real_SM = has_depth_SR.gather(1, rows_SM)
    return rows_SM.masked_fill(~is_real_SM, 0), is_real_SM


def build(recipe: EagleRecipe, data: RunData) -> HeadTrainee:
    """Checks the memory, then loads the target. See `Builder`."""
    on_gpu = data.device.type == "cuda"

    def objective(target: Teacher) -> Eagle:
        return Eagle(target, recipe, on_gpu=on_gpu, bf16=data.bf16)

    return layers_trainee("eagle", recipe, data, objective, joined=True, for_vllm=recipe.for_vllm)
