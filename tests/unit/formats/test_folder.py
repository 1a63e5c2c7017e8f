"""Model folders are whole whenever the process ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paradraft.formats.folder import save_model
from tests.conftest import tiny_model, tiny_tokenizer


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


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
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: (moved.append(Path(new).name), replace(old, new)))
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
    assert [folder.name for folder in tmp_path.iterdir()] == ["model"]


def test_a_users_folder_with_a_name_like_ours_is_kept(tmp_path: Path) -> None:
    """Guards `out.new`, which was deleted without a word, even when it was what `out` was made from."""
    save_model(tmp_path / "out.new", tiny_model(1), tiny_tokenizer())
    before = contents(tmp_path / "out.new")
    save_model(tmp_path / "out", tiny_model(1), tiny_tokenizer())
    assert contents(tmp_path / "out.new") == before
    assert {folder.name for folder in tmp_path.iterdir()} == {"out", "out.new"}


def test_whoever_reads_the_config_reads_the_weights(tmp_path: Path) -> None:
    """Guards servers that run as another user: safetensors are written for their owner alone."""
    save_model(tmp_path / "model", tiny_model(1), tiny_tokenizer())
    assert len({file.stat().st_mode for file in (tmp_path / "model").iterdir()}) == 1
