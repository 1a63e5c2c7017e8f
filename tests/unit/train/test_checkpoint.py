from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from paradraft.train import checkpoint
from paradraft.train.checkpoint import Checkpoints, save_model
from tests.conftest import tiny_model, tiny_tokenizer


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def run_of(folder: Path, fingerprint: str = "me") -> tuple[Checkpoints, torch.nn.Linear, torch.optim.Optimizer]:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    prepared = accelerator.prepare(model, optimizer)
    return Checkpoints(folder, accelerator, fingerprint), *prepared


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
        checkpoints.save(step, best=0.5)
    assert [place.name for place in folder.iterdir()] == ["step-00000010"]
    others, restored, restored_optimizer = run_of(folder)
    assert others.load() == {"fingerprint": "me", "step": 10, "best": 0.5}
    for some in ((model, optimizer), (restored, restored_optimizer)):
        learn(*some)
    assert torch.equal(model.weight, restored.weight)


def test_a_failure_while_writing_leaves_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards hours of training against a full disk or a kill in the middle of a save."""
    checkpoints, model, optimizer = run_of(tmp_path / "checkpoint")
    learn(model, optimizer)
    checkpoints.save(1)
    kept = model.weight.detach().clone()
    learn(model, optimizer)

    def half(state: dict[str, Any], target: Path, **settings: object) -> None:
        Path(target).write_bytes(b"half of it")
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", half)
        with pytest.raises(OSError, match="No space"):
            checkpoints.save(2)
    again, restored, _ = run_of(tmp_path / "checkpoint")
    again.check()
    assert again.load() == {"fingerprint": "me", "step": 1}
    assert torch.equal(restored.weight, kept)
    again.save(2)
    assert [place.name for place in (tmp_path / "checkpoint").iterdir()] == ["step-00000002"]


def test_another_recipes_state_is_refused(tmp_path: Path) -> None:
    """Guards against going on, with new settings, from the weights of another run."""
    checkpoints, _, _ = run_of(tmp_path / "checkpoint")
    checkpoints.check()
    checkpoints.save(1)
    checkpoints.check()
    with pytest.raises(ValueError, match="step-00000001 belongs to another recipe"):
        run_of(tmp_path / "checkpoint", "you")[0].check()


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
