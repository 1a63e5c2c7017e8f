"""Room on the disk: checked before the first step, and told in one line when it is gone."""

from __future__ import annotations

import errno
import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from paradraft.files import one_line_when_full
from paradraft.train.run import disk
from paradraft.train.run.disk import Need, estimate
from tests.support.training import prepare_pard, train_pard
from tests.unit.train.run.test_checkpoint import run_of, state_of
from tests.unit.train.run.test_trainer import StoppedError, recipe_for, stop_after

Usage = namedtuple("Usage", "total used free")


def room(patch: pytest.MonkeyPatch, free: float) -> None:
    patch.setattr(shutil, "disk_usage", lambda place: Usage(10**15, 0, free))


def test_a_disk_without_room_is_refused(family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards hours of training that end at the first checkpoint: room is checked before the first step, for all
    checkpoints at a time and the drafter. What the checkpoints of a stopped run take already is no further need."""
    recipe = recipe_for(family, tmp_path, save_every=1)
    prepared = prepare_pard(recipe)
    need = estimate(recipe, prepared.trainee.objective, steps=5, measures=False)
    room(monkeypatch, need.total - 1)
    with pytest.raises(
        ValueError,
        match=r"out: this run needs \d+ MiB on the disk \(3 checkpoints of 0 MiB.*\d+ MiB are free: make room",
    ):
        train_pard(recipe, lambda report: None)
    assert not recipe.out.exists()
    room(monkeypatch, need.total)
    with pytest.raises(StoppedError):
        train_pard(recipe, stop_after(3))
    there = sum(file.stat().st_size for file in (recipe.out / "checkpoint").rglob("*") if file.is_file())
    room(monkeypatch, need.total - there)
    assert train_pard(recipe, lambda report: None)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_estimate_is_what_a_run_takes(family: Path, tmp_path: Path, optimizer: str) -> None:
    """Guards the estimate against the files: neither is a run refused that has room, nor one begun that has not."""
    recipe = recipe_for(family, tmp_path, optimizer=optimizer, save_every=1, held_out=2, evaluate_every=1)
    prepared = prepare_pard(recipe)
    need = estimate(recipe, prepared.trainee.objective, steps=5, measures=True)
    with pytest.raises(StoppedError):
        train_pard(recipe, stop_after(4))
    folders = list((recipe.out / "checkpoint").glob("step-*"))
    assert len(folders) == 2 < need.checkpoints
    for folder in folders:
        size = sum(file.stat().st_size for file in folder.iterdir())
        # Tensors this small have headers as large as themselves.
        assert need.each <= size < need.each + 60_000
    weights = (recipe.out / "checkpoint").glob("drafter-*/model.safetensors")
    sizes = [file.stat().st_size for file in weights]
    assert max(sizes) * disk.DRAFTERS == pytest.approx(need.drafters, rel=0.1) and len(sizes) <= disk.DRAFTERS


def test_no_more_checkpoints_are_counted_than_there_will_be(family: Path, tmp_path: Path) -> None:
    """Guards short runs, which write one checkpoint, and that only if they are stopped."""
    for steps, saves in ((5, 1), (101, 2), (1000, 3)):
        recipe = recipe_for(family, tmp_path, steps=steps, save_every=100)
        assert estimate(recipe, torch.nn.Linear(2, 2), steps=steps, measures=False).checkpoints == saves


TORCHS = "[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"
SAFETENSORS = "Error while serializing: I/O error: No space left on device (os error 28)"


ERRORS = {
    "ENOSPC": OSError(errno.ENOSPC, "No space left on device"),
    "EDQUOT": OSError(errno.EDQUOT, "Disk quota exceeded"),
    "torch": RuntimeError(TORCHS),
    "safetensors": SafetensorError(SAFETENSORS),
}
RARE = [("checkpoint", "safetensors"), ("drafter", "torch"), ("drafter", "EDQUOT")]
"""What does not come from there, and what has been seen at the other place."""


@pytest.mark.parametrize(
    ("place", "error"),
    [
        pytest.param(place, error, id=f"{place}-{name}", marks=pytest.mark.slow if (place, name) in RARE else ())
        for place in ("checkpoint", "drafter")
        for name, error in ERRORS.items()
    ],
)
def test_a_disk_that_fills_up_is_one_line(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, place: str
) -> None:
    """Guards a run of days against a traceback, and against half a checkpoint that fills the disk for good. The same
    command goes on from the checkpoint before."""
    settings = {"held_out": 2, "evaluate_every": 3} if place == "drafter" else {}
    whole, recipe = (recipe_for(family, tmp_path, out=tmp_path / name, **settings) for name in ("whole", "filled"))
    train_pard(whole, lambda report: None)
    owner, name, last = (
        (torch, "save", "step-00000004") if place == "checkpoint" else (PreTrainedModel, "save_pretrained", "-00000003")
    )
    save = getattr(owner, name)

    def full(*given: Any, **settings: Any) -> None:
        if last in str(given[1]):
            raise error
        save(*given, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        with pytest.raises(OSError, match="no space is left on the disk: make room, and the same command") as raised:
            train_pard(recipe, lambda report: None)
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(recipe.out))
    kept = ["step-00000002"] if place == "checkpoint" else ["drafter-00000000", "step-00000002"]
    assert sorted(folder.name for folder in (recipe.out / "checkpoint").iterdir()) == kept
    train_pard(recipe, lambda report: None)
    ours, theirs = ((run.out / "model.safetensors").read_bytes() for run in (recipe, whole))
    assert ours == theirs


def test_other_errors_stay_what_they_are() -> None:
    """Control: a bug must not be told as a full disk."""
    for error in (RuntimeError("shapes differ"), OSError(errno.EACCES, "denied"), SafetensorError("no header")):
        with pytest.raises(type(error), match=str(error.args[-1])), one_line_when_full(Path("out"), "again"):
            raise error


def test_a_file_that_the_disk_refuses_at_the_end_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards file systems that only say on fsync that there was no room: that checkpoint never gets its name."""
    checkpoints, _, _ = run_of(tmp_path / "checkpoint")
    checkpoints.save(state_of(1))

    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(OSError, match="No space"):
            checkpoints.save(state_of(2))
    assert checkpoints.state() == state_of(1)
    assert [place.name for place in checkpoints.folder.iterdir()] == ["step-00000001"]


def test_sizes_are_told_in_units_that_fit() -> None:
    """Guards against "0.0 GiB" in the complaint about a small model."""
    need = Need(checkpoints=3, each=3.0 * 2**30, drafters=2.0**20)
    assert need.total == 9 * 2**30 + 2**20 + disk.SLACK_BYTES
    with pytest.MonkeyPatch.context() as patch:
        room(patch, 2**20)
        with pytest.raises(
            ValueError, match=r"needs 9\.1 GiB .*\(3 checkpoints of 3\.0 GiB, drafters 1 MiB\), and 1 MiB"
        ):
            need.check(Path("no/such/folder"), Path("no/such/folder/checkpoint"))
