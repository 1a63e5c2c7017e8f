"""Heads that are trained alone, on a drafter that stays as it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from paradraft.formats.head import read_checkpoint
from paradraft.formats.vocab_map import D2T
from paradraft.train.optimizers import Optimizers
from tests.contract.test_every_trainee import prepare, recipe_for, train

CASES: list[tuple[str, dict[str, Any], str]] = [
    ("dflash", {"markov_rank": 4, "draft_vocab_size": 20}, "markov."),
    ("dflash", {"selector_rank": 3, "causal": False, "anchor_first": False}, "selector."),
    ("eagle_parallel", {"previous_token_rank": 4}, "previous."),
]


@pytest.mark.parametrize(("name", "settings", "prefix"), CASES)
def test_all_but_the_head_stays_to_the_bit(
    family: Path, tmp_path: Path, name: str, settings: dict[str, Any], prefix: str
) -> None:
    """Guards a drafter that was good before, and whose head is to be tried."""
    is_head = ("previous_token_rank", "markov_rank", "selector_rank")
    plain = {key: value for key, value in settings.items() if key not in is_head}
    train(name, recipe_for(name, family, tmp_path / "before", k=3, **plain))
    alone = {"start": str(tmp_path / "before"), "head_only": True, "optimizer": "adamw"}
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
    with pytest.raises(ValueError, match="optimizer=muon: heads are trained by AdamW, set optimizer=adamw"):
        recipe_for("dflash", family, tmp_path / "out", head_only=True, optimizer="muon", start="x", markov_rank=4)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("dflash", {"layers": 1}, "has num_hidden_layers=2 and this recipe 1: give it the settings of start"),
        ("dflash", {"causal": False}, "has causal=True and this recipe False"),
        ("dflash", {"k": 4}, "has k=3 and this recipe 4"),
        ("dflash", {"target_layers": [1]}, "and this recipe [1]"),
        ("eagle_parallel", {}, "head_only=true: start="),
        ("dflash", {"draft_vocab_size": 20}, "has another output head or other layers than this recipe"),
        ("dflash", {"head_rank": 4}, "has another output head or other layers than this recipe"),
    ],
)
def test_a_head_is_trained_on_the_drafter_that_it_is_for(
    family: Path, tmp_path: Path, name: str, settings: dict[str, Any], message: str
) -> None:
    """Guards weights that are frozen at random: of layers, or an output head, that start has not."""
    train("dflash", recipe_for("dflash", family, tmp_path / "before", k=3, layers=2, steps=1, warmup_steps=0))
    given = {"k": 3, "start": str(tmp_path / "before"), "head_only": True, "markov_rank": 4, "optimizer": "adamw"}
    with pytest.raises(ValueError, match=re.escape(message)):
        train(name, recipe_for(name, family, tmp_path / "out", **given | settings))
    assert not (tmp_path / "out" / "config.json").exists()


def test_muon_trains_no_head(family: Path, tmp_path: Path) -> None:
    """Guards heads against updates whose size does not depend on the gradient's: from zero they grow into noise. Their
    weights decay as those of other matrices."""
    recipe = recipe_for("dflash", family, tmp_path / "out", k=3, previous_token_rank=4)
    objective = prepare("dflash", recipe).trainee.objective
    names = {id(weight): name for name, weight in objective.named_parameters()}
    optimizers = Optimizers(objective, lr=1e-3, muon_lr=1e-2, warmup_steps=0, steps=9, weight_decay=0.5)
    (muon, _), (adamw, _) = optimizers._optimizers
    by_muon, decayed, rest = (
        {names[id(weight)] for weight in group["params"]} for one in (muon, adamw) for group in one.param_groups
    )
    assert "fc.weight" in by_muon and "norm.weight" in rest
    assert "previous.correction.weight" in decayed and all(name.startswith("previous.") for name in decayed)
    assert [group["weight_decay"] for group in adamw.param_groups] == [0.5, 0.0]
