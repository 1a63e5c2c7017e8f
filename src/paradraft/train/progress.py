"""What a training run says of itself every few steps."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A report on the steps since the last one.

    Args:
        step: steps done.
        steps: steps of the whole run.
        loss: mean loss in nats (total variation: a share).
        accuracy: for each depth the share of rows predicted correctly.
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
    """

    step: int
    loss: float
    accuracy: tuple[float, ...]
    acceptance_length: float | None
    is_best: bool


Report = Progress | Evaluation


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
        """The report, after so many steps."""
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
