"""The states of the teacher or target that a run keeps beside its checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from paradraft.train.objectives.features import FeatureCache
from paradraft.train.objectives.teacher import Teacher
from paradraft.train.recipe import CHECKPOINT, STATES, Recipe


def features_of(recipe: Recipe, target: Teacher, layers: Sequence[int]) -> FeatureCache:
    """The cache of a run's states, with those that it kept before it was stopped.

    Raises:
        ValueError: the disk has less free space than the recipe gives them.
    """
    folder, given = recipe.out / CHECKPOINT / STATES, recipe.feature_cache_gb
    cache = FeatureCache(target, layers, folder, given)
    existing = next(above for above in folder.absolute().parents if above.exists())
    free_gb = shutil.disk_usage(existing).free / 1e9
    if given is not None and cache.missing_gb > free_gb:
        raise ValueError(f"feature_cache_gb={given:g}: the disk of {recipe.out} has {free_gb:.0f} GB free")
    return cache
