from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from paradraft.train.run.checkpoint import Checkpoints, State
from paradraft.train.run.progress import BestSoFar, Score


def run_of(folder: Path, lr: float = 0.1) -> tuple[Checkpoints, torch.nn.Linear, torch.optim.Optimizer]:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    prepared = accelerator.prepare(model, optimizer)
    return Checkpoints(folder, accelerator, {"lr": lr}), *prepared


def state_of(step: int, best: int | None = None) -> State:
    worth = None if best is None else worth_of(best)
    return State(identity={"lr": 0.1}, step=step, bf16=False, standing=BestSoFar(best=worth))


def worth_of(step: int) -> Score:
    return Score(step=step, acceptance_length=None, held_out_loss=0.1)


def loaded(checkpoints: Checkpoints) -> State | None:
    state = checkpoints.state()
    if state is not None:
        checkpoints.load(state)
    return state


def names(folder: Path) -> list[str]:
    return sorted(place.name for place in folder.iterdir())


def learn(model: torch.nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_state_comes_back(tmp_path: Path) -> None:
    """Guards against a checkpoint that cannot be read back, or forgets the optimizer's moments; none is no error."""
    folder = tmp_path / "deep" / "checkpoint"
    checkpoints, model, optimizer = run_of(folder)
    assert checkpoints.state() is None
    for step in (8, 9, 10):
        learn(model, optimizer)
        checkpoints.save(state_of(step, best=7))
    assert names(folder) == ["step-00000009", "step-00000010"], "two are kept"
    others, restored, restored_optimizer = run_of(folder)
    assert loaded(others) == state_of(10, best=7)
    for some in ((model, optimizer), (restored, restored_optimizer)):
        learn(*some)
    assert torch.equal(model.weight, restored.weight)


def test_a_failure_while_writing_leaves_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards hours of training against a full disk or a kill in the middle of a save."""
    checkpoints, model, optimizer = run_of(tmp_path / "checkpoint")
    learn(model, optimizer)
    checkpoints.save(state_of(1))
    kept = model.weight.detach().clone()
    learn(model, optimizer)

    def half(state: dict[str, Any], target: Path, **settings: object) -> None:
        Path(target).write_bytes(b"half of it")
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", half)
        with pytest.raises(OSError, match="No space"):
            checkpoints.save(state_of(2))
    assert names(tmp_path / "checkpoint") == ["step-00000001"], "half a checkpoint takes room on a full disk"
    again, restored, _ = run_of(tmp_path / "checkpoint")
    assert loaded(again) == state_of(1)
    assert torch.equal(restored.weight, kept)
    again.save(state_of(2))
    assert names(tmp_path / "checkpoint") == ["step-00000001", "step-00000002"]


def test_another_recipes_state_is_refused(tmp_path: Path) -> None:
    """Guards against going on, with new settings, from the weights of another run."""
    checkpoints, _, _ = run_of(tmp_path / "checkpoint")
    assert checkpoints.state() is None
    checkpoints.save(state_of(1))
    assert checkpoints.state() == state_of(1)
    with pytest.raises(
        ValueError, match=r"step-00000001 belongs to another recipe: lr was 0\.1 and is 0\.2 now; delete"
    ):
        run_of(tmp_path / "checkpoint", 0.2)[0].state()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"fingerprint": "me"}', "[" * 100_000, "\xff"])
def test_a_state_that_cannot_be_read_is_named(tmp_path: Path, content: str) -> None:
    """Guards against a traceback out of a damaged file, or one that another version wrote."""
    checkpoints, _, _ = run_of(tmp_path / "checkpoint")
    checkpoints.save(state_of(1))
    (tmp_path / "checkpoint" / "step-00000001" / "run.json").write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=r"run\.json cannot be read: delete .*step-00000001, and the run starts again"):
        checkpoints.state()


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def shorten(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


DAMAGES = {
    "flipped bit": (flip, r"is damaged \(it is not what was written\)"),
    "truncated": (shorten, r"is damaged \(it is not what was written\)"),
    "missing": (Path.unlink, "is missing"),
}
FILES = ("step-00000003/pytorch_model.bin", "step-00000003/optimizer.bin", "drafter-00000003/model.safetensors")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_serves(tmp_path: Path, damage: str, file: str) -> None:
    """Guards hours of training against a disk: a flipped bit went unnoticed into the weights, and a file that was cut
    was a traceback. The best drafter belongs to the checkpoint: it would be the result."""
    checkpoints, model, optimizer = run_of(tmp_path / "checkpoint")
    for step in (1, 2, 3):
        learn(model, optimizer)
        if step == 2:
            kept = model.weight.detach().clone()
        checkpoints.drafter(step).mkdir(parents=True)
        (checkpoints.drafter(step) / "model.safetensors").write_bytes(b"weights %d" % step)
        checkpoints.save(state_of(step, best=1 if step < 3 else 3))
    spoil, named = DAMAGES[damage]
    spoil(checkpoints.folder / file)
    again, restored, restored_optimizer = run_of(tmp_path / "checkpoint")
    with pytest.warns(UserWarning, match=rf"{file} {named}: the run goes on from .*step-00000002$"):
        assert loaded(again) == state_of(2, best=1)
    assert torch.equal(restored.weight, kept)
    learn(restored, restored_optimizer)
    again.save(state_of(3, best=1))
    assert names(again.folder) == ["drafter-00000001", "step-00000002", "step-00000003"]
    assert run_of(tmp_path / "checkpoint")[0].state() == state_of(3, best=1)


def test_two_damaged_checkpoints_are_one_line(tmp_path: Path) -> None:
    """Guards against a run that silently starts again, or goes on from what no one wrote."""
    checkpoints, _, _ = run_of(tmp_path / "checkpoint")
    for step in (1, 2):
        checkpoints.save(state_of(step))
    flip(checkpoints.folder / "step-00000002" / "optimizer.bin")
    (checkpoints.folder / "step-00000001" / "pytorch_model.bin").unlink()
    with pytest.raises(
        ValueError, match=r"step-00000002/optimizer.bin is damaged .*step-00000001/pytorch_model.bin is missing: delete"
    ):
        run_of(tmp_path / "checkpoint")[0].state()


def test_a_result_that_is_being_put_in_place_is_not_damaged(tmp_path: Path) -> None:
    """Guards runs that were killed while the files of the best drafter moved to `out`: they go on as before."""
    checkpoints, _, _ = run_of(tmp_path / "out" / "checkpoint")
    drafter = checkpoints.drafter(1)
    (drafter / "deeper").mkdir(parents=True)
    (drafter / "deeper" / "template").write_text("a")
    (drafter / "config.json").write_text("b")
    checkpoints.save(state_of(1, best=1))
    (tmp_path / "out" / "deeper").mkdir()
    (drafter / "deeper" / "template").rename(tmp_path / "out" / "deeper" / "template")
    assert checkpoints.state() == state_of(1, best=1)
    (tmp_path / "out" / "deeper" / "template").write_text("c")
    with pytest.raises(ValueError, match="template is damaged"):
        checkpoints.state()


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a power cut: a name may reach the disk before the content, and then the newest checkpoint is
    empty, and the one before it is gone."""
    done: list[str] = []
    real = {"fsync": os.fsync, "replace": os.replace, "rmtree": shutil.rmtree}

    def fsync(descriptor: int) -> None:
        done.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        real["fsync"](descriptor)

    def replace(old: Path, new: Path) -> None:
        done.append(f"replace {Path(new).name}")
        real["replace"](old, new)

    def rmtree(folder: Path, **settings: Any) -> None:
        done.append(f"rmtree {Path(folder).name}")
        real["rmtree"](folder, **settings)

    checkpoints, _, _ = run_of(tmp_path / "checkpoint")
    for step in (1, 2):
        checkpoints.save(state_of(step))
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    checkpoints.save(state_of(3))
    named = done.index("replace step-00000003")
    files = {place.name for place in (checkpoints.folder / "step-00000003").iterdir()}
    assert files >= {"run.json", "pytorch_model.bin", "optimizer.bin"}
    assert {f"fsync {name}" for name in (*files, "step-00000003.new")} <= set(done[:named])
    assert done[named + 1 :] == ["fsync checkpoint", "rmtree step-00000001"]


def test_drafters_that_a_resumed_run_may_need_stay(tmp_path: Path) -> None:
    """Guards the best drafter of a checkpoint: it stays while a better one has come but is in no checkpoint, and goes
    with the last checkpoint that calls it the best."""
    checkpoints, _, _ = run_of(tmp_path / "checkpoint")
    kept = []

    def drafters() -> list[int]:
        return sorted(int(place.name.removeprefix("drafter-")) for place in checkpoints.folder.glob("drafter-*"))

    for step in range(1, 7):
        checkpoints.drafter(step).mkdir(parents=True)
        best = worth_of({1: 1, 2: 2, 3: 2, 4: 4, 5: 5, 6: 5}[step])
        checkpoints.keep_drafters(best)
        kept.append(drafters())
        if step in (3, 6):
            checkpoints.save(state_of(step, best=best.step))
    assert kept == [[1], [2], [2], [2, 4], [2, 5], [2, 5]]
    assert drafters() == [2, 5], "the checkpoint before the newest is kept too, and so is what it needs"
    checkpoints.save(state_of(7, best=5))
    assert drafters() == [5]
    checkpoints.delete()
    assert not checkpoints.folder.exists()
