"""Room on the disk: how much a run takes."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from paradraft.train.optimizers import hidden_and_rest
from paradraft.train.recipe import Recipe

SLACK_BYTES = 2**26
"""For what is not counted: tokenizers, the history, its picture, and the pages of a file system."""
KEPT = 2
"""How many checkpoints a run keeps; while one more is written, there are three."""
DRAFTERS = 4
"""The most drafters that a run with evaluations has on the disk: the best one, the best one of each kept checkpoint,
and the one being written."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes that a run takes on the disk at a time.

    Args:
        checkpoints: how many of them there are.
        each: size of one.
        drafters: size of all drafters, the result among them.
    """

    checkpoints: int
    each: float
    drafters: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.checkpoints * self.each + self.drafters + SLACK_BYTES

    def check(self, out: Path, checkpoints: Path) -> None:
        """Raises ValueError if the disk of `out` has not so much room.

        Args:
            out: where the run writes; it need not exist.
            checkpoints: the folder of its checkpoints; what is there already needs no further room.
        """
        there = sum(file.stat().st_size for file in checkpoints.rglob("*") if file.is_file())
        free = _free_bytes(out)
        if self.total - there > free:
            raise ValueError(
                f"{out}: this run needs {_size(self.total - there)} on the disk ({self.checkpoints} checkpoints of "
                f"{_size(self.each)}, drafters {_size(self.drafters)}), and {_size(free)} are free: make room, or "
                "choose another `out`"
            )


def estimate(recipe: Recipe, model: nn.Module, *, steps: int, measures: bool) -> Need:
    """Estimates a run.

    Args:
        recipe: the run.
        model: what is trained, before it is spread over devices.
        steps: optimizer steps of the whole run.
        measures: whether samples are held out, so that drafters are written during the run.
    """
    hidden, rest = (sum(p.nbytes for p in part) for part in hidden_and_rest(model))
    moments = 2 * (hidden + rest) if recipe.optimizer == "adamw" else hidden + 2 * rest
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    saves = (steps - 1) // recipe.save_every + 1  # one more, because a run that is stopped saves too
    numbers = sum(parameter.numel() for parameter in model.parameters())
    return Need(
        checkpoints=min(saves, KEPT + 1),
        each=float(weights + moments),
        drafters=2.0 * numbers * (DRAFTERS if measures else 1),
    )


def _free_bytes(folder: Path) -> float:
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    return float(shutil.disk_usage(there).free)


def _size(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
