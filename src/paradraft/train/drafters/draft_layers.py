"""Shared training of drafters with their own decoder layers; see `paradraft.drafters.parts.draft_layers`.

Rows are PARD's (`rows.py`): ParallelSpec's group of a token and its masks (section 4.1, Fig. 3) is the chain of rows
with one anchor, so a group is hidden from all others, and COD with r = 1 is the paper's training. A row has the inputs
that the drafter has at its position: the real token and the state from which the target predicted it, or a mask.

Shape letters as in `heads.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss

from paradraft.drafters.parts.draft_layers import layers_like, side_by_side
from paradraft.models.architectures import spec_of
from paradraft.models.forward import FINAL_NORM
from paradraft.models.output_head import sizes_of
from paradraft.models.quantized import as_numbers
from paradraft.sources.loading import load_config, locate
from paradraft.train import memory
from paradraft.train.drafters.heads import (
    HeadTrainee,
    check_memory,
    states_before,
)
from paradraft.train.drafters.output_heads import DraftHeadRecipe, trimmed_target
from paradraft.train.drafters.path_heads import PathHeadRecipe, PathObjective
from paradraft.train.objectives.batch import Drop, TrainingBatch
from paradraft.train.objectives.losses import IGNORED
from paradraft.train.objectives.row_loss import Losses
from paradraft.train.objectives.rows import attention_mask
from paradraft.train.objectives.teacher import Teacher
from paradraft.train.recipe_parts import Part
from paradraft.train.trainee import RunData

UNSURE = 0.2
"""Share of the target's final norm that the norm of new layers has: their first logits, from states that predict
nothing yet, would be as sure as the target's."""


class LayersRecipe(DraftHeadRecipe):
    """Settings of trainings of decoder layers on the target's states."""

    layers: int = Field(default=1, ge=1, description="decoder layers of the target's shape")
    init: Literal["first", "last", "random"] = Field(
        default="first", description="initial weights of the layers: of the target's first or last ones, or random"
    )
    target_layers: list[int] = Field(
        default=[FINAL_NORM],
        min_length=1,
        description="target layers whose states are read: 0 for the embeddings, i after the i-th layer, -1 after the "
        "final norm; several, as in EAGLE-3, are joined by a linear layer",
    )
    final_norm: bool = Field(
        default=True, description="a norm after the layers, initialized to a fifth of the target's last one"
    )
    regression: float = Field(default=0.0, ge=0, description="weight of the loss of the states (Eq. 4)")
    classification: float = Field(default=1.0, ge=0, description="weight of the loss of the tokens")

    @model_validator(mode="after")
    def _check_losses(self) -> Self:
        if not self.regression and not self.classification:
            raise ValueError("regression=0, classification=0: nothing would be learnt, give one of them a weight")
        return self


class MasksRecipe(PathHeadRecipe):
    """Settings of trainings on the target's states that draft with masks."""

    PARTS = (
        *PathHeadRecipe.PARTS,
        Part(
            settings=("r", "r_min", "depth_weights", "previous_token_rank"),
            wanted="k=2 or more",
            is_on=lambda recipe: recipe.k > 1,
        ),
    )

    r: float = Field(default=1.0, gt=0, le=1, description="COD: rows kept from position to position; 1 keeps all")
    r_min: float = Field(default=0.2, ge=0, le=1, description="COD: least share of rows at any position")


class ParallelRecipe(MasksRecipe, LayersRecipe):
    """Settings of trainings of decoder layers that draft with masks."""

    PARTS = (
        *MasksRecipe.PARTS,
        Part(settings=("distinct_masks", "mask_state"), wanted="k=2 or more", is_on=lambda recipe: recipe.k > 1),
    )

    distinct_masks: bool = Field(default=True, description="a mask for each position of the draft, or one for all")
    mask_state: Literal["anchor", "learned"] = Field(
        default="anchor",
        description="the target's state that a mask reads: that before the last committed token, or a learned vector",
    )


class LayersObjective(PathObjective):
    """Decoder layers in training, and their loss. A subclass computes their inputs, `vectors`.

    Args:
        on_gpu: decides the attention implementation if the recipe does not.
        mistral: whether the layers are Mistral's, see `layers_like`.
    """

    def __init__(
        self, target: Teacher, recipe: LayersRecipe, *, on_gpu: bool, bf16: bool = False, mistral: bool = False
    ) -> None:
        super().__init__(target, recipe, bf16=bf16)
        base: Any = target.model.model
        model = layers_like(target.model.config, recipe.layers, dtype=torch.float32, mistral=mistral)
        recipe.set_up_passes(model, on_gpu=on_gpu)
        body: Any = model.model
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            body.apply(model._init_weights)
        if recipe.init != "random":
            source = base.layers[: recipe.layers] if recipe.init == "first" else base.layers[-recipe.layers :]
            for own, layer in zip(body.layers, source, strict=True):
                names = own.state_dict().keys()  # Mistral's layers lack some weights that the target's may have
                weights = {name: as_numbers(weight) for name, weight in layer.named_parameters() if name in names}
                own.load_state_dict(weights)
        if recipe.final_norm:
            offset = spec_of(target.model.config).norm_offset
            with torch.no_grad():
                body.norm.weight.copy_(UNSURE * (base.norm.weight + offset) - offset)
        else:
            body.norm = nn.Identity()
        model.requires_grad_(True)
        self.regression, self.classification = recipe.regression, recipe.classification
        self.layers, self.norm = body.layers, body.norm
        self.target_layers = recipe.target_layers
        self.fuse = None if len(recipe.target_layers) == 1 else last_of(target, len(recipe.target_layers))
        self._model = (model,)  # hidden from `nn.Module`: only parameters of its layers and norm are trained

    def vectors(self, batch: TrainingBatch, embeddings_SRD: Tensor, states_SRD: Tensor) -> Tensor:
        """Returns `[S, R, D]` inputs of the layers.

        Args:
            embeddings_SRD: of real tokens; undefined for masks.
            states_SRD: states from which the rows' anchors were predicted.
        """
        raise NotImplementedError

    def hidden(self, batch: TrainingBatch, read_SNX: Tensor) -> Tensor:
        """Returns the layers' output for each row."""
        (model,) = self._model
        dtype = next(self.layers[0].parameters()).dtype
        embed = self.target.model.get_input_embeddings()
        states_SRD = states_before(batch, self._fused(read_SNX)).to(dtype)
        hidden_SRD: Tensor = model.model(
            inputs_embeds=self.vectors(batch, embed(batch.tokens).to(dtype), states_SRD),
            attention_mask=attention_mask(batch.rows, model),
            position_ids=batch.positions,
            use_cache=False,
        ).last_hidden_state
        return self.read(hidden_SRD, batch)

    def _fused(self, read_SNX: Tensor) -> Tensor:
        """`[S, N, D]` states of all target layers, joined by a linear layer."""
        if self.fuse is None:
            return read_SNX
        states = read_SNX.chunk(len(self.target_layers), dim=-1)
        fused: Tensor = self.fuse(side_by_side(dict(zip(self.target_layers, states, strict=True))))
        return fused

    def loss(self, hidden_SRD: Tensor, batch: TrainingBatch, read_SND: Tensor, weights_K: Tensor) -> Losses:
        """EAGLE's loss (ParallelSpec, Eq. 4): SmoothL1 regression of the target's state, and the loss of the token.

        Weights are 1 and 0.1 as in the official code. Eq. 4 uses the tokens of the text; `loss: forward_kl` uses the
        target's distribution, as EAGLE's code does.
        """
        losses = super().loss(hidden_SRD, batch, read_SND, weights_K)
        total = self.classification * losses.total
        if not self.regression:
            return losses._replace(total=total)
        states_SRD = hidden_SRD[..., : read_SND.shape[2]]
        index_SRD = batch.text_indices[:, :, None].expand_as(states_SRD)
        regression_SR = smooth_l1_loss(
            states_SRD.float(), read_SND.gather(1, index_SRD).float(), reduction="none"
        ).mean(-1)
        weights_SR = losses.weights
        if self.active_loss.weighting is None:  # rows whose token cannot be drafted are regressed too
            weights_SR = weights_K[batch.depths] * (batch.labels != IGNORED)
        return losses._replace(total=total + self.regression * (weights_SR * regression_SR).sum())


def sum_of_inputs(target: Teacher, layers: Sequence[int], *, bias: bool = True) -> nn.Linear:
    """Linear layer that joins embedding and state, initialized to their sum, the state scaled to an embedding's size.

    A decoder layer hardly changes an input that is much larger than its own, so the drafter would repeat the state.

    Args:
        layers: the target layers whose states are read. Of several, `last_of` has selected the last, which
            `side_by_side` has normalized unless it follows the final norm.
    """
    width, (embedding, state) = target.model.config.hidden_size, sizes_of(target.model)
    ratio = (1.0 if len(layers) > 1 and layers[-1] != FINAL_NORM else state) / embedding
    joined = nn.Linear(2 * width, width, bias=bias)
    with torch.no_grad():
        joined.weight.copy_(torch.cat([torch.eye(width), torch.eye(width) / ratio], dim=1))
        if bias:
            joined.bias.zero_()
    return joined


def last_of(target: Teacher, layers: int) -> nn.Linear:
    """Linear layer that joins the states of several layers, initialized to select the last one."""
    width = target.model.config.hidden_size
    fused = nn.Linear(layers * width, width, bias=False)
    with torch.no_grad():
        fused.weight.zero_()
        fused.weight[:, -width:] = torch.eye(width)
    return fused


class MaskEmbeddings(nn.Module):
    """Trained embeddings, and optionally the state, of masks.

    Args:
        target: masks are initialized to the mean of its embeddings.
        reads_states: whether the drafter reads states.
    """

    def __init__(self, recipe: ParallelRecipe, target: Teacher, *, reads_states: bool = True) -> None:
        super().__init__()
        masks = max(recipe.k - 1, 1) if recipe.distinct_masks else 1
        embed = target.model.get_input_embeddings()
        scale = getattr(embed, "scalar_embed_scale", 1.0)  # Gemma's
        mean_D = as_numbers(embed.weight).detach().float().mean(0) * scale
        self.embeddings = nn.Parameter(mean_D.repeat(masks, 1))
        is_learned = reads_states and recipe.mask_state == "learned"
        self.state = nn.Parameter(torch.zeros_like(mean_D)) if is_learned else None

    def forward(self, batch: TrainingBatch, embeddings_SRD: Tensor, states_SRD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns embeddings and states, with the trained ones for masks."""
        is_mask_SR1 = (batch.depths > 0)[:, :, None]
        index_SR = (batch.depths - 1).clamp(min=0, max=len(self.embeddings) - 1)
        embeddings_SRD = torch.where(is_mask_SR1, self.embeddings[index_SR], embeddings_SRD)
        if self.state is not None:
            states_SRD = torch.where(is_mask_SR1, self.state, states_SRD)
        return embeddings_SRD, states_SRD


def check_target_layers(layers: Sequence[int], most: int, model: str) -> None:
    """Raises ValueError if a model of `most` layers has not all of these, or one is named twice."""
    if wrong := [layer for layer in layers if not FINAL_NORM <= layer <= most]:
        raise ValueError(f"target_layers: model {model!r} has no layer {wrong[0]}, use {FINAL_NORM} to {most}")
    if len(set(layers)) < len(layers):
        raise ValueError(f"target_layers={list(layers)}: name each layer once")


def layers_trainee(
    drafter: str,
    recipe: LayersRecipe,
    data: RunData,
    build: Callable[[Teacher], LayersObjective],
    *,
    joined: bool,
    for_vllm: bool = False,
    settings: Callable[[Teacher], dict[str, Any]] = lambda target: {},
) -> HeadTrainee:
    """Checks the settings and the memory, then loads the target and builds the trainee.

    Args:
        build: makes the objective from the target.
        joined: whether a linear layer joins embeddings and states.
        for_vllm: whether the layers are Mistral's, and never read the first token of a text; see `EagleRecipe`.
        settings: further entries of the checkpoint's config, from the target.

    Raises:
        ValueError: the target cannot be used, or there is not enough memory.
    """
    config = load_config(locate(recipe.model, "target"))
    if recipe.layers > (most := config.num_hidden_layers) and recipe.init != "random":
        raise ValueError(f"layers={recipe.layers}: model {recipe.model!r} has {most} to begin with, set init=random")
    check_target_layers(recipe.target_layers, most, recipe.model)
    shape = layers_like(config, recipe.layers, dtype=torch.float32, device="meta", mistral=for_vllm)
    trained = memory.parameters_of(shape) + joined * 2 * config.hidden_size**2
    # Rows of depth 1 and deeper are not embedded by id, so any mask id will do.
    drop = Drop(
        k=recipe.depths, r=1.0, r_min=1.0, mask_id=None if recipe.depths == 1 else 0, reads_first=not for_vllm
    )  # fmt: skip
    if isinstance(recipe, ParallelRecipe):
        drop = replace(drop, r=recipe.r, r_min=recipe.r_min, mask_id=0)
        trained += recipe.path_parameters(config)
    rows = sum(max(drop.r**depth, drop.r_min) for depth in range(drop.k))
    kept = memory.kept_by_layers(recipe, shape.config, bf16=data.bf16) + 4.0 * 6 * config.hidden_size
    needed = check_memory(recipe, data, trained=trained, kept=kept, rows_per_token=rows, attended_per_token=rows)
    objective = build(trimmed_target(recipe, data)).to(data.device)
    head_config = {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": recipe.layers,
        "k": recipe.k,
        "final_norm": recipe.final_norm,
        "parallel_drafting": isinstance(recipe, ParallelRecipe),
        "target_layers": recipe.target_layers,
    }
    if for_vllm:
        head_config |= {"for_vllm": True}
    if isinstance(recipe, ParallelRecipe):
        head_config |= {"distinct_masks": recipe.distinct_masks} | recipe.path_ranks
    return HeadTrainee(drafter, recipe, objective, head_config | settings(objective.target), drop, needed)
