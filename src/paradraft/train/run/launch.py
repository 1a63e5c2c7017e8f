"""Launches a training run from a recipe; a stopped run resumes from its last checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from datetime import date

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from paradraft.files import one_line_when_full
from paradraft.train.recipe import CHECKPOINT, Recipe
from paradraft.train.run import progress, provenance
from paradraft.train.run.checkpoint import Checkpoints, State, exclusive
from paradraft.train.run.disk import estimate
from paradraft.train.run.processes import as_one, stop_requests
from paradraft.train.run.progress import Report
from paradraft.train.run.provenance import difference
from paradraft.train.run.setup import Preparation, prepare
from paradraft.train.run.trainer import Loop
from paradraft.train.trainee import Builder, R


def is_trained(recipe: Recipe) -> bool:
    """Whether `recipe.out` already holds this recipe's drafter.

    Raises:
        ValueError: it contains another model, or other files, which training would overwrite.
    """
    if not recipe.out.exists() or not any(recipe.out.iterdir()):
        return False
    if not (recipe.out / provenance.RECORD).exists():
        raise ValueError(f"{recipe.out} holds files of something else: choose another `out`")
    if not (recipe.out / "config.json").exists():
        return False
    if provenance.read_record(recipe.out).get("fingerprint") != recipe.fingerprint:
        raise ValueError(
            f"{recipe.out} holds a model of another recipe, or of other data: delete it, or choose another `out`"
        )
    return True


def _ignore(line: str) -> None:
    pass


def train(
    recipe: R, build: Builder[R], report: Callable[[Report], None], *, announce: Callable[[str], None] = _ignore
) -> bool:
    """Runs a recipe to its end, from its last checkpoint if there is one.

    Args:
        report: called in the main process, every `recipe.log_every` steps, after the last one, and after each
            evaluation.
        announce: called in the main process with lines for the user: a summary before the first step, and the
            expected duration after some steps.

    Ctrl-C and SIGTERM end the step, write a checkpoint and stop the run; see `paradraft.train.run.processes`.

    Returns:
        False if `recipe.out` already contained the drafter.

    Raises:
        ValueError: model, data or teacher cannot be used, there is not enough memory or disk space, all checkpoints
            are damaged, or `recipe.out` contains other files or is in use by another run.
        OSError: the disk is full.
        StoppedError: the run was stopped by a signal, after writing a checkpoint.
    """
    accelerator = _accelerator(recipe)
    recipe.check_device(accelerator.device.type)
    checkpoints = Checkpoints(recipe.out / CHECKPOINT, accelerator, recipe.identity)
    with ExitStack() as stack:
        stack.enter_context(one_line_when_full(recipe.out, "the same command goes on from the last checkpoint"))
        state: State | None = None
        with as_one(accelerator):
            if accelerator.is_main_process:
                stack.enter_context(exclusive(recipe.out))
        with as_one(accelerator):
            if is_trained(recipe):
                # The finished run may have been killed before it deleted its checkpoints.
                if accelerator.is_main_process:
                    checkpoints.delete()
                return False
            if accelerator.is_main_process:  # only there, because it reads whole checkpoints
                state = checkpoints.state()
        # All processes use the day on which the run began, also after a resume and around midnight.
        began = date.today().isoformat() if state is None else state.began
        state, began = broadcast_object_list([state, began])
        with as_one(accelerator):
            prepared = _prepared(recipe, build, accelerator, state, began)
            loader = prepared.loader(accelerator.device) if accelerator.is_main_process else None
            if accelerator.is_main_process:
                need = estimate(recipe, prepared.trainee.objective, steps=prepared.steps, measures=prepared.decodes)
                need.check(recipe.out, checkpoints.folder)
                resumed = "" if state is None else f", going on after step {state.step}"
                announce(f"{prepared.in_words} on {accelerator.device}{resumed}")
        with stop_requests() as request:
            Loop(prepared, loader, accelerator, checkpoints, state, request, report, announce).run()
        return True


def _prepared(recipe: R, build: Builder[R], accelerator: Accelerator, state: State | None, began: str) -> Preparation:
    prepared = prepare(recipe, build, accelerator.device, processes=accelerator.num_processes, began=began)
    if state is None:
        return prepared
    if state.bf16 != prepared.bf16:
        before = str(state.bf16).lower()
        raise ValueError(f"the run in {recipe.out} began with bf16={before}, and here it is not: set bf16={before}")
    changed = None if state.learnt is None else difference(state.learnt, prepared.learnt)
    if changed is not None:
        raise ValueError(
            f"the run in {recipe.out} began with other training tokens, {changed}; bring back what was there, delete "
            f"{recipe.out}, or choose another `out`"
        )
    return prepared


def _accelerator(recipe: Recipe) -> Accelerator:
    if recipe.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda: there is no GPU here, use device=cpu")
    progress.check_installed(recipe.report_to)
    try:
        accelerator = Accelerator(
            # Without `cpu`, accelerate does not join processes on CPUs: each would train separately.
            cpu=recipe.device == "cpu" or not torch.accelerator.is_available(),
            log_with=list(recipe.report_to) or None,
            project_dir=str(recipe.out / "logs") if recipe.report_to else None,
        )
    except (ValueError, ImportError) as error:
        raise ValueError(f"accelerate cannot begin: {error}") from None
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != accelerator.num_processes:
        raise ValueError(
            f"{started} processes were started, and accelerate joined {accelerator.num_processes} of them on "
            f"{accelerator.device}: set device=cpu, or start one process"
        )
    return accelerator
