from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paradraft.train import checkpoint
from paradraft.train.checkpoint import load_state, save_model, save_state
from tests.conftest import tiny_model, tiny_tokenizer


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_state_comes_back(tmp_path: Path) -> None:
    """Guards against a checkpoint that cannot be read back; none is no error."""
    file = tmp_path / "deep" / "state.pt"
    assert load_state(file, "me") is None
    for step in (1, 2):
        save_state(file, {"fingerprint": "me", "step": step, "weights": torch.arange(3)})
        state = load_state(file, "me")
        assert state is not None and state["step"] == step and state["weights"].tolist() == [0, 1, 2]
    assert [found.name for found in file.parent.iterdir()] == ["state.pt"]


def test_a_failure_while_writing_leaves_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards hours of training against a full disk or a kill in the middle of a save."""
    file = tmp_path / "state.pt"
    save_state(file, {"fingerprint": "me", "step": 1})
    old = file.read_bytes()

    def half(state: dict[str, Any], target: Path) -> None:
        Path(target).write_bytes(b"half of it")
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.torch, "save", half)
        with pytest.raises(OSError, match="No space"):
            save_state(file, {"fingerprint": "me", "step": 2})
    assert file.read_bytes() == old
    save_state(file, {"fingerprint": "me", "step": 3})
    assert load_state(file, "me") == {"fingerprint": "me", "step": 3}


def test_another_recipes_state_is_refused(tmp_path: Path) -> None:
    """Guards against going on, with new settings, from the weights of another run."""
    save_state(tmp_path / "state.pt", {"fingerprint": "me"})
    with pytest.raises(ValueError, match=r"state\.pt belongs to another recipe"):
        load_state(tmp_path / "state.pt", "you")


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
