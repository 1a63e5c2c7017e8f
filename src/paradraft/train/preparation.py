"""Everything that has to be there before the first step: loaded, and checked against each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paradraft.drafters.pard import forget_masks
from paradraft.models.loading import load_config, load_generation_config, load_model, load_tokenizer, locate
from paradraft.models.runtime import Runtime, computes_bf16
from paradraft.train import memory
from paradraft.train.adapters import merged, with_adapters
from paradraft.train.attention import FLEX
from paradraft.train.batch import Batch, Drop, collate, pack
from paradraft.train.data import load_samples
from paradraft.train.evaluation import AcceptanceMeter, prompt_of
from paradraft.train.held_out import hold_out
from paradraft.train.pard import Objective, add_mask_token
from paradraft.train.recipe import PardRecipe
from paradraft.train.sample import Sample
from paradraft.train.teacher import Teacher, load_teacher
from paradraft.train.vocabulary import check_rows, named_ends

MOST_ROOM = 4096
"""Most tokens of a prompt and its answer when acceptance lengths are measured."""


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What a run works with.

    Args:
        recipe: the run.
        tokenizer: the drafter's.
        samples: to learn.
        held_out: to measure on.
        mask_id: the mask token; None for an ordinary draft.
        objective: the drafter and its loss.
        bf16: whether passes compute in bf16.
        per_pass: samples that this process reads at a time.
    """

    recipe: PardRecipe
    tokenizer: PreTrainedTokenizerBase
    samples: list[Sample]
    held_out: list[Sample]
    mask_id: int | None
    objective: Objective
    bf16: bool
    per_pass: int

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        recipe = self.recipe
        if recipe.steps is not None:
            return recipe.steps
        return max(math.ceil(len(self.samples) * (recipe.epochs or 0.0) / recipe.samples_per_step), 1)

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
        new = _new_drafter(self.recipe, self.tokenizer, "cpu")
        Objective(new.model).load_state_dict(weights)
        model = new.model if new.adapted is None else merged(new.adapted)
        return model.to(torch.bfloat16).eval()

    def acceptance(self, device: torch.device) -> AcceptanceMeter | None:
        """What measures acceptance lengths; None where there is nothing to measure with.

        Raises:
            ValueError: the target cannot be loaded, or the prompts do not fit into it.
        """
        recipe = self.recipe
        target = recipe.teacher if recipe.target is None else recipe.target
        recipe.check_measurable(len(self.held_out))
        if target is None or not self.held_out:
            return None
        prompts = [prompt_of(sample, most=recipe.prompt_tokens) for sample in self.held_out[: recipe.prompts]]
        dtype = "bfloat16" if computes_bf16(device) else "float32"
        base = locate(recipe.model, "draft")
        configs = [load_config(name) for name in (locate(target, "target"), base)]
        check_rows(configs[0].vocab_size, int(max(map(max, prompts))), f"target {target!r}")
        room = (config.max_position_embeddings for config in configs)
        runtime = Runtime(device=str(device), dtype=dtype, capacity=min(*room, MOST_ROOM))
        return AcceptanceMeter(target, base, prompts, k=recipe.k, answer_tokens=recipe.answer_tokens, runtime=runtime)

    def check_memory(self, device: torch.device) -> None:
        """Raises ValueError if the device has not the memory that the run takes beside the models that are loaded."""
        recipe, teacher = self.recipe, self.objective.teacher
        longest = max(len(sample.tokens) for sample in [*self.samples, *self.held_out])
        groups = self.per_pass
        if recipe.pack:
            groups = min(groups, math.ceil(groups * longest / recipe.max_length) + 1)
            longest = recipe.max_length if groups < self.per_pass else longest
        rows = memory.rows_of(longest, recipe)
        model = self.objective.model
        memory.estimate(recipe, model, rows=rows, passes=groups, bf16=self.bf16, has_teacher=teacher is not None).check(
            device
        )


def prepare(recipe: PardRecipe, device: torch.device, *, processes: int) -> Preparation:
    """Loads and checks; nothing is written.

    Args:
        recipe: the run.
        device: where this process trains.
        processes: how many processes share the samples of a step.

    Raises:
        ValueError: model, data or teacher cannot be used, or the settings do not fit them.
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
        columns=recipe.columns,
        chat_template_kwargs=recipe.chat_template_kwargs,
        end_ids=named_ends(load_config(base), load_generation_config(base)),
        skip_unlabelled=recipe.skip_unlabelled,
    )
    drafter = _new_drafter(recipe, tokenizer, str(device))
    model, mask_id = drafter.model, drafter.mask_id
    masks = set() if mask_id is None else set(range(mask_id, mask_id + recipe.masks))
    if any(not masks.isdisjoint(sample.tokens) for sample in samples):
        raise ValueError(f"the mask token {mask_id} occurs in the data: choose another mask_token_id")
    longest = max(len(sample.tokens) for sample in samples)
    largest = int(max(max(sample.tokens) for sample in samples))
    check_rows(model.config.vocab_size, largest, f"model {recipe.model!r}")
    if longest > model.config.max_position_embeddings:
        room = model.config.max_position_embeddings
        raise ValueError(f"the model has room for {room} tokens, a sample has {longest}: set max_length={room}")
    bf16 = computes_bf16(device) if recipe.bf16 is None else recipe.bf16
    teacher: Teacher | None = None
    if recipe.teacher is not None:
        runtime = Runtime(device=str(device), dtype="bfloat16" if bf16 else "float32")
        teacher = load_teacher(
            recipe.teacher,
            tokenizer,
            mask_id=mask_id,
            masks=recipe.masks,
            longest=longest,
            largest=largest,
            runtime=runtime,
        )
        teacher.model.set_attn_implementation(model.config._attn_implementation)
    learnt, held_out = hold_out(samples, recipe.held_out)
    return Preparation(
        recipe=recipe,
        tokenizer=tokenizer,
        samples=learnt,
        held_out=held_out,
        mask_id=mask_id,
        objective=Objective(model, teacher=teacher, kind=recipe.divergence or "forward_kl", bf16=bf16),
        bf16=bf16,
        per_pass=min(recipe.samples_per_pass or recipe.samples_per_step, recipe.samples_per_step // processes),
    )


@dataclass(frozen=True, kw_only=True)
class _NewDrafter:
    """The drafter as it is before the first step, in float32.

    Args:
        model: what is trained.
        adapted: the same with its adapters, if it has any.
        mask_id: its mask token; None for an ordinary draft.
    """

    model: PreTrainedModel
    adapted: PeftModel | None
    mask_id: int | None


def _new_drafter(recipe: PardRecipe, tokenizer: PreTrainedTokenizerBase, device: str) -> _NewDrafter:
    model = load_model(locate(recipe.model, "draft"), Runtime(device=device, dtype="float32"))
    if recipe.k > 1:
        mask_id = add_mask_token(model, tokenizer, recipe.mask_token_id, masks=recipe.masks)
    else:
        mask_id = None
        forget_masks(model.config)  # a PARD model that learns without masks is none any more
    masks = [] if mask_id is None else list(range(mask_id, mask_id + recipe.masks))
    adapted = None if recipe.lora is None else with_adapters(model, recipe.lora, masks, seed=recipe.seed)
    on_gpu = device.startswith("cuda")
    model.set_attn_implementation((FLEX if on_gpu else "sdpa") if recipe.attention == "auto" else recipe.attention)
    if recipe.gradient_checkpointing:
        # `transformers` renamed it in 5.23.
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    return _NewDrafter(model=model, adapted=adapted, mask_id=mask_id)
