"""PARD training, as most tests of training use it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paradraft.train import launch, pard, setup
from paradraft.train.pard import PardRecipe
from paradraft.train.progress import Report


def train_pard(recipe: PardRecipe, report: Callable[[Report], None]) -> bool:
    return launch.train(recipe, pard.build, report)


def prepare_pard(recipe: PardRecipe, *, processes: int = 1) -> setup.Preparation:
    return setup.prepare(recipe, pard.build, torch.device("cpu"), processes=processes)
