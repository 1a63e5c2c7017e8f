"""llama.cpp itself, for tests that run it where it is installed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from paradraft.bench.baselines.llama_cpp import DEFAULT_PYTHON

PYTHON = Path(os.environ.get("PARADRAFT_LLAMA_CPP_PYTHON", Path(__file__).parents[2] / DEFAULT_PYTHON))
"""The Python of its environment."""
MARKS = [
    pytest.mark.llama_cpp,
    pytest.mark.skipif(not PYTHON.is_file(), reason="llama.cpp is not installed: make llama-cpp"),
]


def needs_llama_cpp(test: Callable[..., None]) -> Callable[..., None]:
    """Decorates a test that runs llama.cpp."""
    for mark in MARKS:
        test = mark(test)
    return test
