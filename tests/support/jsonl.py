"""Files with a JSON object in each line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_lines(file: Path, records: Iterable[object]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def read_lines(file: Path) -> list[dict[str, Any]]:
    *lines, rest = file.read_bytes().split(b"\n")
    assert not rest, "half a line at the end"
    return [json.loads(line) for line in lines]
