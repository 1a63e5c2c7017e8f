"""Runs on a mix of data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paradraft.data.mix import Source
from tests.support.jsonl import write_lines
from tests.support.training import prepare_pard, train_pard
from tests.unit.train.run.test_trainer import StoppedError, recipe_for, stop_after


def test_a_run_on_a_mix_goes_on_and_is_recorded(family: Path, tmp_path: Path) -> None:
    """Guards against a resumed run that takes other samples, against one that goes on with another mix, and against a
    record that does not say what was learnt."""
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    write_lines(first, [{"text": letter * 5} for letter in "abcdefg"])
    write_lines(second, [{"text": letter * 3} for letter in "opqrstuvwxyz"])
    data = [first, Source(path=second, weight=0.5, most=8)]
    losses: dict[str, list[float]] = {}
    for name in ("whole", "stopped"):
        recipe = recipe_for(family, tmp_path, data=data, out=tmp_path / name, epochs=2, steps=None)
        if name == "stopped":
            with pytest.raises(StoppedError):
                train_pard(recipe, stop_after(7))
            other = [first, Source(path=second, weight=0.25, most=8)]
            with pytest.raises(ValueError, match="data"):
                train_pard(recipe.model_copy(update={"data": other}), lambda report: None)
        losses[name] = []
        train_pard(recipe, lambda report, name=name: losses[name].append(report.loss))
    assert len(losses["whole"]) == (7 + 4) * 2 / 2, "an epoch takes half of the second source"
    assert losses["stopped"] == losses["whole"][6:]
    record = json.loads((tmp_path / "stopped" / "train_command.json").read_text())
    assert record["recipe"]["data"] == [str(first), {"path": str(second), "weight": 0.5, "most": 8, "anchors": "all"}]
    assert record["data_sha256"].keys() == {str(first), str(second)}


def test_what_a_mix_will_do_is_said(family: Path, tmp_path: Path) -> None:
    """Guards the line before the first step, from which a user sees what a weight means."""
    file = tmp_path / "first.jsonl"
    write_lines(file, [{"text": "abc"}] * 6)
    recipe = recipe_for(family, tmp_path, data=[Source(path=file, weight=2)], epochs=1, steps=None)
    assert "6 samples of 24 tokens, 12 taken in an epoch; 6 steps of 2 samples" in prepare_pard(recipe).in_words
