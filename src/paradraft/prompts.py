"""Prompt files: one JSON object with a `prompt` per line; further keys are passed through."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_prompts(file: Path) -> list[dict[str, Any]]:
    """Reads a prompt file.

    Raises:
        ValueError: the file does not exist or is empty, or a line (named by number) is broken or
            has no prompt.
    """
    if not file.is_file():
        raise ValueError(f"prompt file {str(file)!r} does not exist")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"prompt file {str(file)!r} is not UTF-8 text ({error.reason})") from None
    records = []
    # Not splitlines(): JSON strings may hold U+2028 and its like as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{file}, line {number}: not JSON ({error})") from None
        if not isinstance(record, dict) or not isinstance(record.get("prompt"), str) or not record["prompt"]:
            raise ValueError(f'{file}, line {number}: expected {{"prompt": "some text"}}')
        try:
            record["prompt"].encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{file}, line {number}: the prompt is not valid text ({error.reason})") from None
        records.append(record)
    if not records:
        raise ValueError(f"prompt file {str(file)!r} is empty")
    return records
