from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from paradraft.train import checkpoint
from paradraft.train.checkpoint import Checkpoints, State, save_model
from paradraft.train.standing import Standing, Worth
from tests.conftest import tiny_model, tiny_tokenizer


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def run_of(folder: Path, lr: float = 0.1) -> tuple[Checkpoints, torch.nn.Linear, torch.optim.Optimizer]:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    prepared = accelerator.prepare(model, optimizer)
    return Checkpoints(folder, accelerator, {"lr": lr}), *prepared


def state_of(step: int, best: int | None = None) -> State:
    worth = None if best is None else worth_of(best)
    return State(identity={"lr": 0.1}, step=step, bf16=False, standing=Standing(best=worth))


def worth_of(step: int) -> Worth:
    return Worth(step=step, acceptance_length=None, held_out_loss=0.1)


def learn(model: torch.nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_state_comes_back(tmp_path: Path) -> None:
    """Guards against a checkpoint that cannot be read back, or forgets the optimizer's moments; none is no error."""
    folder = tmp_path / "deep" / "checkpoint"
    checkpoints, model, optimizer = run_of(folder)
    assert checkpoints.load() is None
    for step in (9, 10):
        learn(model, optimizer)
        checkpoints.save(state_of(step, best=7))
    assert [place.name for place in folder.iterdir()] == ["step-00000010"]
    others, restored, restored_optimizer = run_of(folder)
    assert others.load() == state_of(10, best=7)
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
    again, restored, _ = run_of(tmp_path / "checkpoint")
    assert again.load() == state_of(1)
    assert torch.equal(restored.weight, kept)
    again.save(state_of(2))
    assert [place.name for place in (tmp_path / "checkpoint").iterdir()] == ["step-00000002"]


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


def test_drafters_that_a_resumed_run_may_need_stay(tmp_path: Path) -> None:
    """Guards the best drafter of the newest checkpoint: it stays while a better one has come but is in no checkpoint,
    and goes with the next."""
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
    assert drafters() == [5]
    checkpoints.delete()
    assert not checkpoints.folder.exists()


@pytest.mark.parametrize("step", ["save_pretrained of the model", "save_pretrained of the tokenizer"])
def test_a_failure_while_writing_leaves_the_old_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Guards against a drafter folder that is half old and half new, or that exists but is not whole."""
    model, tokenizer = tiny_model(1), tiny_tokenizer()
    broken = model if "model" in step else tokenizer

    def half(folder: Path) -> None:
        Path(folder).mkdir(exist_ok=True)
        (Path(folder) / "config.json").write_text("half")
        raise OSError("No space left on device")

    for folder in (tmp_path / "none", tmp_path / "old"):
        if folder.name == "old":
            save_model(folder, tiny_model(2), tiny_tokenizer())
        old = contents(folder)
        with monkeypatch.context() as patched:
            patched.setattr(broken, "save_pretrained", half)
            with pytest.raises(OSError, match="No space"):
                save_model(folder, model, tokenizer)
        assert contents(folder) == old
        assert folder.exists() == (folder.name == "old")


def test_the_config_appears_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a folder that counts as trained (it has a config.json) before its weights are there."""
    moved = []
    replace = checkpoint.os.replace
    monkeypatch.setattr(checkpoint.os, "replace", lambda old, new: (moved.append(Path(new).name), replace(old, new)))
    save_model(tmp_path / "out", tiny_model(1), tiny_tokenizer())
    moved = [name for name in moved if (tmp_path / "out" / name).exists()]
    assert "model.safetensors" in moved and moved[-1] == "config.json"
    assert [folder.name for folder in tmp_path.iterdir()] == ["out"]


def test_a_folder_inside_is_replaced_too(tmp_path: Path) -> None:
    """Guards tokenizers with several chat templates, which have a folder of their own: the second model of a run could
    not be written over the first."""
    tokenizer = tiny_tokenizer()
    for text in ("one", "two"):
        tokenizer.chat_template = {"default": "x", "other": text}
        save_model(tmp_path / "model", tiny_model(1), tokenizer)
        assert any(text.encode() == content for content in contents(tmp_path / "model").values())
    assert not (tmp_path / "model.new").exists()


def test_whoever_reads_the_config_reads_the_weights(tmp_path: Path) -> None:
    """Guards servers that run as another user: safetensors are written for their owner alone."""
    save_model(tmp_path / "model", tiny_model(1), tiny_tokenizer())
    assert len({file.stat().st_mode for file in (tmp_path / "model").iterdir()}) == 1
