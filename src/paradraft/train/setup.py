"""Everything that has to be there before the first step: loaded, and checked against each other."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paradraft.data.dataset import load_samples
from paradraft.data.samples import Sample, hold_out
from paradraft.environment import is_main_process
from paradraft.formats.pard import check_ends_nothing, forget_masks
from paradraft.models.loading import (
    load_config,
    load_generation_config,
    load_model,
    load_skeleton,
    load_tokenizer,
    locate,
)
from paradraft.models.runtime import Runtime, computes_bf16
from paradraft.train import memory
from paradraft.train.acceptance import AcceptanceMeter, prompt_of
from paradraft.train.batch import Batch, Drop, collate, pack
from paradraft.train.pard import Objective, add_mask_token
from paradraft.train.provenance import Learnt, learnt_of
from paradraft.train.recipe import Lora, PardRecipe, ignored_settings
from paradraft.train.rows import FLEX
from paradraft.train.teacher import Teacher, load_teacher
from paradraft.train.vocabulary import check_rows, named_ends


def with_adapters(model: PreTrainedModel, lora: Lora, masks: list[int], *, seed: int) -> PeftModel:
    """Puts adapters into a model, in place; all else is frozen but the embeddings of the masks, which are new.

    Raises:
        ValueError: the model has no layers of these names.
    """
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=lora.targets,
        trainable_token_indices=masks or None,
        task_type="CAUSAL_LM",
    )
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            # peft still asks for the property by the name that `transformers` has given up.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            torch.manual_seed(seed)
            return cast(PeftModel, get_peft_model(model, config))
    except ValueError as error:
        raise ValueError(f"lora: {str(error).splitlines()[0]}") from None


def merged(adapted: PeftModel) -> PreTrainedModel:
    """The ordinary model that the adapters amount to."""
    return cast(PreTrainedModel, adapted.merge_and_unload())


@dataclass(frozen=True, kw_only=True)
class InitialDrafter:
    """A drafter that has learnt nothing yet, in float32.

    Args:
        model: what is trained.
        adapted: the same with its adapters, if it has any.
        mask_id: its mask token; None for an ordinary draft.
    """

    model: PreTrainedModel
    adapted: PeftModel | None
    mask_id: int | None


def initial_drafter(recipe: PardRecipe, tokenizer: PreTrainedTokenizerBase, device: str) -> InitialDrafter:
    """Loads a recipe's model and makes it ready to learn.

    Raises:
        ValueError: it cannot be loaded, or mask token or adapters do not fit it.
    """
    model = load_model(locate(recipe.model, "draft"), Runtime(device=device, dtype="float32"))
    return _ready(model, recipe, tokenizer, on_gpu=device.startswith("cuda"))


def drafter_skeleton(recipe: PardRecipe, tokenizer: PreTrainedTokenizerBase, device: str) -> PreTrainedModel:
    """What `initial_drafter` would train, without its weights.

    Raises:
        ValueError: as `initial_drafter`, but for what is wrong with the weights.
    """
    model = load_skeleton(locate(recipe.model, "draft"))
    return _ready(model, recipe, tokenizer, on_gpu=device.startswith("cuda")).model


def _ready(
    model: PreTrainedModel, recipe: PardRecipe, tokenizer: PreTrainedTokenizerBase, *, on_gpu: bool
) -> InitialDrafter:
    if recipe.k > 1:
        mask_id = add_mask_token(model, tokenizer, recipe.mask_token_id, masks=recipe.masks)
    else:
        mask_id = None
        forget_masks(model.config)  # a PARD model that learns without masks is none any more
    masks = [] if mask_id is None else list(range(mask_id, mask_id + recipe.masks))
    adapted = None if recipe.lora is None else with_adapters(model, recipe.lora, masks, seed=recipe.seed)
    model.set_attn_implementation((FLEX if on_gpu else "sdpa") if recipe.attention == "auto" else recipe.attention)
    if recipe.gradient_checkpointing:
        # `transformers` renamed it in 5.23.
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    return InitialDrafter(model=model, adapted=adapted, mask_id=mask_id)


MOST_ROOM = 4096
"""Most tokens of a prompt and its answer when acceptance lengths are measured."""


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What a run works with.

    Args:
        recipe: the run.
        tokenizer: the drafter's.
        began: the day on which the run began, as YYYY-MM-DD.
        learnt: a description of all samples.
        samples: to learn.
        held_out: to measure on.
        mask_id: the mask token; None for an ordinary draft.
        objective: the drafter and its loss.
        bf16: whether passes compute in bf16.
        per_pass: samples that this process reads at a time.
    """

    recipe: PardRecipe
    tokenizer: PreTrainedTokenizerBase
    began: str
    learnt: Learnt
    samples: list[Sample]
    held_out: list[Sample]
    mask_id: int | None
    objective: Objective
    bf16: bool
    per_pass: int

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return _steps(self.recipe, len(self.samples))

    def batches(self, samples: Sequence[Sample], seeds: Sequence[int]) -> list[Batch]:
        """The passes over some samples; the rows that are dropped depend on a sample's own seed alone."""
        recipe = self.recipe
        drop = Drop(k=recipe.k, r=recipe.r, r_min=recipe.r_min, mask_id=self.mask_id, masks=recipe.masks)
        batches = []
        for start in range(0, len(samples), self.per_pass):
            some = list(samples[start : start + self.per_pass])
            groups = pack(some, recipe.max_length) if recipe.pack else [[index] for index in range(len(some))]
            generators = [torch.Generator().manual_seed(seed) for seed in seeds[start : start + self.per_pass]]
            batches.append(
                collate(
                    [[some[index] for index in group] for group in groups],
                    drop,
                    [[generators[index] for index in group] for group in groups],
                )
            )
        return batches

    def finished_model(self, weights: dict[str, torch.Tensor]) -> PreTrainedModel:
        """The drafter as it is shipped, in bf16, from the weights of `objective`."""
        new = initial_drafter(self.recipe, self.tokenizer, "cpu")
        Objective(new.model).load_state_dict(weights)
        model = new.model if new.adapted is None else merged(new.adapted)
        return model.to(torch.bfloat16).eval()

    def acceptance(self, device: torch.device) -> AcceptanceMeter | None:
        """What measures acceptance lengths; None where there is nothing to measure with.

        Raises:
            ValueError: the target cannot be loaded, or the prompts do not fit into it.
        """
        recipe = self.recipe
        target = recipe.measured_with
        recipe.check_measurable(len(self.held_out))
        if target is None or not self.held_out:
            return None
        prompts = [prompt_of(sample, most=recipe.prompt_tokens) for sample in self.held_out[: recipe.prompts]]
        dtype = "bfloat16" if computes_bf16(device) else "float32"
        base = locate(recipe.model, "draft")
        if self.mask_id is not None:
            masks = range(self.mask_id, self.mask_id + recipe.masks)
            ends = named_ends(load_generation_config(locate(target, "target")))
            check_ends_nothing(masks, ends, self.tokenizer, f"a drafter for {target!r}")
        configs = [load_config(name) for name in (locate(target, "target"), base)]
        check_rows(configs[0].vocab_size, int(max(map(max, prompts))), f"target {target!r}")
        room = (config.max_position_embeddings for config in configs)
        runtime = Runtime(device=str(device), dtype=dtype, capacity=min(*room, MOST_ROOM))
        return AcceptanceMeter(target, base, prompts, k=recipe.k, answer_tokens=recipe.answer_tokens, runtime=runtime)


def prepare(recipe: PardRecipe, device: torch.device, *, processes: int, began: str = "") -> Preparation:
    """Loads and checks; nothing is written. Data come first, and no weights are loaded that do not fit into memory.

    Args:
        recipe: the run.
        device: where this process trains.
        processes: how many processes share the samples of a step.
        began: the day on which the run began, as YYYY-MM-DD, which chat templates write; empty if it begins today.

    Raises:
        ValueError: model, data or teacher cannot be used, the settings do not fit them, or there is not enough memory.
    """
    if recipe.samples_per_step % processes:
        raise ValueError(
            f"samples_per_step={recipe.samples_per_step} cannot be shared evenly by {processes} processes: "
            f"use {-(-recipe.samples_per_step // processes) * processes}"
        )
    base = locate(recipe.model, "draft")
    tokenizer = load_tokenizer(base)
    samples = load_samples(
        recipe.data,
        tokenizer,
        max_length=recipe.max_length,
        long=recipe.long,
        columns=recipe.columns,
        chat_template_kwargs=recipe.chat_template_kwargs,
        date_string=recipe.date_string,
        day=date.fromisoformat(began) if began else None,
        end_ids=named_ends(load_config(base), load_generation_config(base)),
        skip_unlabelled=recipe.skip_unlabelled,
    )
    learnt, held_out = hold_out(samples, recipe.held_out)
    for complaint in ignored_settings(recipe, steps=_steps(recipe, len(learnt))) if is_main_process() else ():
        warnings.warn(complaint, stacklevel=4)
    bf16 = computes_bf16(device) if recipe.bf16 is None else recipe.bf16
    per_pass = min(recipe.samples_per_pass or recipe.samples_per_step, recipe.samples_per_step // processes)
    _check_memory(recipe, tokenizer, samples, device, bf16=bf16, per_pass=per_pass, measures=bool(held_out))
    drafter = initial_drafter(recipe, tokenizer, str(device))
    _check_samples(samples, drafter, recipe)
    teacher = _teacher_of(
        recipe, tokenizer, samples, drafter, Runtime(device=str(device), dtype="bfloat16" if bf16 else "float32")
    )
    return Preparation(
        recipe=recipe,
        tokenizer=tokenizer,
        began=began,
        learnt=learnt_of(samples, tokenizer),
        samples=learnt,
        held_out=held_out,
        mask_id=drafter.mask_id,
        objective=Objective(drafter.model, teacher=teacher, kind=recipe.divergence or "forward_kl", bf16=bf16),
        bf16=bf16,
        per_pass=per_pass,
    )


def _check_memory(
    recipe: PardRecipe,
    tokenizer: PreTrainedTokenizerBase,
    samples: list[Sample],
    device: torch.device,
    *,
    bf16: bool,
    per_pass: int,
    measures: bool,
) -> None:
    """Raises ValueError if the device has not the memory that the run takes."""
    drafter = drafter_skeleton(recipe, tokenizer, str(device))
    weights = memory.weight_bytes(recipe, drafter, device, bf16=bf16, measures=measures)
    longest, _ = _extremes(samples)
    groups = per_pass
    if recipe.pack:
        groups = min(groups, math.ceil(groups * longest / recipe.max_length) + 1)
        longest = recipe.max_length if groups < per_pass else longest
    rows = memory.rows_of(longest, recipe)
    memory.estimate(recipe, drafter, weights=weights, rows=rows, passes=groups, bf16=bf16).check(device)


def _check_samples(samples: list[Sample], drafter: InitialDrafter, recipe: PardRecipe) -> None:
    """Raises ValueError if samples hold the mask token, or one without a row, or do not fit into the model."""
    config, mask_id = drafter.model.config, drafter.mask_id
    masks = set() if mask_id is None else set(range(mask_id, mask_id + recipe.masks))
    if any(not masks.isdisjoint(sample.tokens) for sample in samples):
        raise ValueError(f"the mask token {mask_id} occurs in the data: choose another mask_token_id")
    longest, largest = _extremes(samples)
    check_rows(config.vocab_size, largest, f"model {recipe.model!r}")
    if longest > config.max_position_embeddings:
        room = config.max_position_embeddings
        raise ValueError(f"the model has room for {room} tokens, a sample has {longest}: set max_length={room}")


def _teacher_of(
    recipe: PardRecipe,
    tokenizer: PreTrainedTokenizerBase,
    samples: list[Sample],
    drafter: InitialDrafter,
    runtime: Runtime,
) -> Teacher | None:
    if recipe.teacher is None:
        return None
    longest, largest = _extremes(samples)
    teacher = load_teacher(
        recipe.teacher,
        tokenizer,
        mask_id=drafter.mask_id,
        masks=recipe.masks,
        longest=longest,
        largest=largest,
        runtime=runtime,
    )
    teacher.model.set_attn_implementation(drafter.model.config._attn_implementation)
    return teacher


def _extremes(samples: list[Sample]) -> tuple[int, int]:
    """Tokens of the longest sample, and the largest token id of all."""
    return max(len(sample.tokens) for sample in samples), int(max(max(sample.tokens) for sample in samples))


def _steps(recipe: PardRecipe, samples: int) -> int:
    if recipe.steps is not None:
        return recipe.steps
    return max(math.ceil(samples * (recipe.epochs or 0.0) / recipe.samples_per_step), 1)
