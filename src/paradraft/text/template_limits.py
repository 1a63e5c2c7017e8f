"""Limits on chat templates, which are programs in a model's files: time, and length of the text."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

TEMPLATE_S = 5.0
"""Seconds that a template may take; those of models take milliseconds."""
MOST_CHARACTERS = 1 << 24
"""Characters that a template may write."""
FILE = "<template>"
"""File name of the code that Jinja makes of a template."""


@contextmanager
def limited(seconds: float = TEMPLATE_S) -> Iterator[None]:
    """Inside, the templates that this thread runs have a time limit, checked at each of their lines.

    Raises:
        TimeoutError: in the template.
    """
    end_s, before = time.perf_counter() + seconds, sys.gettrace()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != FILE:
            return None
        if time.perf_counter() > end_s:
            raise TimeoutError(f"it takes longer than {seconds:g} seconds")
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def check_length(text: str) -> str:
    """The text; raises ValueError if it has more than `MOST_CHARACTERS`."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it writes {len(text)} characters, and may write {MOST_CHARACTERS}")
    return text
