"""Training loop: from the last checkpoint to the finished drafter.

The samples of a step depend only on the step, the seed and the source's state, which checkpoints hold, so a resumed run
takes the same steps as an uninterrupted one; and every sum is over the samples of all processes, so several processes
take the same steps as a single one.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor

from paradraft.data.samples import Sample
from paradraft.formats.folder import CARD, put_in_place
from paradraft.train.memory import give_back, give_back_after
from paradraft.train.objectives.batch import TrainingBatch
from paradraft.train.objectives.losses import row_weights
from paradraft.train.optimizers import Optimizers
from paradraft.train.run import curves, progress
from paradraft.train.run.acceptance import DrafterLoader
from paradraft.train.run.checkpoint import Checkpoints, State
from paradraft.train.run.evaluation_time import EvaluationTime
from paradraft.train.run.expectations import FirstSteps, curves_in_words
from paradraft.train.run.model_card import model_card
from paradraft.train.run.processes import STOP_SIGNALS, StoppedError, StopRequest, as_one, close
from paradraft.train.run.progress import BestSoFar, Evaluation, Meter, Report, Score, shares
from paradraft.train.run.provenance import write_record
from paradraft.train.run.setup import Preparation

EVALUATIONS = 10
"""Most evaluations of a run, unless a recipe says how often."""
PICTURE_S = 60.0
"""Least seconds between two plots of the curves: a plot takes half a second."""


class Loop:
    """The training loop of one process.

    Args:
        loader: of drafters to decode with, only in the main process.
        state: from which the run resumes; None starts it.
    """

    def __init__(
        self,
        prepared: Preparation,
        loader: DrafterLoader | None,
        accelerator: Accelerator,
        checkpoints: Checkpoints,
        state: State | None,
        request: StopRequest,
        report: Callable[[Report], None],
        announce: Callable[[str], None],
    ) -> None:
        recipe = prepared.recipe
        self.recipe, self.prepared = recipe, prepared
        self.source = prepared.source
        self.loader, self.acceptance = loader, prepared.acceptance(loader)
        self.accelerator = accelerator
        self.device = accelerator.device
        self.checkpoints = checkpoints
        self._begins_with = state
        self._request = request
        self.steps = self.prepared.steps
        self.evaluate_every = recipe.evaluate_every or max(self.steps // EVALUATIONS, 1)
        self._evaluations = EvaluationTime()
        self.depths = prepared.trainee.depths
        self.importance_K = torch.tensor(recipe.weights_by_depth, device=self.device)
        self.optimizers = Optimizers(
            self.prepared.trainee.objective,
            muon_lr=recipe.muon_lr if recipe.optimizer == "muon" else None,
            lr=recipe.lr,
            weight_decay=recipe.weight_decay,
            warmup_steps=recipe.warmup_steps,
            steps=self.steps,
            schedule=recipe.schedule,
            betas=recipe.betas,
            max_grad_norm=recipe.max_grad_norm,
        )
        self.objective = self.optimizers.prepare(self.accelerator, self.prepared.trainee.objective)
        if self.source.decodes:
            accelerator.register_for_checkpointing(self.source)
        self._report, self._announce = report, announce
        self._standing: BestSoFar
        self._meter: Meter
        self._drawn_s = time.monotonic()

    def run(self) -> None:
        """Takes all remaining steps, and writes the drafter.

        Raises:
            StoppedError: a process received a signal; a checkpoint is written.
        """
        recipe, main = self.recipe, self.accelerator.is_main_process
        if self._begins_with is not None:
            self.checkpoints.load(self._begins_with)
        state = self._begins_with or State(
            identity=self.checkpoints.identity,
            step=0,
            bf16=self.prepared.bf16,
            is_evaluated=not self.prepared.held_out,  # an evaluation before the first step is the baseline
        )
        self._standing = state.standing
        self._meter = Meter(steps=self.steps, first=state.step, k=self.depths, sums=state.sums)
        if main:
            write_record(recipe, str(self.device), **self._origin)
            curves.forget_after(recipe.out, state.step, is_evaluated=state.is_evaluated)
        self.accelerator.wait_for_everyone()
        progress.start(self.accelerator, recipe)
        self._finish(self._take_steps(state.step, is_evaluated=state.is_evaluated))
        self.accelerator.wait_for_everyone()
        close(self.accelerator)

    def _finish(self, done: int) -> None:
        """Writes the result after `done` steps.

        The run is complete with `config.json`, the last file of the drafter; until then a stopped run resumes from its
        last checkpoint, and writes the same files.
        """
        best, first = self._standing.best, self._standing.first
        if best is None:
            self._save_drafter(done)
        if self.accelerator.is_main_process:
            out = self.recipe.out
            curves.draw(out)
            if self.prepared.held_out:
                self._announce(self._evaluations.in_words)
            results = {"steps_done": done, "best": best and asdict(best), "before_training": first and asdict(first)}
            write_record(self.recipe, str(self.device), **self._origin, **results)
            drafter = self.checkpoints.drafter(done if best is None else best.step)
            # Once files have been moved, the folder is no complete drafter, and cannot get a card.
            if not (drafter / CARD).exists() and sum(file.is_file() for file in drafter.rglob("*")) > 1:
                self._write_card(drafter, done)
            put_in_place(drafter, out)
            self.checkpoints.delete()

    def _write_card(self, drafter: Path, done: int) -> None:
        card = model_card(
            self.prepared.trainee.drafter, self.recipe, drafter, self.prepared.learnt, self._standing,
            done=done, steps=self.steps,
        )  # fmt: skip
        new = drafter / f"{CARD}.new"
        new.write_text(card, encoding="utf-8")
        os.replace(new, drafter / CARD)

    @property
    def _origin(self) -> dict[str, object]:
        return {"began": self.prepared.began, "learnt": asdict(self.prepared.learnt)}

    def _take_steps(self, first: int, *, is_evaluated: bool) -> int:
        """Takes the remaining steps, and returns the count of all steps of the run.

        Args:
            first: steps done.
            is_evaluated: False if the evaluation after these steps is missing.
        """
        began_s = time.perf_counter()
        if self._standing.is_over(self.recipe.patience) or (not is_evaluated and self._evaluate(first)):
            return first
        evaluation_s = None if is_evaluated else time.perf_counter() - began_s
        first_steps = FirstSteps(
            steps=self.steps - first,
            evaluations=sum(map(self._is_due, range(first + 1, self.steps + 1))),
            evaluation_s=evaluation_s,
            is_limited=self.recipe.evaluate_every is None,
        )
        self.objective.train()
        with ThreadPoolExecutor(1) as executor:
            prefetched = None
            for step in range(first, self.steps):
                step_began_s = time.perf_counter()
                if self.source.is_due(step):
                    self._renew(step)
                batches = (prefetched or executor.submit(self._batches_of, step)).result()
                prefetched = None if self.source.is_due(step + 1) else executor.submit(self._batches_of, step + 1)
                loss, right_K, labels_K, norm, stop_signal = self._step(step, batches)
                rows = sum(batch.tokens.numel() for batch in batches) * self.accelerator.num_processes
                done = step + 1
                is_skipped = not self._meter.add(loss, right_K, labels_K, rows, norm)
                if is_skipped and self.accelerator.is_main_process:
                    self._announce(f"step {done} is skipped: its gradients are not finite")
                self._expect(first_steps.add(rows, taken_s=time.perf_counter() - step_began_s))
                if not is_skipped and (done % self.recipe.log_every == 0 or done == self.steps):
                    self._tell(self._meter.progress(done))
                give_back_after(done)
                evaluates = self._evaluates_after(done)
                if stop_signal is not None and (done < self.steps or evaluates):
                    # An evaluation may take longer than the grace period after SIGTERM.
                    self.checkpoints.save(self._state(done, is_evaluated=not evaluates))
                    raise StoppedError(stop_signal, step=done, steps=self.steps)
                stops = self._evaluate(done) if evaluates else False
                if done % self.recipe.save_every == 0 and done < self.steps:
                    self.checkpoints.save(self._state(done))
                if stops:
                    return done
        return self.steps

    def _is_due(self, done: int) -> bool:
        return bool(self.prepared.held_out) and (done % self.evaluate_every == 0 or done == self.steps)

    def _evaluates_after(self, done: int) -> bool:
        if not self._is_due(done) or done == self.steps or self.recipe.evaluate_every is not None:
            return self._is_due(done)
        (allows,) = broadcast_object_list([self._evaluations.allows()])  # clocks of processes differ
        return bool(allows)

    def _expect(self, expected: str | None) -> None:
        """Announces the expected duration, if known, and results of recorded runs."""
        if expected is not None and self.accelerator.is_main_process:
            for line in (expected, *curves_in_words(self.prepared.trainee.drafter)):
                self._announce(line)

    def _state(self, done: int, *, is_evaluated: bool = True) -> State:
        return State(
            identity=self.checkpoints.identity,
            step=done,
            bf16=self.prepared.bf16,
            began=self.prepared.began,
            learnt=self.prepared.learnt,
            is_evaluated=is_evaluated,
            standing=self._standing,
            sums=self._meter.sums,
        )

    def _renew(self, step: int) -> None:
        """Lets the source make samples with the drafter after `step` steps."""
        best = self._standing.best
        if best is None or best.step != step:  # else it was saved for the evaluation
            self._save_drafter(step)
        with as_one(self.accelerator):
            if self.loader is not None:
                self.source.renew(step, self.loader.target, self.loader.load(self.checkpoints.drafter(step)))
                self.checkpoints.keep_drafters(best)
        (state,) = broadcast_object_list([self.source.state_dict()])  # only the main process has renewed it
        self.source.load_state_dict(state)

    def _batches_of(self, step: int) -> list[TrainingBatch]:
        mine = slice(self.accelerator.process_index, None, self.accelerator.num_processes)
        chosen = self.source.samples_of(step)
        seed = self.recipe.seed * 1_000_003 + step
        seeds = [seed * 8191 + index for index in range(len(chosen))]
        return self.prepared.batches(chosen[mine], seeds[mine])

    def _weights(self, batches: list[TrainingBatch]) -> tuple[Tensor, Tensor]:
        """`[K]` weights of a row in this process's loss by depth, and `[K]` rows with a label in all processes."""
        own_K = sum((batch.labels_by_depth(self.depths) for batch in batches), torch.zeros(self.depths))
        labels_K: Tensor = self.accelerator.reduce(own_K.to(self.device), "sum")
        # Gradients are averaged over the processes; the loss is a sum over them.
        weights_K = row_weights(labels_K, self.recipe.average, self.importance_K) * self.accelerator.num_processes
        return weights_K, labels_K

    def _step(self, step: int, batches: list[TrainingBatch]) -> tuple[float, Tensor, Tensor, float | None, int | None]:
        """Takes an optimizer step.

        Returns:
            Its loss, `[K]` rows predicted correctly, `[K]` rows with a label, the gradient norm, and the stop signal
            that any process received.
        """
        torch.manual_seed(self.recipe.seed * 1_000_003 + step)  # for models with dropout
        weights_K, labels_K = self._weights(batches)
        of_rows, right_K = torch.zeros(2, device=self.device), torch.zeros_like(weights_K)
        for index, batch in enumerate(batches, start=1):
            with nullcontext() if index == len(batches) else self.accelerator.no_sync(self.objective):
                part, right, weight = self.objective(batch.to(self.device), weights_K)
                self.accelerator.backward(part)
            of_rows += torch.stack([part.detach(), weight])
            right_K += right
        loss, weight = self.accelerator.reduce(of_rows, "mean").tolist()
        divisor = weight if weight and self.recipe.row_loss.weighting else 1.0
        norm = self.optimizers.step(step, divisor)
        # All processes must stop after the same step, so they exchange the signals that they received.
        received = right_K.new_tensor([self._request.number == signal for signal in STOP_SIGNALS])
        sums = self.accelerator.reduce(torch.cat([right_K, received]), "sum")
        stop_signal = next((int(signal) for signal, count in zip(STOP_SIGNALS, sums[-2:], strict=True) if count), None)
        return loss / divisor, sums[:-2], labels_K, norm, stop_signal

    def _evaluate(self, done: int) -> bool:
        """Evaluates the drafter, keeps it if it is the best, and returns whether to stop early."""
        began_s = time.monotonic()
        loss, accuracy = self._held_out()
        if not math.isfinite(loss):
            fix = "lower lr or muon_lr" if done else "the initial weights have NaN or infinite numbers, take others"
            raise ValueError(f"the held-out loss is {loss}: {fix}")
        self._save_drafter(done)
        decoded = None if self.acceptance is None else self.acceptance.of(self.checkpoints.drafter(done))
        give_back()
        (decoded,) = broadcast_object_list([decoded])  # only the main process measures it
        length, by_position = (None, ()) if decoded is None else (decoded.length, decoded.by_position)
        score = Score(step=done, acceptance_length=length, held_out_loss=loss, by_position=by_position)
        self._standing = self._standing.after(score)
        if self.accelerator.is_main_process:
            self.checkpoints.keep_drafters(self._standing.best)
        self.accelerator.wait_for_everyone()
        report = Evaluation(
            step=done, loss=loss, accuracy=accuracy, acceptance_length=length, is_best=self._standing.stale == 0,
            by_position=by_position,
        )  # fmt: skip
        self._tell(report)
        if self.accelerator.is_main_process and time.monotonic() - self._drawn_s > PICTURE_S:
            curves.draw(self.recipe.out)
            self._drawn_s = time.monotonic()
        self._evaluations.add(time.monotonic() - began_s)
        return self._standing.is_over(self.recipe.patience)

    @torch.no_grad()
    def _held_out(self) -> tuple[float, tuple[float, ...]]:
        """Loss, and accuracy by depth, on the held-out set, with the same rows dropped every time."""
        self.objective.eval()
        processes = self.accelerator.num_processes
        held_out = self.prepared.held_out
        # All processes must take equally many passes, so the set is padded with a sample without labels.
        padding = Sample(tokens=held_out[0].tokens, is_label=[False] * len(held_out[0].tokens))
        held_out = held_out + [padding] * (-len(held_out) % processes)
        mine = slice(self.accelerator.process_index, None, processes)
        batches = self.prepared.batches(held_out[mine], range(len(held_out))[mine])
        weights_K, labels_K = self._weights(batches)
        loss, right_K = torch.zeros((), device=self.device), torch.zeros_like(weights_K)
        for batch in batches:
            part, right, _ = self.objective(batch.to(self.device), weights_K)
            loss += part
            right_K += right
        self.objective.train()
        accuracy = shares(self.accelerator.reduce(right_K, "sum"), labels_K)
        return self.accelerator.reduce(loss, "mean").item(), accuracy

    def _save_drafter(self, done: int) -> None:
        weights = self.accelerator.get_state_dict(self.objective)
        if self.accelerator.is_main_process:
            self.prepared.trainee.save(self.checkpoints.drafter(done), weights)
        give_back()
        self.accelerator.wait_for_everyone()

    def _tell(self, report: Report) -> None:
        if not self.accelerator.is_main_process:
            return
        curves.append(self.recipe.out, report)
        if self.recipe.report_to:
            self.accelerator.log(progress.figures(report), step=report.step)
        self._report(report)
