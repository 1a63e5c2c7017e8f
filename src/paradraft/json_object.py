"""JSON objects, of what a user wrote and of rows that hold more than JSON knows."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID


def read_object(text: str, place: str, example: str) -> dict[str, Any]:
    """Reads a JSON object whose texts can be tokenized, sent and written.

    Args:
        text: what the user wrote.
        place: where, for the complaint.
        example: an object as it is expected there.

    Raises:
        ValueError: it is no JSON object, or has half a character or a number in it that is none.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not JSON ({error})") from None
    return checked_object(found, place, example)


def checked_object(found: object, place: str, example: str) -> dict[str, Any]:
    """Returns a value that was read from JSON, if it is an object whose texts can be tokenized, sent and written.

    Args:
        found: the value.
        place: where it stands, for the complaint.
        example: an object as it is expected there.

    Raises:
        ValueError: it is no object, or has half a character or a number in it that is none.
    """
    if not isinstance(found, dict):
        raise ValueError(f"{place}: expected a JSON object such as {example}")
    try:
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place}: not valid text ({error.reason})") from None
    except ValueError:
        raise ValueError(f"{place}: not JSON, which has no NaN and no infinity: write null") from None
    return found


def object_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON object of a row, the same in every run.

    Dates, durations, decimals and UUIDs become texts, bytes base64, NumPy's arrays and numbers Python's, and what is
    no finite number null.

    Raises:
        ValueError: a value is nothing of that, such as an image.

    Example:
        >>> object_of({"prompt": "a", "on": date(2026, 11, 21), "score": float("nan"), "raw": [b"ab"]})
        {'prompt': 'a', 'on': '2026-11-21', 'score': None, 'raw': ['YWI=']}
    """
    found = {}
    for key, value in row.items():
        try:
            text = json.dumps(value, default=_in_json)
        except TypeError as error:
            raise ValueError(f"{key!r} cannot be written as JSON: {error}; name the columns that you want") from None
        found[key] = json.loads(text, parse_constant=lambda _: None)
    return found


def _in_json(value: object) -> object:
    """What stands in JSON for a value that it does not know; the text of any other object may hold its address."""
    if isinstance(value, date | time | timedelta | Decimal | UUID):
        return str(value)
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value is of type {type(value).__name__}")
