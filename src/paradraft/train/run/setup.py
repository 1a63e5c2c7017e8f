"""Setup of a training run: loads data and models, and checks them against each other."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

import numpy as np
import torch

from paradraft.data.dataset import load_samples
from paradraft.data.mix import epoch_size
from paradraft.data.samples import Sample, hold_out, prompt_of
from paradraft.environment import is_main_process
from paradraft.models.architectures import context_of
from paradraft.models.devices import computes_bf16
from paradraft.models.runtime import STORED, Runtime
from paradraft.sources.load_plan import Checkpoint
from paradraft.sources.loading import load_config, load_generation_config, load_tokenizer, locate
from paradraft.text.vocabulary import check_rows, named_ends
from paradraft.train.objectives.batch import TrainingBatch, pack
from paradraft.train.recipe import Recipe
from paradraft.train.recipe_parts import ignored_settings
from paradraft.train.run.acceptance import AcceptanceMeter, DrafterLoader
from paradraft.train.run.provenance import Learnt, learnt_of
from paradraft.train.samples import SampleSource, SourceData, load_source
from paradraft.train.trainee import Builder, R, RunData, Trainee

MOST_ROOM = 4096
"""Most tokens of a prompt and its answer when a run decodes, or `max_length` if its source decodes."""


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Everything that a run needs.

    Args:
        began: first day of the run, as YYYY-MM-DD.
        largest: largest token id of all samples.
        per_pass: batch size of this process.
    """

    recipe: Recipe
    trainee: Trainee
    source: SampleSource
    began: str
    learnt: Learnt
    samples: list[Sample]
    held_out: list[Sample]
    largest: int
    bf16: bool
    per_pass: int

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return _steps(self.recipe, epoch_size(self.samples))

    @property
    def in_words(self) -> str:
        """Summary of the run, in one line."""
        recipe, trainee, tokens = self.recipe, self.trainee, sum(len(sample.tokens) for sample in self.samples)
        held_out = f", {len(self.held_out):,} more held out" if self.held_out else ""
        taken = epoch_size(self.samples)
        weighed = "" if taken == len(self.samples) else f", {taken:,} taken in an epoch"
        return (
            f"{trainee.drafter}, K = {trainee.k}: "
            f"{len(self.samples):,} samples of {tokens:,} tokens{weighed}{held_out}; "
            f"{self.steps:,} steps of {recipe.samples_per_step} samples in {'bfloat16' if self.bf16 else 'float32'}; "
            + ", ".join((*self.source.notes, *trainee.notes))
        )

    def batches(self, samples: Sequence[Sample], seeds: Sequence[int]) -> list[TrainingBatch]:
        """Makes the batches of some samples; the rows that COD drops depend on each sample's seed only."""
        batches = []
        for start in range(0, len(samples), self.per_pass):
            chunk = list(samples[start : start + self.per_pass])
            groups = pack(chunk, self.recipe.max_length) if self.recipe.pack else [[i] for i in range(len(chunk))]
            generators = [torch.Generator().manual_seed(seed) for seed in seeds[start : start + self.per_pass]]
            batches.append(
                self.trainee.collate(
                    [[chunk[index] for index in group] for group in groups],
                    [[generators[index] for index in group] for group in groups],
                )
            )
        return batches

    @property
    def decodes(self) -> bool:
        """Whether the run decodes with its drafter, to measure it or for samples."""
        return bool(self.held_out) or self.source.decodes

    def loader(self, device: torch.device) -> DrafterLoader | None:
        """Loads the target that the run decodes with; None without one, or if nothing is to be decoded.

        Raises:
            ValueError: the target cannot be loaded, or does not fit drafter or samples.
        """
        recipe = self.recipe
        target = recipe.measured_with
        recipe.check_measurable(len(self.held_out))
        if target is None and self.source.decodes:
            raise ValueError(f"source={recipe.source}: no target to decode with, set target")
        if target is None or not self.decodes:
            return None
        checkpoint = Checkpoint.find(target, recipe.ROLES["target"])
        config = checkpoint.config
        read = self.largest if self.source.decodes else max(map(max, self._prompts))
        check_rows(config.vocab_size, int(read), f"target {target!r}")
        most = max(MOST_ROOM, recipe.max_length + 1) if self.source.decodes else MOST_ROOM
        dtype = STORED if checkpoint.is_quantized else "bfloat16" if computes_bf16(device) else "float32"
        decodes_on = "cpu" if checkpoint.is_quantized else str(device)  # the passes of such weights run on CPUs
        runtime = Runtime(
            device=decodes_on, dtype=dtype, capacity=min(context_of(config), self.trainee.max_tokens, most)
        )
        loader = DrafterLoader(target, drafter=self.trainee.drafter, k=self.trainee.k, runtime=runtime)
        self.trainee.check_target(target, loader.target, loader.runtime)
        return loader

    def acceptance(self, loader: DrafterLoader | None) -> AcceptanceMeter | None:
        """Makes the meter of acceptance lengths; None without a target or held-out samples.

        Raises:
            ValueError: the prompts exceed the target's context.
        """
        if loader is None or not self.held_out:
            return None
        return AcceptanceMeter(loader, self._prompts, answer_tokens=self.recipe.answer_tokens)

    @property
    def _prompts(self) -> list[list[int]]:
        """Those on which acceptance lengths are measured."""
        return [prompt_of(sample, most=self.recipe.prompt_tokens) for sample in self.held_out[: self.recipe.prompts]]


def prepare(recipe: R, build: Builder[R], device: torch.device, *, processes: int, began: str = "") -> Preparation:
    """Loads and checks data, then models; writes nothing.

    Args:
        processes: count of processes that share the samples of a step.
        began: first day of the run, as YYYY-MM-DD, which chat templates write; empty for today.

    Raises:
        ValueError: model, data or teacher cannot be used, the settings do not fit them, or there is not enough memory.
    """
    if recipe.samples_per_step % processes:
        raise ValueError(
            f"samples_per_step={recipe.samples_per_step} cannot be shared evenly by {processes} processes: "
            f"use {-(-recipe.samples_per_step // processes) * processes}"
        )
    base = locate(recipe.model, recipe.ROLES["model"])
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
        seed=recipe.seed,
    )
    training, held_out = hold_out(samples, recipe.held_out)
    steps = _steps(recipe, epoch_size(training))
    for warning in ignored_settings(recipe, steps=steps) if is_main_process() else ():
        warnings.warn(warning, stacklevel=4)
    source = _source(recipe, training, steps)
    bf16 = computes_bf16(device) if recipe.bf16 is None else recipe.bf16
    per_pass = min(recipe.samples_per_pass or recipe.samples_per_step, recipe.samples_per_step // processes)
    data = RunData(
        tokenizer=tokenizer,
        samples=samples,
        longest=max(len(sample.tokens) for sample in samples),
        largest=int(max(np.asarray(sample.tokens).max() for sample in samples)),
        device=device,
        bf16=bf16,
        samples_per_pass=per_pass,
        measures=bool(held_out) or source.decodes,
    )
    return Preparation(
        recipe=recipe,
        trainee=build(recipe, data),
        source=source,
        began=began,
        learnt=learnt_of(samples, tokenizer),
        samples=training,
        held_out=held_out,
        largest=data.largest,
        bf16=bf16,
        per_pass=per_pass,
    )


def _source(recipe: Recipe, samples: list[Sample], steps: int) -> SampleSource:
    data = SourceData(
        samples=samples,
        per_step=recipe.samples_per_step,
        steps=steps,
        seed=recipe.seed,
        prompt_tokens=recipe.prompt_tokens,
        is_taught=recipe.divergence is not None,
    )
    return load_source(recipe.source, data)


def _steps(recipe: Recipe, samples: int) -> int:
    if recipe.steps is not None:
        return recipe.steps
    return max(math.ceil(samples * (recipe.epochs or 0.0) / recipe.samples_per_step), 1)
