"""A run that is stopped, wherever that is, comes to the same end as one that is not."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from paradraft.train.drafters.pard_recipe import PardRecipe
from paradraft.train.run.acceptance import AcceptanceMeter, Decoded
from paradraft.train.run.progress import Report
from tests.support.training import train_pard
from tests.unit.train.run.test_trainer import recipe_for


class KilledError(BaseException):
    """What stands for the end of the process."""


class Disk:
    """Counts what changes the disk in whole steps, and ends the process at one of them.

    Nothing after that reaches the disk: a process that was killed does not tidy up.

    Args:
        dies_at: before which change, counted from 0; None lives.
    """

    def __init__(self, patch: pytest.MonkeyPatch, dies_at: int | None = None) -> None:
        self.changes: list[str] = []
        self._dies_at = dies_at
        for owner, name in ((os, "replace"), (shutil, "rmtree"), (Path, "write_text"), (Path, "rmdir")):
            patch.setattr(owner, name, self._counted(name, getattr(owner, name)))

    def _counted(self, name: str, change: Callable[..., Any]) -> Callable[..., Any]:
        def counted(place: Path | str, *rest: Any, **settings: Any) -> Any:
            if name == "rmtree" and not Path(place).exists():
                return
            dies = None if self._dies_at is None else len(self.changes) - self._dies_at
            self.changes.append(f"{name} {Path(place).name}")
            if dies is None or dies < 0:
                change(place, *rest, **settings)
                return
            if dies == 0 and name == "rmtree":  # half of it is gone
                for file in [file for file in Path(place).rglob("*") if file.is_file()][:1]:
                    file.unlink()
            if dies == 0 and name == "write_text":  # half of it is there
                change(place, rest[0][: len(rest[0]) // 2], **settings)
            raise KilledError

        return counted


def result(out: Path) -> dict[str, object]:
    """All that a run leaves, but for times, and what the sources are at the time."""
    found: dict[str, object] = {
        str(file.relative_to(out)): file.read_bytes() for file in out.rglob("*") if file.is_file()
    }
    found["README.md"] = (out / "README.md").read_text().replace(str(out), "OUT")
    lines = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    found["history.jsonl"] = [{k: v for k, v in line.items() if k not in ("rows_per_s", "left_s")} for line in lines]
    record = json.loads((out / "train_command.json").read_text())
    found["train_command.json"] = {k: v for k, v in record.items() if k != "machine"}
    del found["train_command.json"]["recipe"]["out"]
    return found


LENGTHS = {
    "before the last checkpoint": (1.5, 2.0, 1.2, 1.1, 1.8, 1.3),
    "after it": (1.5, 1.2, 1.6, 1.1, 1.8, 1.3),
    "patience": (2.0, 1.5, 1.2, 1.1, 1.8, 1.3),
}
"""Where the best drafter is found, by the lengths that the evaluations measure; the last checkpoint is after step 4."""


class StoppedError(Exception):
    """What a test stops a run with."""


def stopped(recipe: PardRecipe, step: int) -> None:
    """Trains up to the first report after a step."""

    def report(progress: Report) -> None:
        if progress.step >= step:
            raise StoppedError

    with pytest.raises(StoppedError):
        train_pard(recipe, report)


def measuring(patch: pytest.MonkeyPatch, lengths: Sequence[float]) -> None:
    """Lets the evaluation after step n measure the n-th length, and the one before all steps one token."""

    def of(self: AcceptanceMeter, folder: Path) -> Decoded:
        return Decoded(length=(1.0, *lengths)[int(folder.name.partition("-")[2])])

    patch.setattr(AcceptanceMeter, "of", of)


def run_of(family: Path, out: Path, **settings: object) -> PardRecipe:
    """Six steps, each with an evaluation, and a checkpoint after every second."""
    return recipe_for(
        family, out.parent, out=out, steps=6, held_out=2, save_every=2, evaluate_every=1, optimizer="adamw",
        target=str(family / "target"), prompt_tokens=4, answer_tokens=8, **settings,
    )  # fmt: skip


def killed(recipe: PardRecipe, change: int | None) -> list[str]:
    """Trains until a change of the disk; returns all changes up to there."""
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch, change)
        try:
            train_pard(recipe, lambda report: None)
        except KilledError:
            assert change is not None
    return disk.changes


def check_all_kills(family: Path, folder: Path, lengths: str, monkeypatch: pytest.MonkeyPatch, names: set[str]) -> None:
    """Kills a run at all changes of some names, and compares what it leaves after going on with that of a whole run."""
    measuring(monkeypatch, LENGTHS[lengths])
    # In a process of thousands of tests each collection of garbage takes a second, and there are hundreds.
    monkeypatch.setattr("paradraft.train.run.trainer.give_back", lambda: None)
    settings = {"patience": 3} if lengths == "patience" else {}
    whole = run_of(family, folder / "whole", **settings)
    changes = killed(whole, None)
    expected = result(whole.out)
    assert names <= set(changes)
    for number, change in enumerate(changes):
        if names and change not in names:
            continue
        recipe = run_of(family, folder / f"killed-{number}", **settings)
        killed(recipe, number)
        train_pard(recipe, lambda report: None)
        assert result(recipe.out) == expected, (number, change)
        assert not train_pard(recipe, lambda report: None)


@pytest.mark.parametrize(
    ("lengths", "names"),
    [
        pytest.param(
            "before the last checkpoint",
            {"rmtree drafter-00000001", "rmtree drafter-00000002"},
            marks=pytest.mark.slow,
        ),
        ("after it", {"rmtree drafter-00000003", "rmtree step-00000002"}),
        pytest.param(
            "patience",
            {"rmtree drafter-00000004", "rmtree step-00000004", "replace tokenizer_config.json"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_kill_where_the_best_changes_hands(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lengths: str, names: set[str]
) -> None:
    """Guards the result against a kill between two writes that belong together: the best drafter and the state that
    names it, the drafter in its place and the record beside it, the files of a drafter that is moved (the card must not
    depend on which are there), the last step and the end of the checkpoints."""
    check_all_kills(family, tmp_path, lengths, monkeypatch, names)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_kill_anywhere(family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lengths: str) -> None:
    """Guards all orders of writes: as above, at every single one."""
    check_all_kills(family, tmp_path, lengths, monkeypatch, set())


def test_the_best_is_what_the_state_says(family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a folder that holds a drafter nobody measured: what was the best before a kill need not be when
    its steps are taken again, on another machine, and then the one before must still be there."""
    first, again = (1.5, 2.0, 2.5), (1.5, 2.0, 1.0, 1.1, 1.2, 1.3)
    measuring(monkeypatch, LENGTHS["before the last checkpoint"])
    expected = run_of(family, tmp_path / "whole")
    train_pard(expected, lambda report: None)
    recipe = run_of(family, tmp_path / "moved")
    measuring(monkeypatch, first)
    with pytest.raises(IndexError):
        train_pard(recipe, lambda report: None)
    measuring(monkeypatch, again)
    train_pard(recipe, lambda report: None)
    record = json.loads((recipe.out / "train_command.json").read_text())
    assert (record["best"]["step"], record["best"]["acceptance_length"]) == (2, 2.0)
    assert result(recipe.out)["model.safetensors"] == result(expected.out)["model.safetensors"]


def test_memory_is_no_part_of_a_run(family: Path, tmp_path: Path) -> None:
    """Guards a run that ends for want of memory: it goes on with smaller passes, and learns the same."""
    common = {"samples_per_step": 3, "average": "per_depth", "optimizer": "adamw", "max_length": 33}
    whole, begun = (recipe_for(family, tmp_path, out=tmp_path / name, **common) for name in ("whole", "begun"))
    losses: dict[int, float] = {}

    def note(report: Report) -> None:
        losses[report.step] = report.loss

    train_pard(whole, note)
    expected = dict(losses)
    stopped(begun, 3)
    less = {"samples_per_pass": 1, "pack": True, "gradient_checkpointing": True, "save_every": 3, "log_every": 2}
    train_pard(begun.model_copy(update=less), note)
    assert losses == pytest.approx({**expected, 4: (expected[3] + expected[4]) / 2}, rel=1e-5)


@pytest.mark.parametrize("role", ["model", "target"])
def test_a_model_that_changed_is_named(family: Path, tmp_path: Path, role: str) -> None:
    """Guards against one run with two teachers, or a drafter merged into another start than its own."""
    folder = shutil.copytree(family / "draft", tmp_path / "copy")
    measured = {"held_out": 2, "evaluate_every": 5, "prompt_tokens": 4, "answer_tokens": 8}
    settings = {role: str(folder)} if role == "model" else {role: str(folder), **measured}
    stopped(recipe_for(family, tmp_path, **settings), 3)
    shutil.copy(family / "target" / "model.safetensors", folder)
    with pytest.raises(ValueError, match=f"step-00000002 belongs to another recipe: {role} was"):
        train_pard(recipe_for(family, tmp_path, **settings), lambda report: None)


@pytest.mark.parametrize(("log_every", "save_every"), [(3, 2), (4, 3), (6, 5)])
def test_averages_go_over_the_stop(family: Path, tmp_path: Path, log_every: int, save_every: int) -> None:
    """Guards the reported losses: one that began before a checkpoint goes on after it, to the last bit."""
    rhythm = {"log_every": log_every, "save_every": save_every, "steps": 6}
    whole, begun = (recipe_for(family, tmp_path, out=tmp_path / name, **rhythm) for name in ("whole", "begun"))
    train_pard(whole, lambda report: None)
    stopped(begun, save_every + 1)
    train_pard(begun, lambda report: None)
    assert result(begun.out) == result(whole.out)


def test_everything_together(family: Path, tmp_path: Path) -> None:
    """Guards what a real run combines: adapters, packing, a teacher, evaluations and patience, stopped between two
    reports and two evaluations."""
    settings = {
        "lora": {"rank": 2}, "pack": True, "samples_per_pass": 2, "samples_per_step": 4, "optimizer": "adamw",
        "teacher": str(family / "target"), "held_out": 2, "evaluate_every": 3, "prompt_tokens": 4, "answer_tokens": 8,
        "patience": 4, "steps": 12, "log_every": 5, "save_every": 4, "lr": 3e-2, "max_length": 33,
    }  # fmt: skip
    whole, begun = (recipe_for(family, tmp_path, out=tmp_path / name, **settings) for name in ("whole", "begun"))
    train_pard(whole, lambda report: None)
    for step in (5, 9):
        stopped(begun, step)
    train_pard(begun, lambda report: None)
    assert result(begun.out) == result(whole.out)
