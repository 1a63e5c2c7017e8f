"""Heads that are trained alone, on a drafter that stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paradraft.formats.head import read_checkpoint
from paradraft.formats.vocab_map import D2T
from paradraft.train.optimizers import hidden_and_rest
from tests.contract.test_every_trainee import prepare, recipe_for, train

CASES: list[tuple[str, dict[str, Any], str]] = [
    ("dflash", {"markov_rank": 4, "draft_vocab_size": 20}, "markov."),
    ("dflash", {"selector_rank": 3, "causal": False, "anchor_first": False}, "selector."),
    ("eagle_parallel", {"previous_token_rank": 4, "optimizer": "muon", "muon_lr": 1e-2}, "previous."),
]


@pytest.mark.parametrize(("name", "settings", "prefix"), CASES)
def test_all_but_the_head_stays_to_the_bit(
    family: Path, tmp_path: Path, name: str, settings: dict[str, Any], prefix: str
) -> None:
    """Guards a drafter that was good before, and whose head is to be tried."""
    is_head = ("previous_token_rank", "markov_rank", "selector_rank")
    plain = {key: value for key, value in settings.items() if key not in is_head}
    train(name, recipe_for(name, family, tmp_path / "before", k=3, **plain))
    alone = {"start": str(tmp_path / "before"), "head_only": True}
    train(name, recipe_for(name, family, tmp_path / "after", k=3, steps=8, **settings, **alone))
    before, after = (read_checkpoint(str(tmp_path / folder)) for folder in ("before", "after"))
    assert (D2T in after.weights) is ("draft_vocab_size" in settings)
    assert all(torch.equal(weight, after.weights[key]) for key, weight in before.weights.items())
    new = {key: weight for key, weight in after.weights.items() if key not in before.weights}
    assert new and all(key.startswith(prefix) for key in new)
    started_at_zero = {"markov.": "output", "selector.": "output", "previous.": "correction"}[prefix]
    assert bool(new[f"{prefix}{started_at_zero}.weight"].any())


@pytest.mark.parametrize(
    "settings", [{"markov_rank": 4}, {"start": "somewhere"}, {"start": "somewhere", "k": 1, "previous_token_rank": 4}]
)
def test_a_head_alone_needs_a_drafter_and_a_head(family: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="head_only=true: give the drafter whose weights stay as start, and the rank"):
        recipe_for("dflash", family, tmp_path / "out", head_only=True, **{"k": 3} | settings)


def test_muon_trains_no_head(family: Path, tmp_path: Path) -> None:
    """Guards heads against updates whose size does not depend on the gradient's: from zero they grow into noise."""
    recipe = recipe_for("dflash", family, tmp_path / "out", k=3, previous_token_rank=4)
    objective = prepare("dflash", recipe).trainee.objective
    names = {id(weight): name for name, weight in objective.named_parameters()}
    hidden, rest = ([names[id(weight)] for weight in part] for part in hidden_and_rest(objective))
    assert [name for name in rest if name.startswith("previous.")] and "fc.weight" in hidden
    assert not [name for name in hidden if name.startswith("previous.")]
