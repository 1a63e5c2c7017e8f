"""The training loop: samples in, drafter folder out; can be stopped and goes on where it was.

What a step sees is a function of (seed, step), so a resumed run takes the same steps as one that
was never stopped.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from paradraft.models.loading import Runtime, computes_bf16, load_model, load_tokenizer, locate
from paradraft.train import pard
from paradraft.train.checkpoint import load_state, save_model, save_state
from paradraft.train.data import Sample, load_samples
from paradraft.train.losses import depth_accuracy, depth_cross_entropy
from paradraft.train.optimizers import Optimizers
from paradraft.train.recipe import PardRecipe, read_fingerprint
from paradraft.train.teacher import load_teacher

CHECKPOINT = "checkpoint"
RECORD = "recipe.json"
"""Inside `out`: the state of an unfinished run, and what is or was trained there."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A report on the steps since the last one.

    Args:
        step: steps done.
        steps: steps of the whole run.
        loss: mean loss in nats.
        accuracy: for each depth the share of rows predicted correctly.
        rows_per_s: training rows per second.
        left_s: estimated seconds to the end.
    """

    step: int
    steps: int
    loss: float
    accuracy: tuple[float, ...]
    rows_per_s: float
    left_s: float


def is_trained(recipe: PardRecipe) -> bool:
    """Whether `recipe.out` already holds this recipe's drafter.

    Raises:
        ValueError: it holds another model, which training would overwrite.
    """
    if not (recipe.out / "config.json").exists():
        return False
    if read_fingerprint(recipe.out / RECORD) != recipe.fingerprint:
        raise ValueError(f"{recipe.out} holds a model of another recipe: delete it, or choose another `out`")
    return True


def train_pard(recipe: PardRecipe, report: Callable[[Progress], None]) -> None:
    """Runs a recipe to its end, from its last checkpoint if there is one.

    Args:
        recipe: the run.
        report: called every `recipe.log_every` steps and after the last one.

    Raises:
        ValueError: model, data or teacher cannot be used, or the checkpoint belongs to another recipe.
    """
    base = locate(recipe.model, "draft")
    tokenizer = load_tokenizer(base)
    samples = load_samples(recipe.data, tokenizer, max_length=recipe.max_length)
    model = load_model(base, Runtime(device=recipe.device, dtype="float32"))
    mask_id = pard.add_mask_token(model, tokenizer, recipe.mask_token_id) if recipe.k > 1 else None
    if mask_id is not None and any(mask_id in sample.tokens for sample in samples):
        raise ValueError(f"the mask token {mask_id} occurs in the data: choose another mask_token_id")
    in_bf16 = computes_bf16(model.device) if recipe.bf16 is None else recipe.bf16
    teacher = None
    if recipe.teacher is not None:
        runtime = Runtime(device=recipe.device, dtype="bfloat16" if in_bf16 else "float32")
        longest = max(len(sample.tokens) for sample in samples)
        teacher = load_teacher(recipe.teacher, tokenizer, mask_id=mask_id, longest=longest, runtime=runtime)
    optimizers = Optimizers(
        model,
        muon_lr=recipe.muon_lr if recipe.optimizer == "muon" else None,
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        warmup_steps=recipe.warmup_steps,
        steps=recipe.steps,
    )
    state_file = recipe.out / CHECKPOINT / "state.pt"
    state = load_state(state_file, recipe.fingerprint)
    first = 0
    if state is not None:
        model.load_state_dict(state["model"])
        optimizers.load_state_dict(state["optimizers"])
        first = state["step"]
        if state["bf16"] != in_bf16:
            raise ValueError(f"the run in {recipe.out} began with bf16={state['bf16']}: go on with the same")
    recipe.out.mkdir(parents=True, exist_ok=True)
    recipe.write_record(recipe.out / RECORD)
    fingerprint = recipe.fingerprint
    model.train()
    meter = _Meter(recipe, first)
    for step in range(first, recipe.steps):
        torch.manual_seed(recipe.seed * 1_000_003 + step)  # for models with dropout
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        chosen = samples_of_step(samples, recipe, step)
        batch = pard.collate(chosen, mask_id, k=recipe.k, r=recipe.r, r_min=recipe.r_min, generator=generator)
        batch = batch.to(model.device)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=in_bf16):
            logits, labels, depths = pard.forward(model, batch)
            expected = None if teacher is None else teacher.probabilities(batch, logits.shape[-1])
        loss = depth_cross_entropy(logits, labels, depths, recipe.loss, expected)
        loss.backward()
        optimizers.step(step)
        meter.add(loss.item(), depth_accuracy(logits, labels, depths, recipe.k), batch.tokens.numel())
        done = step + 1
        if done % recipe.log_every == 0 or done == recipe.steps:
            report(meter.progress(done))
        if done % recipe.save_every == 0 and done < recipe.steps:
            weights, members = model.state_dict(), optimizers.state_dict()
            save_state(
                state_file,
                {"model": weights, "optimizers": members, "step": done, "bf16": in_bf16, "fingerprint": fingerprint},
            )
    save_model(recipe.out, model.to(torch.bfloat16).eval(), tokenizer)
    shutil.rmtree(recipe.out / CHECKPOINT, ignore_errors=True)


def samples_of_step(samples: list[Sample], recipe: PardRecipe, step: int) -> list[Sample]:
    """The samples of a step: every epoch goes through all of them in its own random order."""
    chosen = []
    for index in range(step * recipe.samples_per_step, (step + 1) * recipe.samples_per_step):
        epoch, place = divmod(index, len(samples))
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(recipe.seed * 7919 + epoch))
        chosen.append(samples[int(order[place])])
    return chosen


class _Meter:
    """Sums up what has happened since the last report."""

    def __init__(self, recipe: PardRecipe, first: int) -> None:
        self.recipe = recipe
        self.first = first
        self._began_s = time.perf_counter()
        self._clear()

    def _clear(self) -> None:
        self._losses: list[float] = []
        self._hits = torch.zeros(2, self.recipe.k)
        self._rows = 0
        self._since_s = time.perf_counter()

    def add(self, loss: float, hits: torch.Tensor, rows: int) -> None:
        if not math.isfinite(loss):
            raise ValueError(f"the loss became {loss}: lower lr or muon_lr")
        self._losses.append(loss)
        self._hits += hits.cpu()
        self._rows += rows

    def progress(self, done: int) -> Progress:
        now_s = time.perf_counter()
        progress = Progress(
            step=done,
            steps=self.recipe.steps,
            loss=sum(self._losses) / len(self._losses),
            accuracy=tuple((self._hits[0] / self._hits[1].clamp(min=1)).tolist()),
            rows_per_s=self._rows / (now_s - self._since_s),
            left_s=(now_s - self._began_s) / (done - self.first) * (self.recipe.steps - done),
        )
        self._clear()
        return progress
