"""A JSON object that a user wrote."""

from __future__ import annotations

import json
from typing import Any


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
    if not isinstance(found, dict):
        raise ValueError(f"{place}: expected a JSON object such as {example}")
    try:
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place}: not valid text ({error.reason})") from None
    except ValueError:
        raise ValueError(f"{place}: not JSON, which has no NaN and no infinity: write null") from None
    return found
