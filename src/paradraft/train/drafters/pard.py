"""PARD training: adapts a causal LM to predict at mask tokens too (An et al. 2025, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paradraft.data.samples import Sample
from paradraft.drafters.parts.draft_loading import load_draft_lm
from paradraft.drafters.parts.path_heads.previous_token import PreviousTokenHead, load_head, new_head, stored_head
from paradraft.formats.folder import save_model
from paradraft.formats.pard import PREVIOUS_TOKEN_HEAD, TRAINED_K, TRAINED_LENGTH, check_ends_nothing, forget_masks
from paradraft.formats.pard2 import PROJECTION, StateProjection
from paradraft.formats.vocab_map import VocabMap
from paradraft.models.architectures import context_of, spec_of
from paradraft.models.forward import FINAL_NORM
from paradraft.models.output_head import check_linear
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.sources.loading import load_config, load_model, load_skeleton
from paradraft.sources.reduced_head import ReducedHead, reduced_head, set_head, store_map
from paradraft.text.vocabulary import check_rows, used_rows
from paradraft.train import memory
from paradraft.train.drafters.kept_states import features_of
from paradraft.train.drafters.pard_recipe import PardRecipe
from paradraft.train.init.adaptation import add_mask_token, with_adapters
from paradraft.train.init.merging import Adapter
from paradraft.train.objectives.batch import Drop, TrainingBatch, collate
from paradraft.train.objectives.features import FeatureCache
from paradraft.train.objectives.objective import Objective
from paradraft.train.objectives.teacher import Teacher
from paradraft.train.objectives.teacher_loading import is_decoded_as_stored, load_teacher, teacher_folder
from paradraft.train.trainee import RunData


@dataclass(frozen=True, kw_only=True)
class InitialDrafter:
    """A drafter before training.

    Args:
        adapted: the model with its adapters, if any.
        masks: mask tokens; none in an ordinary draft.
        previous: previous-token head, if any.
        vocab_map: of the output head, if it has fewer rows than the embedding; see `paradraft trim`.
    """

    model: PreTrainedModel
    adapted: PeftModel | None
    masks: range
    previous: PreviousTokenHead | None
    vocab_map: VocabMap | None


def initial_drafter(
    recipe: PardRecipe, tokenizer: PreTrainedTokenizerBase, device: str, *, dtype: str = "float32"
) -> InitialDrafter:
    """Loads a recipe's model, and adds mask tokens, adapters and previous-token head.

    Raises:
        ValueError: it cannot be loaded, or mask token or adapters do not fit it.
    """
    folder = recipe.model_folder
    config = load_config(folder)
    head = reduced_head(folder, config)
    model = load_model(folder, Runtime(device=device, dtype=dtype), config, head=head)
    return _ready(model, recipe, tokenizer, head, on_gpu=device.startswith("cuda"))


def drafter_skeleton(recipe: PardRecipe, tokenizer: PreTrainedTokenizerBase, device: str) -> InitialDrafter:
    """Makes the drafter of `initial_drafter` without weights.

    Raises:
        ValueError: as `initial_drafter`, except for errors in the weights.
    """
    folder = recipe.model_folder
    model = load_skeleton(folder)
    head = reduced_head(folder, model.config)
    set_head(model, head)
    return _ready(model, recipe, tokenizer, head, on_gpu=device.startswith("cuda"))


def _ready(
    model: PreTrainedModel,
    recipe: PardRecipe,
    tokenizer: PreTrainedTokenizerBase,
    head: ReducedHead | None,
    *,
    on_gpu: bool,
) -> InitialDrafter:
    vocab_map = None
    if head is not None:
        vocab_map = head.vocab_map.below(model.config.vocab_size, model.device)
        store_map(model, vocab_map)
        model.requires_grad_()
    if recipe.draft_temperature != 1.0:
        check_linear(model.config, f"draft_temperature={recipe.draft_temperature}")
    previous = _previous(model, recipe)
    if recipe.k > 1:
        first = add_mask_token(model, tokenizer, recipe.mask_token_id, masks=recipe.masks)
        masks = range(first, first + recipe.masks)
    else:
        masks = range(0)
        forget_masks(model.config)  # a PARD model trained without masks becomes an ordinary draft
    setattr(model.config, TRAINED_LENGTH, recipe.max_length)
    setattr(model.config, TRAINED_K, recipe.k)
    adapted = None if recipe.lora is None else with_adapters(model, recipe.lora, list(masks), seed=recipe.seed)
    recipe.set_up_passes(model, on_gpu=on_gpu)
    return InitialDrafter(model=model, adapted=adapted, masks=masks, previous=previous, vocab_map=vocab_map)


def _previous(model: PreTrainedModel, recipe: PardRecipe) -> PreviousTokenHead | None:
    """Previous-token head of a recipe: the model's own if it has the wanted rank, else a new one."""
    rank = recipe.previous_token_rank
    own = None if recipe.k == 1 or rank == 0 else load_head(model.config)
    if recipe.k == 1 or rank == 0 or (rank is None and own is None):
        return None
    if own is not None and rank in (None, own.rank):
        return own
    assert rank is not None
    return new_head(model, rank, seed=recipe.seed)


class PardTrainee:
    """The `Trainee` of a PARD draft model; with k = 1 of an ordinary draft."""

    def __init__(
        self,
        recipe: PardRecipe,
        tokenizer: PreTrainedTokenizerBase,
        drafter: InitialDrafter,
        objective: Objective,
        needed: memory.Estimate,
        *,
        name: str = "pard",
    ) -> None:
        self.objective = objective
        self.depths = recipe.k
        self.drafter, self.k = recipe.decoded_with(name)
        self.max_tokens = context_of(drafter.model.config)
        self.masks = drafter.masks
        rows = load_config(recipe.model_folder).vocab_size
        added = ", in an added row that vLLM does not take" if drafter.model.config.vocab_size > rows else ""
        self.notes = (*(f"mask token {mask}{added}" for mask in drafter.masks[:1]), needed.in_words)
        self._recipe = recipe
        self._tokenizer = tokenizer

    def collate(self, groups: list[list[Sample]], generators: list[list[torch.Generator]]) -> TrainingBatch:
        """Makes the rows that COD keeps; see `Trainee`."""
        recipe = self._recipe
        mask_id = self.masks[0] if self.masks else None
        drop = Drop(k=recipe.k, r=recipe.r, r_min=recipe.r_min, mask_id=mask_id, masks=recipe.masks)
        return collate(groups, drop, generators)

    def check_target(self, name: str, target: Target, runtime: Runtime) -> None:
        """Raises ValueError if a mask token ends the target's texts, or the draft's tokens are not the target's."""
        check_ends_nothing(self.masks, target.eos_ids, self._tokenizer, f"a drafter for {name!r}")
        load_draft_lm(self._recipe.model_folder, target, runtime)

    def save(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Writes the draft as a Hugging Face folder in bf16, with merged adapters; see `formats/pard.py`."""
        self.write(folder, weights)

    def write(self, folder: Path, weights: dict[str, Tensor], projection: StateProjection | None = None) -> None:
        """Writes the draft, and the projection of the target's states if it has one; see `save`.

        Args:
            weights: of the model and its previous-token head.
        """
        # A second copy in float32 would set the peak of memory. Adapters are merged in float32, and the norm scaled.
        dtype = "bfloat16" if self._recipe.lora is None else "float32"
        new = initial_drafter(self._recipe, self._tokenizer, "cpu", dtype=dtype)
        cast(Any, new.model.model).norm.float()
        Objective(new.model, previous=new.previous).load_state_dict(weights)
        adapter = None if new.adapted is None else Adapter.of(new.adapted, self._recipe.model)
        model = new.model if new.adapted is None else cast(PreTrainedModel, new.adapted.merge_and_unload())
        cool(model, new.previous, self._recipe.draft_temperature)
        beside = {} if new.previous is None else {PREVIOUS_TOKEN_HEAD: stored_head(new.previous, model.config)}
        model = model.to(torch.bfloat16).eval()
        files: dict[str, str | bytes] = {}
        if adapter is not None:
            more, texts = adapter.files(model, beside)
            beside, files = beside | more, {**texts}
        if projection is not None:
            projection.declare(model.config)
            files |= {PROJECTION: projection.file()}
        save_model(folder, model, self._tokenizer, beside, files)


@torch.no_grad()
def cool(model: PreTrainedModel, previous: PreviousTokenHead | None, temperature: float) -> None:
    """Divides a drafter's logits by a temperature above 0, by scaling its final norm, so that every engine uses it.

    The previous-token head, which reads and corrects the scaled states, is rescaled to match.
    """
    body: Any = model.model
    offset = spec_of(model.config).norm_offset
    body.norm.weight.add_(offset).div_(temperature).sub_(offset)
    if previous is not None:
        previous.state.weight.mul_(temperature)
        previous.correction.weight.div_(temperature)


def build(recipe: PardRecipe, data: RunData) -> PardTrainee:
    """Checks the memory, then loads model and teacher. See `Builder`."""
    run = prepared(recipe, data)
    features = None if run.teacher is None else features_of(recipe, run.teacher, [FINAL_NORM])
    return PardTrainee(recipe, data.tokenizer, run.drafter, objective_of(recipe, data, run, features), run.needed)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The models of a run, and the memory that it needs."""

    drafter: InitialDrafter
    teacher: Teacher | None
    needed: memory.Estimate


def prepared(recipe: PardRecipe, data: RunData, *, beside: int = 0) -> Prepared:
    """Checks the memory and the samples, and loads the models.

    Args:
        beside: trained parameters that are not the model's.

    Raises:
        ValueError: as a `Builder`.
    """
    needed = _check_memory(recipe, data, beside=beside)
    drafter = initial_drafter(recipe, data.tokenizer, str(data.device))
    _check_samples(recipe, data, drafter)
    teacher = None if recipe.teacher is None else _load_teacher(recipe.teacher, data, drafter)
    return Prepared(drafter=drafter, teacher=teacher, needed=needed)


def objective_of(
    recipe: PardRecipe, data: RunData, run: Prepared, features: FeatureCache | None, added: nn.Module | None = None
) -> Objective:
    """The loss of a recipe; see `Objective`."""
    drafter = run.drafter
    return Objective(
        drafter.model,
        teacher=run.teacher,
        row_loss=recipe.row_loss,
        previous=None if drafter.previous is None else drafter.previous.to(data.device),
        vocab_map=drafter.vocab_map,
        unused=sorted({*range(used_rows(data.tokenizer), drafter.model.config.vocab_size), *drafter.masks}),
        features=features,
        added=None if added is None else added.to(data.device),
        bf16=data.bf16,
    )


def _check_memory(recipe: PardRecipe, data: RunData, *, beside: int) -> memory.Estimate:
    """Estimates the memory of a run without loading weights; ValueError if the device has too little."""
    drafter = drafter_skeleton(recipe, data.tokenizer, str(data.device))
    model = drafter.model
    if drafter.previous is not None:
        beside += memory.parameters_of(drafter.previous)
    frozen = 0.0
    if recipe.teacher is not None:
        folder = teacher_folder(recipe.teacher)
        is_packed = is_decoded_as_stored(folder, load_config(folder), data.device)
        frozen = memory.frozen_bytes(folder, bf16=data.bf16, as_numbers=not is_packed)
    weights = memory.weight_bytes(recipe, memory.parameters_of(model) + beside, data, frozen=frozen)
    groups, longest = memory.largest_pass(recipe, data)
    rows = memory.rows_of(longest, k=recipe.k, r=recipe.r, r_min=recipe.r_min)
    needed = memory.estimate(
        recipe,
        model,
        weights=weights,
        rows=rows,
        passes=groups,
        bf16=data.bf16,
        device=data.device,
        is_taught=recipe.teacher is not None,
        beside=beside,
    )
    needed.check(data.device)
    return needed


def _check_samples(recipe: PardRecipe, data: RunData, drafter: InitialDrafter) -> None:
    """Raises ValueError if samples contain a mask token or an id outside the embedding, or exceed the context."""
    masks = list(drafter.masks)
    if any(np.isin(sample.tokens, masks).any() for sample in data.samples):
        raise ValueError(f"the mask token {drafter.masks[0]} occurs in the data: choose another mask_token_id")
    config = drafter.model.config
    check_rows(config.vocab_size, data.largest, f"model {recipe.model!r}")
    if data.longest > context_of(config):
        room = context_of(config)
        raise ValueError(f"the model has room for {room} tokens, a sample has {data.longest}: set max_length={room}")


def _load_teacher(name: str, data: RunData, drafter: InitialDrafter) -> Teacher:
    teacher = load_teacher(
        name,
        data.tokenizer,
        mask_id=drafter.masks[0] if drafter.masks else None,
        masks=len(drafter.masks),
        longest=data.longest,
        largest=data.largest,
        runtime=Runtime(device=str(data.device), dtype="bfloat16" if data.bf16 else "float32"),
    )
    teacher.model.set_attn_implementation(drafter.model.config._attn_implementation)
    return teacher
