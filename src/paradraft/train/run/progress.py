"""What a training run reports every few steps, the best drafter so far, and the trackers that are told."""

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
    """A report on the steps since the last one.

    Args:
        step: steps done.
        steps: steps of the whole run.
        loss: mean loss in nats (total variation: a share).
        accuracy: for each depth the share of rows predicted correctly; users see `by_position`.
        rows_per_s: training rows per second, on all devices together.
        left_s: estimated seconds to the end.
        grad_norm: mean norm of the gradients before they were clipped, if it is known.
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
    """What held-out samples and prompts say.

    Args:
        step: steps done.
        loss: mean loss on held-out samples.
        accuracy: for each depth the share of held-out rows predicted correctly.
        acceptance_length: tokens per target pass when held-out prompts are decoded; None without a
            target.
        is_best: whether this is the best drafter so far.
        by_position: for each position of their drafts, from the first token on, the share that is accepted.
    """

    step: int
    loss: float
    accuracy: tuple[float, ...]
    acceptance_length: float | None
    is_best: bool
    by_position: tuple[float, ...] = ()


Report = Progress | Evaluation


def by_position(reports: Sequence[Report]) -> list[dict[int, float]]:
    """The accuracy of each report by position in the draft, counted from 1, as decoding counts.

    A row of depth i drafts position i + 1: depth 0 is the ordinary row, whose real token predicts the next one, which
    is the first drafted token. With prompt tokens (PPD) the target itself says that one, nothing is learnt at depth 0,
    and prompt token i drafts position i.

    Args:
        reports: of one run.

    >>> report = Evaluation(step=1, loss=1.0, accuracy=(0.5, 0.25), acceptance_length=None, is_best=True)
    >>> by_position([report]), by_position([replace(report, accuracy=(0.0, 0.5, 0.25))])
    ([{1: 0.5, 2: 0.25}], [{1: 0.5, 2: 0.25}])
    """
    told = [report.accuracy for report in reports if report.accuracy]
    is_learnt = any(one[0] for one in told) or not any(any(one) for one in told)
    return [dict(enumerate(report.accuracy[not is_learnt :], start=1)) for report in reports]


@dataclass(frozen=True, kw_only=True)
class Sums:
    """What has been added up since the last report, for a run that goes on between two reports.

    Args:
        losses: of each step.
        right: for each depth, rows predicted correctly; empty if there was no step.
        labels: for each depth, rows with a label.
        norms: of the gradients of each step.
    """

    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    right: tuple[float, ...] = ()
    labels: tuple[float, ...] = ()


class Meter:
    """Sums up what has happened since the last report.

    Args:
        steps: steps of the whole run.
        first: steps that were done before this process began.
        k: depths.
        sums: what an earlier process had added up and not reported.
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
        """What has been added since the last report."""
        right, labels = tuple(self._right.tolist()), tuple(self._labels.tolist())
        return Sums(losses=tuple(self._losses), norms=tuple(self._norms), right=right, labels=labels)

    def add(self, loss: float, right_K: Tensor, labels_K: Tensor, rows: int, norm: float | None) -> None:
        """Adds a step, with the norm of its gradients if that is known.

        Raises:
            ValueError: the loss is not a number any more.
        """
        if not math.isfinite(loss):
            raise ValueError(f"the loss became {loss}: lower lr or muon_lr")
        self._losses.append(loss)
        self._norms += [] if norm is None else [norm]
        self._right += right_K.cpu()
        self._labels += labels_K.cpu()
        self._rows += rows

    def progress(self, done: int) -> Progress:
        """The report after a number of steps."""
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
    """Of the rows of each depth, the share that was right; 0 where there are none."""
    return tuple((right_K.cpu() / labels_K.cpu().clamp(min=1)).tolist())


PROJECT = "paradraft"
INSTALLED = {
    "tensorboard": is_tensorboard_available,
    "wandb": is_wandb_available,
    "mlflow": is_mlflow_available,
    "trackio": is_trackio_available,
}
"""What says whether a tracker is there."""


def check_installed(names: Sequence[str]) -> None:
    """Raises ValueError if a tracker is not there; accelerate only warns."""
    missing = [name for name in names if not INSTALLED[name]()]
    if missing:
        raise ValueError(f"report_to: {missing[0]} is not installed, pip install {missing[0]}")


def start(accelerator: Accelerator, recipe: Recipe) -> None:
    """Tells the recipe's trackers that a run begins."""
    if recipe.report_to:
        accelerator.init_trackers(PROJECT, config={"out": str(recipe.out), "fingerprint": recipe.fingerprint})


def figures(report: Report) -> dict[str, float]:
    """A report as trackers want it."""
    prefix = "held_out/" if isinstance(report, Evaluation) else "train/"
    found = {f"{prefix}loss": report.loss}
    found |= {f"{prefix}accuracy_{depth}": share for depth, share in enumerate(report.accuracy)}
    if isinstance(report, Evaluation) and report.acceptance_length is not None:
        found["held_out/acceptance_length"] = report.acceptance_length
    if isinstance(report, Progress) and report.grad_norm is not None:
        found["train/grad_norm"] = report.grad_norm
    return found


@dataclass(frozen=True, kw_only=True)
class Score:
    """What a drafter is worth: the larger acceptance length wins, and of equal lengths the smaller loss.

    Args:
        step: steps that were done when it was measured.
        acceptance_length: tokens per target pass; None without a target.
        held_out_loss: mean loss on held-out samples.
        by_position: see `Evaluation`.

    Example:
        >>> first = Score(step=1, acceptance_length=2.5, held_out_loss=1.0)
        >>> first < Score(step=2, acceptance_length=3.0, held_out_loss=4.0)
        True
        >>> first < Score(step=2, acceptance_length=2.5, held_out_loss=0.9)
        True
    """

    step: int
    acceptance_length: float | None
    held_out_loss: float
    by_position: tuple[float, ...] = ()

    def __lt__(self, other: Score) -> bool:
        return self._rank < other._rank

    @property
    def _rank(self) -> tuple[float, float]:
        return self.acceptance_length or 0.0, -self.held_out_loss


@dataclass(frozen=True, kw_only=True)
class BestSoFar:
    """The best drafter of a run so far.

    Args:
        best: what it is worth; None before the first evaluation.
        stale: evaluations since then, none of them better.
        first: what the first evaluation said, which is made before any step.
    """

    best: Score | None = None
    stale: int = 0
    first: Score | None = None

    def after(self, worth: Score) -> BestSoFar:
        """How the run stands after one more evaluation."""
        first = self.first or worth
        if self.best is None or self.best < worth:
            return BestSoFar(best=worth, first=first)
        return replace(self, stale=self.stale + 1, first=first)

    def is_over(self, patience: int | None) -> bool:
        """Whether a run with this patience stops here."""
        return patience is not None and self.stale >= patience
