"""Ctrl-C in the middle of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from paradraft.engine.engine import Engine


@contextmanager
def interrupted(call: int) -> Iterator[None]:
    """Whoever lets an engine answer for the `call`-th time is interrupted."""
    generate, calls = Engine.generate, list[int]()

    def stop(self: Engine, *arguments: Any, **settings: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return generate(self, *arguments, **settings)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Engine, "generate", stop)
        yield
