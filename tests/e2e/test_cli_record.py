"""`paradraft record` as a user meets it: a table that every command finds, and that the next run goes on with."""

from __future__ import annotations

from pathlib import Path

import pytest

from paradraft.cli.commands.drafters import measured_methods
from paradraft.engine.speculation import Speculation
from paradraft.formats.likely_table import read_table
from tests.e2e.conftest import Paradraft, assert_mistake
from tests.support.jsonl import write_lines

TEXT = ["--prompt", "abcabc", "--max-new-tokens", 24, "--temperature", 0.8, "--seed", 2]


def test_what_was_recorded_is_used(
    family: Path, paradraft: Paradraft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the whole way: the table is found by its name and by the model's digest, is added to, and changes no
    text."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target = ["--target", family / "target", "--dtype", "float32"]
    write_lines(tmp_path / "mine.jsonl", [{"prompt": "abc"}, {"prompt": "xyz"}])
    asked = ["--prompts", tmp_path / "mine.jsonl", "--max-new-tokens", 20]
    assert paradraft("record", *target, *asked, "--answers", 2).code == 0
    found = paradraft("record", *target, *asked, "--answers", 3)
    assert found.code == 0 and "keys of 3 answers are in" in found.out
    (file,) = (tmp_path / "cache" / "paradraft").glob("recorded-*.safetensors")
    assert read_table(file).facts["answers"] == "3" and "3/3 answers" in found.err
    name = file.stem.removeprefix("recorded-")
    assert f"--drafter suffix+recycle:table={name}" in found.out
    plain = paradraft("generate", *target, *TEXT, "--drafter", "none")
    for table in (name, file):
        drafted = paradraft("generate", *target, *TEXT, "--drafter", f"suffix+recycle:table={table}")
        assert plain.code == drafted.code == 0 and plain.out == drafted.out
    methods, draft = measured_methods(str(family / "target"), Speculation())
    assert methods[:2] == ["ar", f"suffix+recycle:table={name}"] and draft is None, "auto takes it too"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--target", "shape:tiny-target"], "'shape:tiny-target' has random weights, so its answers teach nothing"),
        (["--target", "gone"], "unknown model 'gone'"),
        (["--target", "pocket", "--out", "nowhere/table"], "there is no folder"),
        (
            ["--target", "pocket", "--answers", 0],
            "Invalid value for '--answers': Input should be greater than or equal to 1",
        ),
    ],
)
def test_mistakes(paradraft: Paradraft, more: list[object], message: str) -> None:
    """Guards users: one line before any weights are loaded."""
    assert_mistake(paradraft("record", *more), message)


def test_a_table_of_another_model_is_not_added_to(family: Path, paradraft: Paradraft, tmp_path: Path) -> None:
    """Guards a table against a second model's tokens."""
    write_lines(tmp_path / "mine.jsonl", [{"prompt": "abc"}])
    asked = ["--prompts", tmp_path / "mine.jsonl", "--answers", 1, "--max-new-tokens", 4, "--out", tmp_path / "table"]
    assert paradraft("record", "--target", family / "target", *asked).code == 0
    assert_mistake(paradraft("record", "--target", family / "pard", *asked), "is of another model: name another --out")
