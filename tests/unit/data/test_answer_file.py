"""The file of answers under kills, mistakes and second runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paradraft.data.answer_file import AnswerFile, read_answers
from paradraft.data.questions import ID

SETTINGS: dict[str, object] = {"model": "m", "temperature": 0.5, "bias": (1, 2)}
ASKED = frozenset("abc")


def write(file: Path, *ids: str) -> None:
    with AnswerFile(file, SETTINGS, ASKED) as answers:
        for name in ids:
            answers.append({"response": "ü\u2028\n", ID: name})


def ids(file: Path) -> list[str]:
    return [json.loads(line)[ID] for line in file.read_bytes().split(b"\n")[:-1]]


@pytest.mark.parametrize("torn", [b'{"answer', b"\0\0\0", b'{"response": "", "answer_id": "b"}'])
def test_a_torn_line_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    """Guards against gluing the next answer to half a line: both would be lost, and the file unreadable."""
    file = tmp_path / "out.jsonl"
    write(file, "a")
    whole = file.read_bytes()
    file.write_bytes(whole + torn)
    assert read_answers(file, SETTINGS, ASKED).done == {"a"}
    assert file.read_bytes() == whole + torn, "reading changes nothing"
    write(file, "b")
    assert ids(file) == ["a", "b"]


def test_a_file_that_is_nothing_but_torn(tmp_path: Path) -> None:
    """Guards the kill during the very first answer."""
    file = tmp_path / "out.jsonl"
    write(file)
    file.write_bytes(b'{"resp')
    write(file, "a")
    assert ids(file) == ["a"]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (SETTINGS | {"temperature": 0.7}, "temperature=0.5, and now it is 0.7"),
        ({"model": "m", "bias": [1, 2]}, "temperature=0.5, and now it is None"),
        (SETTINGS | {"top_p": 0.9}, "top_p=None, and now it is 0.9"),
    ],
)
def test_other_settings_are_refused(tmp_path: Path, settings: dict[str, object], named: str) -> None:
    """Guards against a file of answers by two targets, or at two temperatures, that looks like one."""
    file = tmp_path / "out.jsonl"
    write(file, "a")
    before = file.read_bytes()
    with pytest.raises(ValueError, match="use the same settings") as error, AnswerFile(file, settings, ASKED):
        pass
    assert named in str(error.value)
    assert file.read_bytes() == before
    write(file, "b")  # the lock was given back


def test_settings_may_change_before_the_first_answer(tmp_path: Path) -> None:
    """Guards against a run that failed at once and then stands in the way of the right one."""
    file = tmp_path / "out.jsonl"
    with AnswerFile(file, {"model": "wrong"}, ASKED):
        pass
    write(file, "a")
    assert ids(file) == ["a"]


@pytest.mark.parametrize("settings", [None, "", "{", "[]"])
def test_a_file_of_somebody_else_is_not_touched(tmp_path: Path, settings: str | None) -> None:
    """Guards against adding answers to, or cutting, whatever --out happened to name."""
    file = tmp_path / "out.jsonl"
    file.write_bytes(b"precious")
    if settings is not None:
        (tmp_path / "out.jsonl.settings.json").write_text(settings)
    with pytest.raises(ValueError, match="name another --out"), AnswerFile(file, SETTINGS, ASKED):
        pass
    assert file.read_bytes() == b"precious"


@pytest.mark.parametrize("line", ["{}", "3", "", '{"answer_id": []}', '{"answer_id": "z"}'])
def test_a_strange_line_is_named(tmp_path: Path, line: str) -> None:
    """Guards against answers to other prompts, and edits by hand, that nobody would notice."""
    file = tmp_path / "out.jsonl"
    write(file, "a")
    with file.open("a") as stream:
        stream.write(line + "\n")
    with pytest.raises(ValueError, match=r"out\.jsonl, line 2 "):
        write(file, "b")


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    """Guards against two runs that both find the same prompts unanswered."""
    file = tmp_path / "out.jsonl"
    with (
        AnswerFile(file, SETTINGS, ASKED),
        pytest.raises(ValueError, match="another run"),
        AnswerFile(file, SETTINGS, ASKED),
    ):
        pass
    write(file, "a")


def test_every_line_is_there_when_append_returns(tmp_path: Path) -> None:
    """Guards against answers in a buffer, which a kill would take."""
    file = tmp_path / "out.jsonl"
    with AnswerFile(file, SETTINGS, ASKED) as answers:
        for number, name in enumerate("abc", start=1):
            answers.append({ID: name})
            assert len(ids(file)) == number


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    """Guards against answering first and failing to write then."""
    for file in (tmp_path, tmp_path / "none" / "out.jsonl"):
        with pytest.raises(ValueError, match="cannot be written"):
            read_answers(file, SETTINGS, ASKED)
