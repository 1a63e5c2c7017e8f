"""What training knows of a drafter: the seam between the training loop and `train/<name>.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from paradraft.data.samples import Sample
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.train.objectives.batch import TrainingBatch
from paradraft.train.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class RunData:
    """What is known of a run before any weights are loaded.

    Args:
        tokenizer: of the recipe's `model`.
        samples: all of the run, those that are held out among them.
        longest: tokens of the longest sample.
        largest: the largest token id of all samples.
        device: where this process trains.
        bf16: whether passes compute in bf16; weights are in float32.
        samples_per_pass: samples that this process reads at a time.
        measures: whether acceptance lengths are measured, with `recipe.measured_with`.
    """

    tokenizer: PreTrainedTokenizerBase
    samples: list[Sample]
    longest: int
    largest: int
    device: torch.device
    bf16: bool
    samples_per_pass: int
    measures: bool


class Trainee(Protocol):
    """A drafter in training: all that trainer, checkpoints and measurements know of it."""

    @property
    def objective(self) -> nn.Module:
        """What is trained, and its loss, as one module on `RunData.device`, which data-parallel training and FSDP wrap.

        Its forward takes a `TrainingBatch` and `[K]` weights, what a row of each depth weighs, and returns the weighted
        sum of the rows' losses and `[K]` rows of each depth predicted correctly. Parameters that require no gradient
        are not trained. Checkpoints hold its state dict; frozen models that only give advice, such as a teacher, are
        kept out of it.
        """

    @property
    def depths(self) -> int:
        """K, at least 1: rows of a batch have depths 0 to K - 1."""

    @property
    def drafter(self) -> str:
        """The name of the drafter that decodes with what `save` writes, with settings if it needs some."""

    @property
    def k(self) -> int:
        """Tokens drafted per round when acceptance lengths are measured."""

    @property
    def max_tokens(self) -> int:
        """Most tokens of a text that the drafter can read."""

    @property
    def notes(self) -> Sequence[str]:
        """What is said before the first step, besides the recipe: the mask token, the memory that it takes."""

    def collate(self, groups: list[list[Sample]], generators: list[list[torch.Generator]]) -> TrainingBatch:
        """The rows of some samples; it may run in another thread.

        Args:
            groups: S lists of samples; the samples of a list are packed one after the other.
            generators: for each sample the source of all random choices about it, so that they do not depend on the
                samples beside it.
        """

    def check_target(self, name: str, target: Target, runtime: Runtime) -> None:
        """Raises ValueError if the drafter cannot be measured with a target.

        Args:
            name: of the target, as the recipe gives it.
            target: loaded.
            runtime: the target's.
        """

    def save(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Writes what the drafter loads, in the format of `formats/`; called in the main process only.

        The files appear all at once (`whole_folder`), a `config.json` among them. The same weights give the same bytes.

        Args:
            folder: it may exist, and is replaced then.
            weights: the state dict of `objective`, on whatever device.
        """


R = TypeVar("R", bound=Recipe, contravariant=True)


class Builder(Protocol[R]):
    """The function `build` of `train/<name>.py`; the type of its first parameter is the class of its recipes."""

    def __call__(self, recipe: R, data: RunData, /) -> Trainee:
        """Loads what a recipe trains.

        Raises:
            ValueError: models cannot be used, the settings do not fit them, or there is not enough memory.
        """
