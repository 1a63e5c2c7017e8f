"""Prompt files: one JSON object with a `prompt` per line; further keys are passed through."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paradraft.json_object import read_object


def read_prompts(file: Path) -> list[dict[str, Any]]:
    """Reads a prompt file.

    Raises:
        ValueError: the file does not exist, is empty or is not UTF-8, or a line (named by number) is no JSON
            object, has half a character in it or has no prompt.
    """
    records = []
    for place, record in _records(file):
        if not isinstance(record.get("prompt"), str) or not record["prompt"]:
            raise ValueError(f'{place}: expected {{"prompt": "some text"}}')
        records.append(record)
    return records


def _records(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The JSON objects of a file, each with the name of its place, such as "prompts.jsonl, line 3"."""
    if not file.is_file():
        raise ValueError(f"prompt file {str(file)!r} does not exist")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"prompt file {str(file)!r} is not UTF-8 text ({error.reason})") from None
    if not text.strip():
        raise ValueError(f"prompt file {str(file)!r} is empty")
    # Not splitlines(): JSON strings may hold U+2028 and its like as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{file}, line {number}"
        yield place, read_object(line, place, '{"prompt": "some text"}')
