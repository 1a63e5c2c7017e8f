"""Reads the files that `paradraft bench --json` writes."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

ADVICE = "name a file that `paradraft bench --json` wrote"


def read_result_file(file: Path, parts: Collection[str]) -> dict[str, Any]:
    """A result of one task or of prompts.

    Args:
        file: where it is.
        parts: the objects that it must have.

    Raises:
        ValueError: it cannot be read, or lacks a part.
    """
    try:
        found = json.loads(file.read_bytes())
    except OSError as error:
        raise ValueError(f"{str(file)!r} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(file)!r} holds no JSON ({error}): {ADVICE}") from None
    if isinstance(found, dict) and isinstance(found.get("tasks"), dict):
        raise ValueError(f"{str(file)!r} holds the results of several tasks: run `paradraft bench` with one --task")
    if not isinstance(found, dict) or not all(isinstance(found.get(part), dict) for part in parts):
        raise ValueError(f"{str(file)!r} is no result of a benchmark: {ADVICE}")
    return found
