from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from paradraft.data.prompts import first_prompts, read_prompts
from paradraft.data.questions import read_questions


def test_further_keys_are_passed_through_and_blank_lines_skipped(tmp_path: Path) -> None:
    """Guards against losing what a benchmark stores beside its prompts."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "id": 3}\n\n{"prompt": "ü"}\n', encoding="utf-8")
    assert read_prompts(file) == [{"prompt": "a", "id": 3}, {"prompt": "ü"}]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085"])
def test_only_newlines_end_a_line(tmp_path: Path, separator: str) -> None:
    """Guards against cutting a JSON string at the Unicode line separators that JSON allows inside it."""
    file = tmp_path / "prompts.jsonl"
    records = [{"prompt": f"one{separator}two"}, {"prompt": "three"}]
    file.write_text("\n".join(json.dumps(record, ensure_ascii=False) for record in records), encoding="utf-8")
    assert read_prompts(file) == records


@pytest.mark.parametrize(
    "line", ["{", '{"text": "a"}', '{"prompt": ""}', '{"prompt": 3}', '"a"', "[]", "1" * 5000, "[" * 100_000]
)
def test_a_broken_line_is_named_by_its_number(tmp_path: Path, line: str) -> None:
    """Guards against an error that leaves the user to search a file of thousands of lines."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "a"}}\n\n{line}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"prompts\.jsonl, line 3"):
        read_prompts(file)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    """Guards against running a benchmark of no prompts."""
    with pytest.raises(ValueError, match="does not exist"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="is neither a file nor a pipe"):
        read_prompts(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
        read_prompts(tmp_path / "empty.jsonl")


def test_nothing_on_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a complaint about a file whose name is a dash."""
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO()))
    with pytest.raises(ValueError, match=r"^standard input is empty$"):
        read_prompts(Path("-"))


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    """Guards `--prompts <(…)`: a pipe is no file, and gives its lines to the first reader alone."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for read in (read_prompts, lambda source: [one.record for one in read_questions(source, samples=1)]):
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(pipe.write_text, '{"prompt": "a"}\n')
            assert read(pipe) == [{"prompt": "a"}]
            writing.result()


def test_all_prompts_of_a_short_file_where_no_number_was_given(tmp_path: Path) -> None:
    """Guards whoever brings three prompts against a complaint about a number that he has not given."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"prompt": "{text}"}}\n' for text in "abc"))
    assert [len(first_prompts(file, number, usual)) for number, usual in ((None, 16), (None, 2), (1, 2))] == [3, 2, 1]
    for number in (0, 4):
        with pytest.raises(ValueError, match=f"num_prompts={number}: use 1 to 3"):
            first_prompts(file, number, 16)
