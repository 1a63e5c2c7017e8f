"""`Trainee`: the interface between the training loop and `train/drafters/<name>.py`."""

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
    """Data and settings of a run, known before any weights are loaded.

    Args:
        tokenizer: of the recipe's `model`.
        samples: all of the run, including the held-out set.
        longest: tokens of the longest sample.
        largest: largest token id of all samples.
        bf16: whether passes compute in bf16; weights are in float32.
        samples_per_pass: batch size of this process.
        measures: whether the run decodes, with `recipe.measured_with`.
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
    """A drafter in training, as trainer, checkpoints and measurements use it."""

    @property
    def objective(self) -> nn.Module:
        """The trained weights and the loss, as one module on `RunData.device`, which data-parallel training and FSDP
        wrap.

        Its forward takes a `TrainingBatch` and `[K]` weights of a row of each depth, and returns the weighted sum of
        the rows' losses, `[K]` rows of each depth predicted correctly, and the sum of the rows' weights, by which the
        trainer divides. Parameters without `requires_grad` are not trained. Checkpoints hold its state dict, which
        excludes frozen models such as a teacher.
        """

    @property
    def depths(self) -> int:
        """K, at least 1: rows of a batch have depths 0 to K - 1."""

    @property
    def drafter(self) -> str:
        """Spec of the drafter that decodes with the files of `save`: its name, with settings if needed."""

    @property
    def k(self) -> int:
        """Tokens drafted per round when acceptance lengths are measured."""

    @property
    def max_tokens(self) -> int:
        """Context length of the drafter."""

    @property
    def notes(self) -> Sequence[str]:
        """Messages before the first step, such as the mask token and the memory estimate."""

    def collate(self, groups: list[list[Sample]], generators: list[list[torch.Generator]]) -> TrainingBatch:
        """Makes the rows of some samples; may run in another thread.

        Args:
            groups: S lists of samples; the samples of a list are packed.
            generators: of each sample, so that its random choices do not depend on the other samples.
        """

    def check_target(self, name: str, target: Target, runtime: Runtime) -> None:
        """Raises ValueError if the drafter cannot be measured with a target, whose name is the recipe's."""

    def save(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Writes the drafter's folder, in the format of `formats/`; called in the main process only.

        The files, including `config.json`, appear atomically (`whole_folder`). Equal weights give equal bytes.

        Args:
            folder: replaced if it exists.
            weights: the state dict of `objective`, on any device.
        """


R = TypeVar("R", bound=Recipe, contravariant=True)


class Builder(Protocol[R]):
    """The function `build` of `train/drafters/<name>.py`; its first parameter has the type of the recipe."""

    def __call__(self, recipe: R, data: RunData, /) -> Trainee:
        """Loads the models of a recipe.

        Raises:
            ValueError: models cannot be used, the settings do not fit them, or there is not enough memory.
        """
