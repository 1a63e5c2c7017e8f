"""vLLM itself, for tests that run it where it is installed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from paradraft.export.vllm import DEFAULT_PYTHON

PYTHON = Path(os.environ.get("PARADRAFT_VLLM_PYTHON", Path(__file__).parents[2] / DEFAULT_PYTHON))
"""The Python of its environment."""
MARKS = [pytest.mark.vllm, pytest.mark.skipif(not PYTHON.is_file(), reason="vLLM is not installed: make vllm")]


def needs_vllm(test: Callable[..., None]) -> Callable[..., None]:
    """Decorates a test that runs vLLM."""
    for mark in MARKS:
        test = mark(test)
    return test
