"""Reports of a training run, scores of its drafters, and experiment trackers."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator
from accelerate.utils import is_mlflow_available, is_tensorboard_available, is_trackio_available, is_wandb_available
from torch import Tensor

from paradraft.train.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Report on the steps since the last report.

    Args:
        loss: mean loss in nats (total variation: a share).
        accuracy: share of rows predicted correctly, by depth; users see `by_position`.
        rows_per_s: training rows per second, on all devices together.
        grad_norm: mean gradient norm before clipping, if known.
    """

    step: int
    steps: int
    loss: float
    accuracy: tuple[float, ...]
    rows_per_s: float
    left_s: float
    grad_norm: float | None = None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Evaluation on the held-out set.

    Args:
        accuracy: share of held-out rows predicted correctly, by depth.
        acceptance_length: tokens per target pass on held-out prompts; None without a target.
        by_position: acceptance rate at each draft position, from position 1 on.
    """

    step: int
    loss: float
    accuracy: tuple[float, ...]
    acceptance_length: float | None
    is_best: bool
    by_position: tuple[float, ...] = ()


Report = Progress | Evaluation


def by_position(reports: Sequence[Report]) -> list[dict[int, float]]:
    """Accuracy of each report of a run by draft position, counted from 1, as in decoding.

    A row of depth i drafts position i + 1: depth 0 is the ordinary row, whose real token predicts the next one, which
    is the first drafted token. With prompt tokens (PPD) the target itself predicts that token, depth 0 has no loss, and
    prompt token i drafts position i.

    >>> report = Evaluation(step=1, loss=1.0, accuracy=(0.5, 0.25), acceptance_length=None, is_best=True)
    >>> by_position([report]), by_position([replace(report, accuracy=(0.0, 0.5, 0.25))])
    ([{1: 0.5, 2: 0.25}], [{1: 0.5, 2: 0.25}])
    """
    accuracies = [report.accuracy for report in reports if report.accuracy]
    is_learnt = any(accuracy[0] for accuracy in accuracies) or not any(any(accuracy) for accuracy in accuracies)
    return [dict(enumerate(report.accuracy[not is_learnt :], start=1)) for report in reports]


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Statistics since the last report, for a run that resumes between two reports.

    Args:
        right: rows predicted correctly, by depth; empty before the first step.
        labels: rows with a label, by depth.
    """

    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    right: tuple[float, ...] = ()
    labels: tuple[float, ...] = ()


class Meter:
    """Collects statistics for the next report.

    Args:
        first: steps that an earlier process did.
        sums: unreported statistics of an earlier process.
    """

    def __init__(self, *, steps: int, first: int, k: int, sums: Sums) -> None:
        self._steps = steps
        self._first = first
        self._began_s = time.perf_counter()
        self._k = k
        self._begin_with(sums)

    def _begin_with(self, sums: Sums) -> None:
        self._losses = list(sums.losses)
        self._norms = list(sums.norms)
        self._right = torch.tensor(sums.right or (0.0,) * self._k)
        self._labels = torch.tensor(sums.labels or (0.0,) * self._k)
        self._rows = 0
        self._since_s = time.perf_counter()

    @property
    def sums(self) -> Sums:
        """Statistics since the last report."""
        right, labels = tuple(self._right.tolist()), tuple(self._labels.tolist())
        return Sums(losses=tuple(self._losses), norms=tuple(self._norms), right=right, labels=labels)

    def add(self, loss: float, right_K: Tensor, labels_K: Tensor, rows: int, norm: float | None) -> bool:
        """Adds a step, with its gradient norm if known, and returns True; False if its norm is not finite.

        Raises:
            ValueError: the loss is not finite.
        """
        if norm is not None and not math.isfinite(norm):
            return False
        if not math.isfinite(loss):
            raise ValueError(f"the loss became {loss}: lower lr or muon_lr")
        self._losses.append(loss)
        self._norms += [] if norm is None else [norm]
        self._right += right_K.cpu()
        self._labels += labels_K.cpu()
        self._rows += rows
        return True

    def progress(self, done: int) -> Progress:
        """Returns the report after `done` steps, and starts the next one."""
        now_s = time.perf_counter()
        progress = Progress(
            step=done,
            steps=self._steps,
            loss=sum(self._losses) / len(self._losses),
            accuracy=shares(self._right, self._labels),
            rows_per_s=self._rows / (now_s - self._since_s),
            left_s=(now_s - self._began_s) / (done - self._first) * (self._steps - done),
            grad_norm=sum(self._norms) / len(self._norms) if self._norms else None,
        )
        self._begin_with(Sums())
        return progress


def shares(right_K: Tensor, labels_K: Tensor) -> tuple[float, ...]:
    """Share of rows predicted correctly, by depth; 0 without rows."""
    return tuple((right_K.cpu() / labels_K.cpu().clamp(min=1)).tolist())


PROJECT = "paradraft"
INSTALLED = {
    "tensorboard": is_tensorboard_available,
    "wandb": is_wandb_available,
    "mlflow": is_mlflow_available,
    "trackio": is_trackio_available,
}
"""Functions that tell whether a tracker is installed."""


def check_installed(names: Sequence[str]) -> None:
    """Raises ValueError if a tracker is not installed; accelerate only warns."""
    missing = [name for name in names if not INSTALLED[name]()]
    if missing:
        raise ValueError(f"report_to: {missing[0]} is not installed, pip install {missing[0]}")


def start(accelerator: Accelerator, recipe: Recipe) -> None:
    """Starts the recipe's trackers."""
    if recipe.report_to:
        accelerator.init_trackers(PROJECT, config={"out": str(recipe.out), "fingerprint": recipe.fingerprint})


def figures(report: Report) -> dict[str, float]:
    """Converts a report to metrics for trackers."""
    prefix = "held_out/" if isinstance(report, Evaluation) else "train/"
    metrics = {f"{prefix}loss": report.loss}
    metrics |= {f"{prefix}accuracy_{depth}": share for depth, share in enumerate(report.accuracy)}
    if isinstance(report, Evaluation) and report.acceptance_length is not None:
        metrics["held_out/acceptance_length"] = report.acceptance_length
    if isinstance(report, Progress) and report.grad_norm is not None:
        metrics["train/grad_norm"] = report.grad_norm
    return metrics


SAME = 0.01
"""Share by which acceptance lengths differ by chance: the standard error of the difference of two drafters on 48
prompts is 0.5 to 0.9 % (`benchmarks/weightings-smollm2-135m-dflash_*`)."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """Score of a drafter: the larger acceptance length is better, and of about equal lengths the smaller loss.

    Args:
        acceptance_length: tokens per target pass; None without a target.
        held_out_loss: mean loss on held-out samples.

    Example:
        >>> first = Score(step=1, acceptance_length=2.5, held_out_loss=1.0)
        >>> first < Score(step=2, acceptance_length=3.0, held_out_loss=4.0)
        True
        >>> first < Score(step=2, acceptance_length=2.49, held_out_loss=0.9)
        True
    """

    step: int
    acceptance_length: float | None
    held_out_loss: float
    by_position: tuple[float, ...] = ()

    def __lt__(self, other: Score) -> bool:
        mine, theirs = (score.acceptance_length or 0.0 for score in (self, other))
        if abs(mine - theirs) > SAME * max(mine, theirs):
            return mine < theirs
        return self.held_out_loss > other.held_out_loss


@dataclass(frozen=True, kw_only=True)
class BestSoFar:
    """Best score of a run so far.

    Args:
        best: score of the best drafter; None before the first evaluation.
        stale: evaluations since then, none of them better.
        longest: largest acceptance length so far, from which the best one's is never far.
        first: score before the first step.
    """

    best: Score | None = None
    stale: int = 0
    first: Score | None = None
    longest: float = 0.0

    def after(self, score: Score) -> BestSoFar:
        """Returns the state after one more evaluation."""
        first, length = self.first or score, score.acceptance_length or 0.0
        longest = max(self.longest, length)
        if self.best is None or (self.best < score and length >= (1 - SAME) * longest):
            return BestSoFar(best=score, first=first, longest=longest)
        return replace(self, stale=self.stale + 1, first=first, longest=longest)

    def is_over(self, patience: int | None) -> bool:
        """Whether a run with this patience stops (early stopping)."""
        return patience is not None and self.stale >= patience
