"""Shared training of drafters on the target's hidden states: recipe, frozen target, loss.

The target reads the texts of each batch in the same process; its states are not stored on disk.

Shape letters: S groups of samples, N tokens of the longest, R rows, m some of them, D the target's hidden size,
V vocabulary, K depths.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from paradraft.data.samples import Sample
from paradraft.formats.folder import whole_folder
from paradraft.formats.head import Head, TargetIdentity, write_head
from paradraft.formats.vocab_map import D2T, T2D
from paradraft.models.architectures import context_of
from paradraft.models.forward import FINAL_NORM
from paradraft.models.output_head import finished, sizes_of
from paradraft.models.quantization import store_in_nf4
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.sources.loading import load_config, load_numbers, load_skeleton, locate
from paradraft.sources.target_loading import load_target
from paradraft.text.vocabulary import check_rows, used_rows
from paradraft.train import memory
from paradraft.train.drafters.kept_states import features_of
from paradraft.train.drafters.starting import begin_with, train_only
from paradraft.train.objectives.batch import Drop, TrainingBatch, collate
from paradraft.train.objectives.chunks import rows_at_once
from paradraft.train.objectives.features import FeatureCache
from paradraft.train.objectives.losses import DIVERGENCE_NAMES, Divergence
from paradraft.train.objectives.low_rank import LowRankHead
from paradraft.train.objectives.pass_teacher import PassTeacher
from paradraft.train.objectives.row_loss import Losses, RowLoss, loss_of_rows
from paradraft.train.objectives.selection import Selecting
from paradraft.train.objectives.teacher import Teacher
from paradraft.train.objectives.teacher_loading import is_decoded_as_stored
from paradraft.train.recipe import Recipe
from paradraft.train.trainee import RunData

CPU = torch.device("cpu")
DECAY = 0.8
"""Base of Medusa's λ_k = 0.8^k in the official code; a common factor of all heads has no effect."""


class HeadRecipe(Recipe):
    """Settings of trainings on the target's states."""

    model: str = Field(description="the target whose states the drafter reads: a Hugging Face id, a folder, or pocket")
    k: int = Field(default=8, ge=1, description="most tokens drafted per round")
    start: str | None = Field(
        default=None,
        description="a drafter on the same target whose weights are the initial ones, as far as it has them; it may be "
        "of another kind, as eagle for eagle_parallel",
    )
    loss: Literal["cross_entropy", Divergence] = Field(
        default="cross_entropy",
        description="cross_entropy with the text's tokens; or with the target's probabilities " + DIVERGENCE_NAMES,
    )

    @property
    def depths(self) -> int:
        """K, the tokens drafted."""
        return self.k

    @property
    def divergence(self) -> Divergence | None:
        """See `Recipe`; the target is the teacher."""
        return None if self.loss == "cross_entropy" else self.loss

    @property
    def caches_states(self) -> bool:
        """See `Recipe`."""
        return True

    @classmethod
    def continuing(cls, own: Mapping[str, Any], drafter: str, target: str | None) -> dict[str, Any]:
        """See `Recipe`."""
        return {"model": target or own["model"], "target": None, "start": drafter}

    @property
    def rank_of_head(self) -> int | None:
        """Rank of the drafter's own output head; None for the target's."""
        return None

    def draft_ids(self, vocab_size: int) -> int:
        """U, the number of the target's ids that can be drafted."""
        return vocab_size

    @property
    def trained_part(self) -> str | None:
        """Name of the only part whose weights are trained; None for all."""
        return None

    @property
    def measured_with(self) -> str | None:
        """The target that decodes held-out prompts: `target`, which must be a copy of `model`, or else `model`."""
        return self.model if self.target is None else self.target


class HeadObjective(nn.Module):
    """A drafter in training on the states of a frozen target, and its loss.

    A subclass has the trained weights and `hidden`; it may set `target_layers`, and `select` (see `loss_of_rows`).

    Args:
        bf16: compute in bf16; losses are computed in float32.
    """

    select: Selecting | None = None

    def __init__(self, target: Teacher, recipe: HeadRecipe, *, bf16: bool = False) -> None:
        super().__init__()
        self.target_layers = [FINAL_NORM]
        self._target = (target,)  # in a tuple, hidden from `nn.Module`: it is not trained, saved or sharded
        self._recipe = recipe
        rank = recipe.rank_of_head
        self.low_rank = None if rank is None else LowRankHead(target.head(CPU, torch.float32).weight, rank)
        self.row_loss = recipe.row_loss
        self.bf16 = bf16

    @property
    def target(self) -> Teacher:
        """The frozen target."""
        return self._target[0]

    @property
    def active_loss(self) -> RowLoss:
        """The loss of rows; evaluations weight them by their depth alone, so that those of two drafters compare."""
        return self.row_loss if self.training else self.row_loss.unweighted

    @cached_property
    def features(self) -> FeatureCache:
        """The target's states that are kept; raises ValueError as `features_of`."""
        layers = dict.fromkeys([*self.target_layers, FINAL_NORM])
        return features_of(self._recipe, self.target, list(layers))

    def hidden(self, batch: TrainingBatch, read_SNX: Tensor) -> Tensor:
        """Returns the drafter's states `[S, R, D]` of all rows, the input of `head`.

        Args:
            read_SNX: the target's states of the texts after `target_layers`, concatenated.
        """
        raise NotImplementedError

    def head(self, hidden_mD: Tensor, depths_m: Tensor) -> Tensor:
        """Returns logits `[m, V]` of rows of depths `[m]`, `[m, U]` if only some ids can be drafted; by default by the
        target's head or that of low rank."""
        if self.low_rank is None:
            return self.target.logits(hidden_mD)
        return finished(self.low_rank(hidden_mD), self.target.model.config)

    def forward(self, batch: TrainingBatch, weights_K: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Trainee.objective`."""
        with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=self.bf16):
            layers = list(dict.fromkeys([*self.target_layers, FINAL_NORM]))
            states = self.features.states(batch.texts).chunk(len(layers), dim=-1)
            read_SNX = torch.cat(states[: len(self.target_layers)], dim=-1)
            return self.loss(self.hidden(batch, read_SNX), batch, states[layers.index(FINAL_NORM)], weights_K).sums

    def loss(self, hidden_SRD: Tensor, batch: TrainingBatch, read_SND: Tensor, weights_K: Tensor) -> Losses:
        """Returns the losses of rows from the states of `hidden`."""
        return loss_of_rows(
            hidden_SRD,
            batch if self.target.vocab_map is None else batch.labelled_by_rows(self.target.vocab_map),
            weights_K,
            self.active_loss,
            head=self.head,
            teacher=self.target,
            chunk=rows_at_once(self.target.ids, hidden_SRD.device),
            trained=[weight for weight in self.parameters() if weight.requires_grad],
            read_SNE=read_SND,
            select=self.select,
        )


def states_before(batch: TrainingBatch, read_SND: Tensor) -> Tensor:
    """`[S, R, D]` states from which the rows' anchors were predicted; zeros for the first token of a text.

    Drafting has the same states: the anchor is the last committed token, and the target has read all tokens before it.
    """
    before_SR = batch.text_indices - batch.depths - 1
    has_state_SR = batch.positions > batch.depths
    index_SRD = before_SR.clamp(min=0)[:, :, None].expand(-1, -1, read_SND.shape[2])
    return torch.where(has_state_SR[:, :, None], read_SND.gather(1, index_SRD), 0.0)


def embedding_scale(target: Teacher) -> float:
    """Ratio of sizes of the target's last states and its embeddings, which unscaled would hardly count in a sum."""
    embeddings, states = sizes_of(target.model)
    return states / embeddings


class HeadTrainee:
    """The `Trainee` of a drafter on the target's states.

    Args:
        config: entries of the checkpoint's config.
        drop: settings of the rows.
    """

    def __init__(
        self,
        drafter: str,
        recipe: HeadRecipe,
        objective: HeadObjective,
        config: dict[str, Any],
        drop: Drop,
        needed: memory.Estimate,
    ) -> None:
        self.drafter, self.k, self.depths = drafter, recipe.k, recipe.depths
        self.objective = objective
        self._config = {"model_type": drafter} | config
        self.max_tokens = context_of(objective.target.model.config)
        self.notes = (*(objective.features.notes if recipe.caches_states else ()), needed.in_words)
        if recipe.start is not None:
            head = begin_with(objective, drafter, recipe.start)
            if (part := recipe.trained_part) is not None:
                train_only(objective, part, self._config, head, recipe.start)
        self._recipe = recipe
        self._drop = drop

    def collate(self, groups: list[list[Sample]], generators: list[list[torch.Generator]]) -> TrainingBatch:
        """See `Trainee`; every token serves as anchor, that is, as the last committed token of a draft."""
        return collate(groups, self._drop, generators)

    def check_target(self, name: str, target: Target, runtime: Runtime) -> None:
        """Raises ValueError if the target is not the one whose states are read."""
        if self._identity.differing(TargetIdentity.of(target.lm.model.config)):
            raise ValueError(
                f"target={name!r} is not the model whose states are read, {self._recipe.model!r}: leave target out"
            )

    @property
    def _identity(self) -> TargetIdentity:
        return TargetIdentity.of(self.objective.target.model.config)

    def save(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Writes the drafter in bf16; see `paradraft.formats.head`."""
        stored = {name: weight.detach().to(torch.bfloat16) for name, weight in weights.items()}
        if (vocab_map := self.objective.target.vocab_map) is not None:
            vocabulary = self.objective.target.model.config.vocab_size
            stored |= {D2T: vocab_map.d2t(), T2D: vocab_map.t2d(vocabulary)}
        with whole_folder(folder) as new:
            write_head(new, Head(config=self._config, target=self._identity, weights=stored))


def frozen_target(recipe: HeadRecipe, data: RunData, *, has_gradients: bool = False, nf4: bool = False) -> Teacher:
    """Loads the frozen target.

    Args:
        has_gradients: whether the drafter is trained through the target: weights of few bits are numbers then, and the
            pass that decodes them is not used.
        nf4: stores its matrices in 4 bits.

    Raises:
        ValueError: it cannot be loaded, or its context or vocabulary is too small for the samples.
    """
    folder = locate(recipe.model, "target")
    config = load_config(folder)
    check_rows(config.vocab_size, data.largest, f"model {recipe.model!r}")
    if data.longest > (room := context_of(config)):
        raise ValueError(f"the model has room for {room} tokens, a sample has {data.longest}: set max_length={room}")
    if is_decoded_as_stored(folder, config, data.device) and not has_gradients:
        return PassTeacher(load_target(folder).lm, mask_id=None)
    device, dtype = "cpu" if nf4 else str(data.device), "bfloat16" if data.bf16 else "float32"
    model = load_numbers(folder, Runtime(device=device, dtype=dtype))
    if nf4:
        store_in_nf4(model, data.device)
    recipe.set_up_passes(model, on_gpu=data.device.type == "cuda")
    return Teacher(model, vocab_size=used_rows(data.tokenizer), mask_id=None)


def check_memory(
    recipe: HeadRecipe,
    data: RunData,
    *,
    trained: int,
    kept: float,
    rows_per_token: float,
    attended_per_token: float = 1.0,
    has_gradients: bool = False,
    nf4: bool = False,
) -> memory.Estimate:
    """Estimates the memory of a run, before any weights are loaded.

    Args:
        trained: count of trained parameters.
        kept: activation bytes per row.
        rows_per_token: training rows per token of a sample.
        attended_per_token: rows per token in the attention mask.
        has_gradients, nf4: as in `frozen_target`.

    Raises:
        ValueError: the device has too little memory.
    """
    folder = locate(recipe.model, "target")
    skeleton = load_skeleton(folder)
    ids = recipe.draft_ids(skeleton.config.vocab_size)
    rank, width = recipe.rank_of_head or 0, skeleton.config.hidden_size
    if rank > width:
        raise ValueError(f"head_rank={rank}: the states of model {recipe.model!r} have {width} numbers, use fewer")
    trained += rank * (width + ids)
    groups, longest = memory.largest_pass(recipe, data)
    is_packed = is_decoded_as_stored(folder, skeleton.config, data.device) and not has_gradients
    frozen = memory.frozen_bytes(folder, bf16=data.bf16, as_numbers=not is_packed)
    weights = memory.weight_bytes(recipe, trained, data, frozen=frozen)
    if is_packed:
        weights += 4.0 * ids * skeleton.config.hidden_size  # the head as numbers, see `Teacher.logits`
    if nf4:
        weights -= ((2 if data.bf16 else 4) - memory.NF4_BYTES) * memory.parameters_of(skeleton.model.layers)
    needed = memory.estimate_rows(
        trained=trained,
        kept=kept,
        mask=groups * (longest * attended_per_token) ** 2 * 5,
        vocab_size=ids,
        weights=weights,
        rows=groups * longest * rows_per_token,
        device=data.device,
        is_taught=recipe.row_loss.needs_teacher,
    )
    needed.check(data.device)
    return needed
