"""Settings that a recipe names and that have nothing to act on.

A recipe that contradicts itself is refused (`recipe.py`). One that describes a part which is switched
off runs, so that a published recipe can be tried with `k=1` or `optimizer=adamw`, and says what it
leaves out. Defaults that nobody wrote down are nobody's mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paradraft.train.recipe import PardRecipe


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a run that can be switched off.

    Args:
        settings: what only this part reads.
        wanted: what switches it on.
        is_on: whether it is, in a recipe.
    """

    settings: tuple[str, ...]
    wanted: str
    is_on: Callable[[PardRecipe], bool]


PARTS = (
    Part(settings=("muon_lr",), wanted="optimizer=muon", is_on=lambda recipe: recipe.optimizer == "muon"),
    Part(
        settings=("r", "r_min", "mask_token_id", "distinct_masks", "depth_weights"),
        wanted="k=2 or more",
        is_on=lambda recipe: recipe.k > 1,
    ),
    Part(
        settings=("prompts", "prompt_tokens", "answer_tokens"),
        wanted="a target or a teacher",
        is_on=lambda recipe: recipe.target is not None or recipe.teacher is not None,
    ),
    Part(
        settings=("pack",),
        wanted="samples_per_pass=2 or more",
        is_on=lambda recipe: (recipe.samples_per_pass or recipe.samples_per_step) > 1,
    ),
)


def complaints(recipe: PardRecipe, *, steps: int) -> list[str]:
    """One line for each setting that has nothing to act on.

    Args:
        recipe: only what it was given counts, and was not switched off by hand.
        steps: optimizer steps of the whole run.

    Example:
        >>> settings = {"model": "m", "data": ["d"], "out": "o", "steps": 9, "warmup_steps": 9}
        >>> for line in complaints(PardRecipe(**settings, k=1, r=0.5, distinct_masks=False), steps=9):
        ...     print(line)
        r=0.5 is ignored without k=2 or more
        warmup_steps=9: the run has 9 steps, so the learning rate never falls
    """
    found = [
        f"{name}={value} is ignored without {part.wanted}"
        for part in PARTS
        if not part.is_on(recipe)
        for name in part.settings
        if name in recipe.model_fields_set and not ((value := getattr(recipe, name)) is None or value is False)
    ]
    warmup = recipe.warmup_steps
    if "warmup_steps" in recipe.model_fields_set and warmup >= steps and recipe.schedule != "constant":
        found.append(f"warmup_steps={warmup}: the run has {steps} steps, so the learning rate never falls")
    return found
