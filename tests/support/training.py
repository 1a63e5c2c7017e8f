"""PARD training, as most tests of training use it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paradraft.train.drafters import pard
from paradraft.train.drafters.pard_recipe import PardRecipe
from paradraft.train.run import launch, setup
from paradraft.train.run.progress import Report


def train_pard(recipe: PardRecipe, report: Callable[[Report], None]) -> bool:
    return launch.train(recipe, pard.build, report)


def prepare_pard(recipe: PardRecipe, *, processes: int = 1) -> setup.Preparation:
    return setup.prepare(recipe, pard.build, torch.device("cpu"), processes=processes)
