"""Where reports go beside the terminal and the history: trackers, which accelerate knows."""

from __future__ import annotations

from collections.abc import Sequence

from accelerate import Accelerator
from accelerate.utils import is_mlflow_available, is_tensorboard_available, is_trackio_available, is_wandb_available

from paradraft.train.progress import Evaluation, Progress, Report
from paradraft.train.recipe import PardRecipe

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


def start(accelerator: Accelerator, recipe: PardRecipe) -> None:
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
