"""Disk space estimate of a training run."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from paradraft.train.optimizers import hidden_and_rest
from paradraft.train.recipe import Recipe

SLACK_BYTES = 2**26
"""Reserve for tokenizers, history, plot, and file system overhead."""
KEPT = 2
"""Checkpoints that a run keeps; while a new one is written, there are three."""
DRAFTERS = 4
"""Most drafters on the disk in a run with evaluations: the best, the best of each kept checkpoint, and the one being
written."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """Peak disk space of a run in bytes.

    Args:
        drafters: size of all drafters, including the result.
    """

    checkpoints: int
    each: float
    drafters: float

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return self.checkpoints * self.each + self.drafters + SLACK_BYTES

    def check(self, out: Path, checkpoints: Path) -> None:
        """Raises ValueError if the disk of `out` has too little space.

        Args:
            checkpoints: folder of its checkpoints; existing files count as available space.
        """
        used = sum(file.stat().st_size for file in checkpoints.rglob("*") if file.is_file())
        free = _free_bytes(out)
        if self.total - used > free:
            raise ValueError(
                f"{out}: this run needs {_size(self.total - used)} on the disk ({self.checkpoints} checkpoints of "
                f"{_size(self.each)}, drafters {_size(self.drafters)}), and {_size(free)} are free: make room, or "
                "choose another `out`"
            )


def estimate(recipe: Recipe, model: nn.Module, *, steps: int, measures: bool) -> Need:
    """Estimates the disk space of a run.

    Args:
        model: the trained module, before it is sharded.
        measures: whether samples are held out, so that drafters are written during the run.
    """
    hidden, rest = (sum(p.nbytes for p in part) for part in hidden_and_rest(model))
    moments = 2 * (hidden + rest) if recipe.optimizer == "adamw" else hidden + 2 * rest
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    saves = (steps - 1) // recipe.save_every + 1  # one more, because a run that is stopped saves too
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Need(
        checkpoints=min(saves, KEPT + 1),
        each=float(weights + moments),
        drafters=2.0 * parameters * (DRAFTERS if measures else 1),
    )


def _free_bytes(folder: Path) -> float:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return float(shutil.disk_usage(existing).free)


def _size(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
