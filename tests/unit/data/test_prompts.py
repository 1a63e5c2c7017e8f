from __future__ import annotations

import json
from pathlib import Path

import pytest

from paradraft.data.prompts import read_prompts


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
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
        read_prompts(tmp_path / "empty.jsonl")
