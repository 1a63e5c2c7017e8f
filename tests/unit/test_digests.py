from __future__ import annotations

import os
from pathlib import Path

import pytest

from paradraft import digests


def test_a_large_file_is_sampled_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a digest that reads the header of a file of weights alone, or a hundred gigabytes."""
    monkeypatch.setattr(digests, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(digests, "PIECES", 4)
    monkeypatch.setattr(digests, "PIECE_BYTES", 10)
    weights = tmp_path / "model.safetensors"
    content = bytearray(1001)
    seen = []
    weights.write_bytes(content)
    before = digests.model_digest(tmp_path)
    for place in range(1001):
        changed = content.copy()
        changed[place] = 1
        weights.write_bytes(changed)
        if digests.model_digest(tmp_path) != before:
            seen.append(place)
    assert seen == [*range(10), *range(330, 340), *range(660, 670), *range(991, 1001)]
    weights.write_bytes(content + b"0")
    assert digests.model_digest(tmp_path) != before, "the size counts too"


def test_a_copy_is_the_same_and_a_file_that_is_not_read_is_nothing(tmp_path: Path) -> None:
    """Guards runs that go on on another machine, and folders in which notes lie beside the model."""
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        for file in ("config.json", "tokenizer.json", "model-00001-of-00002.safetensors"):
            (folder / file).write_text(file)
            os.utime(folder / file, (0, ord(name)))
    assert digests.model_digest(tmp_path / "a") == digests.model_digest(tmp_path / "b")
    (tmp_path / "a" / "README.md").write_text("notes")
    assert digests.model_digest(tmp_path / "a") == digests.model_digest(tmp_path / "b")
    (tmp_path / "a" / "tokenizer.json").write_text("another")
    assert digests.model_digest(tmp_path / "a") != digests.model_digest(tmp_path / "b")
