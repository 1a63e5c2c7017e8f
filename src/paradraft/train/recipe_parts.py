"""Parts of a run that can be switched off, and warnings about settings of those that are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paradraft.train.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a run that can be switched off.

    Args:
        settings: that only this part reads.
        wanted: the setting that switches it on, for warnings.
        is_on: whether a recipe switches it on.
    """

    settings: tuple[str, ...]
    wanted: str
    is_on: Callable[[Any], bool]


def ignored_settings(recipe: Recipe, *, steps: int) -> list[str]:
    """Warnings about settings without effect; only explicit settings count, and not None or False.

    Example:
        >>> from paradraft.train.recipe import Recipe
        >>> settings = {"model": "m", "data": ["d"], "out": "o", "steps": 9, "warmup_steps": 9}
        >>> for line in ignored_settings(Recipe(**settings, muon_lr=1e-2, pack=False), steps=9):
        ...     print(line)
        muon_lr=0.01 is ignored without optimizer=muon
        warmup_steps=9: the run has 9 steps, so the learning rate never falls
    """
    warnings = [
        f"{name}={value} is ignored without {part.wanted}"
        for part in recipe.PARTS
        if not part.is_on(recipe)
        for name in part.settings
        if name in recipe.model_fields_set and not ((value := getattr(recipe, name)) is None or value is False)
    ]
    warmup = recipe.warmup_steps
    if "warmup_steps" in recipe.model_fields_set and warmup >= steps and recipe.schedule != "constant":
        warnings.append(f"warmup_steps={warmup}: the run has {steps} steps, so the learning rate never falls")
    return warnings
