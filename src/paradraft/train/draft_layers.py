"""What the trainings of drafters with decoder layers of their own share; see `paradraft.models.draft_layers`.

Rows are PARD's (`rows.py`): ParallelSpec's group of a token and its masks (section 4.1, Fig. 3) is the chain of rows
with one anchor, so a group is hidden from all others, and COD with r = 1 is the paper's training. A row reads what the
drafter will read at its place: the real token and the state from which the target predicted it, or a mask.

Shape letters as in `heads.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss

from paradraft.models.draft_layers import layers_like
from paradraft.models.loading import load_config, locate
from paradraft.train import memory
from paradraft.train.batch import Drop, TrainingBatch
from paradraft.train.heads import (
    HeadObjective,
    HeadRecipe,
    HeadTrainee,
    check_memory,
    embedding_scale,
    frozen_target,
    states_before,
)
from paradraft.train.losses import IGNORED
from paradraft.train.objective import set_up_passes
from paradraft.train.recipe import Part
from paradraft.train.rows import attention_mask
from paradraft.train.teacher import Teacher
from paradraft.train.trainee import RunData


class LayersRecipe(HeadRecipe):
    """Settings of every training of decoder layers that read the target's states."""

    layers: int = Field(default=1, ge=1, description="decoder layers of the target's shape")
    init: Literal["first", "last", "random"] = Field(
        default="first", description="the layers begin as the target's first or last ones, or with random weights"
    )
    final_norm: bool = Field(default=True, description="a norm after the layers, which begins as the target's last one")
    regression: float = Field(default=0.0, ge=0, description="what the loss of the states weighs (Eq. 4)")
    classification: float = Field(default=1.0, ge=0, description="what the loss of the tokens weighs")

    @model_validator(mode="after")
    def _check_losses(self) -> Self:
        if not self.regression and not self.classification:
            raise ValueError("regression=0, classification=0: nothing would be learnt, give one of them a weight")
        return self


class ParallelRecipe(LayersRecipe):
    """Settings of drafters that draft with masks."""

    PARTS = (
        *LayersRecipe.PARTS,
        Part(
            settings=("r", "r_min", "distinct_masks", "mask_state", "depth_weights"),
            wanted="k=2 or more",
            is_on=lambda recipe: recipe.k > 1,
        ),
    )

    r: float = Field(default=1.0, gt=0, le=1, description="COD: share of rows kept from depth to depth; 1 keeps all")
    r_min: float = Field(default=0.2, ge=0, le=1, description="COD: least share of rows at any depth")
    distinct_masks: bool = Field(default=True, description="a mask for each place of the draft, or one for all")
    mask_state: Literal["anchor", "learned"] = Field(
        default="anchor",
        description="what a mask has for the target's state: that before the last committed token, or a learned vector",
    )


class LayersObjective(HeadObjective):
    """Decoder layers in training, and their loss. A subclass says what they read.

    Args:
        target: whose states they read.
        recipe: the run.
        on_gpu: decides on the attention, if the recipe does not.
        bf16: see `HeadObjective`.
    """

    def __init__(self, target: Teacher, recipe: LayersRecipe, *, on_gpu: bool, bf16: bool = False) -> None:
        super().__init__(target, recipe, bf16=bf16)
        theirs: Any = target.model.model
        model = layers_like(target.model.config, recipe.layers, dtype=torch.float32)
        set_up_passes(model, recipe, on_gpu=on_gpu)
        body: Any = model.model
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            body.apply(model._init_weights)
        if recipe.init != "random":
            copied = theirs.layers[: recipe.layers] if recipe.init == "first" else theirs.layers[-recipe.layers :]
            for own, layer in zip(body.layers, copied, strict=True):
                own.load_state_dict(layer.state_dict())
        if recipe.final_norm:
            body.norm.load_state_dict(theirs.norm.state_dict())
        else:
            body.norm = nn.Identity()
        model.requires_grad_(True)
        self.regression, self.classification = recipe.regression, recipe.classification
        self.layers, self.norm = body.layers, body.norm
        self._model = (model,)  # hidden: of its parameters only the layers' and the norm's are trained

    def vectors(self, batch: TrainingBatch, embeddings_SRD: Tensor, states_SRD: Tensor) -> Tensor:
        """What the layers read, `[S, R, D]`.

        Args:
            batch: the rows.
            embeddings_SRD: of the tokens of real rows; for masks anything.
            states_SRD: for each row the state from which its anchor was predicted.
        """
        raise NotImplementedError

    def hidden(self, batch: TrainingBatch, read_SND: Tensor) -> Tensor:
        """What the layers return for each row."""
        (model,) = self._model
        dtype = self.layers[0].input_layernorm.weight.dtype
        embeddings_SRD = self.target.model.get_input_embeddings()(batch.tokens).to(dtype)
        states_SRD = states_before(batch, read_SND).to(dtype)
        hidden_SRD: Tensor = model.model(
            inputs_embeds=self.vectors(batch, embeddings_SRD, states_SRD),
            attention_mask=attention_mask(batch.rows, model),
            position_ids=batch.positions,
            use_cache=False,
        ).last_hidden_state
        return hidden_SRD

    def loss(
        self, hidden_SRD: Tensor, batch: TrainingBatch, read_SND: Tensor, weights_K: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Of every row that has a label, how far its state is from the target's, and the loss of its token.

        EAGLE's loss (ParallelSpec, Eq. 4): SmoothL1 weighs 1, the tokens 0.1 as in the official code. Eq. 4 takes the
        tokens of the text for these; with `loss: forward_kl` it is the target's distribution, as in EAGLE's code.
        """
        tokens, right_K = super().loss(hidden_SRD, batch, read_SND, weights_K)
        if not self.regression:
            return self.classification * tokens, right_K
        index_SRD = batch.places[:, :, None].expand_as(hidden_SRD)
        apart = smooth_l1_loss(hidden_SRD.float(), read_SND.gather(1, index_SRD).float(), reduction="none").mean(-1)
        weights_SR = weights_K[batch.depths] * (batch.labels != IGNORED)
        return self.classification * tokens + self.regression * (weights_SR * apart).sum(), right_K


def sum_of_inputs(target: Teacher) -> nn.Linear:
    """A linear layer that joins embedding and state. It begins as their sum, the embedding scaled to a state's size."""
    width, ratio = target.model.config.hidden_size, embedding_scale(target)
    joined = nn.Linear(2 * width, width)
    with torch.no_grad():
        joined.weight.copy_(torch.cat([ratio * torch.eye(width), torch.eye(width)], dim=1))
        joined.bias.zero_()
    return joined


class Masks(nn.Module):
    """The embeddings of the masks, and what they have for a state.

    Args:
        recipe: the run.
        embeddings_VD: the target's; a mask begins as their mean.
        reads_states: whether states are read at all.
    """

    def __init__(self, recipe: ParallelRecipe, embeddings_VD: Tensor, *, reads_states: bool = True) -> None:
        super().__init__()
        masks = max(recipe.k - 1, 1) if recipe.distinct_masks else 1
        mean_D = embeddings_VD.detach().float().mean(0)
        self.embeddings = nn.Parameter(mean_D.repeat(masks, 1))
        is_learned = reads_states and recipe.mask_state == "learned"
        self.state = nn.Parameter(torch.zeros_like(mean_D)) if is_learned else None

    def forward(self, batch: TrainingBatch, embeddings_SRD: Tensor, states_SRD: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings and states, those of masks in place of what masks do not have."""
        is_mask_SR1 = (batch.depths > 0)[:, :, None]
        which_SR = (batch.depths - 1).clamp(min=0, max=len(self.embeddings) - 1)
        embeddings_SRD = torch.where(is_mask_SR1, self.embeddings[which_SR], embeddings_SRD)
        if self.state is not None:
            states_SRD = torch.where(is_mask_SR1, self.state, states_SRD)
        return embeddings_SRD, states_SRD


def layers_trainee(
    drafter: str,
    recipe: LayersRecipe,
    data: RunData,
    build: Callable[[Teacher], LayersObjective],
    *,
    joined: bool,
    settings: Callable[[Teacher], dict[str, Any]] = lambda target: {},
) -> HeadTrainee:
    """Loads the target, once it is known that the run fits into memory, and what is trained beside it.

    Args:
        drafter: the name of the drafter.
        recipe: the run.
        data: what else is known of it.
        build: makes the objective of the target.
        joined: whether a linear layer joins embeddings and states.
        settings: what the config of the checkpoint says besides, of the target.

    Raises:
        ValueError: the target cannot be used, or there is not enough memory.
    """
    config = load_config(locate(recipe.model, "target"))
    if recipe.layers > (most := config.num_hidden_layers) and recipe.init != "random":
        raise ValueError(f"layers={recipe.layers}: model {recipe.model!r} has {most} to begin with, set init=random")
    shape = layers_like(config, recipe.layers, dtype=torch.float32, device="meta")
    trained = memory.parameters_of(shape) + joined * 2 * config.hidden_size**2
    drop = Drop(k=1, r=1.0, r_min=1.0, mask_id=None)
    if isinstance(recipe, ParallelRecipe):
        drop = Drop(k=recipe.k, r=recipe.r, r_min=recipe.r_min, mask_id=0)  # what masks read is not looked up by an id
    rows = sum(max(drop.r**depth, drop.r_min) for depth in range(drop.k))
    kept = memory.kept_by_layers(recipe, shape.config, bf16=data.bf16) + 4.0 * 6 * config.hidden_size
    check_memory(recipe, data, trained=trained, kept=kept, rows_per_token=rows, attended_per_token=rows)
    objective = build(frozen_target(recipe, data)).to(data.device)
    told = {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": recipe.layers,
        "k": recipe.k,
        "final_norm": recipe.final_norm,
        "parallel_drafting": isinstance(recipe, ParallelRecipe),
    }
    if isinstance(recipe, ParallelRecipe):
        told |= {"distinct_masks": recipe.distinct_masks}
    return HeadTrainee(drafter, recipe, objective, told | settings(objective.target), drop)
