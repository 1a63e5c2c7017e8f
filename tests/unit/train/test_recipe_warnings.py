from __future__ import annotations

from pathlib import Path

import pytest
from examples.demo import FULL, SHORT, recipe

from paradraft.train import recipe_class, trainee_module, trainee_names
from paradraft.train.drafters.pard_recipe import PardRecipe
from paradraft.train.init.templates import templates_of
from paradraft.train.recipe_file import load_recipe
from paradraft.train.recipe_parts import ignored_settings

RECIPES = Path(__file__).parents[3] / "recipes"
BASE = {"model": "m", "data": ["d"], "out": "o", "steps": 100}


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"muon_lr": 0.1}, "muon_lr=0.1 is ignored without optimizer=muon"),
        ({"muon_lr": 0.1, "optimizer": "muon"}, None),
        ({"k": 1, "r": 0.7}, "r=0.7 is ignored without k=2 or more"),
        ({"k": 1, "r_min": 0}, "r_min=0.0 is ignored without k=2 or more"),
        ({"k": 1, "distinct_masks": True}, "distinct_masks=True is ignored without k=2 or more"),
        ({"k": 1, "mask_token_id": 3}, "mask_token_id=3 is ignored without k=2 or more"),
        ({"k": 1, "depth_weights": [2]}, r"depth_weights=[2.0] is ignored without k=2 or more"),
        ({"k": 1, "distinct_masks": False, "mask_token_id": None}, None),
        ({"prompts": 3}, "prompts=3 is ignored without a target to measure with"),
        ({"answer_tokens": 3}, "answer_tokens=3 is ignored without a target to measure with"),
        ({"prompt_tokens": 3, "teacher": "t"}, None),
        ({"pack": True, "samples_per_pass": 1}, "pack=True is ignored without samples_per_pass=2 or more"),
        ({"pack": True, "samples_per_step": 2}, None),
        ({"warmup_steps": 100}, "warmup_steps=100: the run has 100 steps, so the learning rate never falls"),
        ({"warmup_steps": 99}, None),
        ({"warmup_steps": 100, "schedule": "constant"}, None),
        ({"k": 1}, None),
    ],
)
def test_what_was_given_and_is_ignored_is_named(settings: dict[str, object], complaint: str | None) -> None:
    """Guards against a setting that is silently ignored, and against complaints of defaults that nobody wrote down."""
    assert ignored_settings(PardRecipe(**BASE, **settings), steps=100) == ([] if complaint is None else [complaint])


def test_our_own_recipes_say_nothing_in_vain() -> None:
    """Guards the recipes that people copy."""
    trained = [file for file in RECIPES.rglob("*.yaml") if file.parent.name != "tables"]
    shipped = [file for name in trainee_names() for file in templates_of(name).values()]
    assert len(trained) > 4 and len(shipped) > 10
    for file in trained + shipped:
        named = [name for name in (file.stem, file.parent.name) if name in trainee_names()]
        name = named[0] if named else "pard"
        kind = recipe_class(trainee_module(name))
        assert ignored_settings(load_recipe(kind, file, []), steps=10_000) == [], file
    for size in (SHORT, FULL):
        assert ignored_settings(recipe(Path("out"), size), steps=size.steps) == []
