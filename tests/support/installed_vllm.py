"""vLLM itself, for tests that run it where it is installed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paradraft.export.vllm import DEFAULT_PYTHON

PYTHON = Path(os.environ.get("PARADRAFT_VLLM_PYTHON", Path(__file__).parents[2] / DEFAULT_PYTHON))
"""The Python of its environment."""
needs_vllm = pytest.mark.skipif(not PYTHON.is_file(), reason="vLLM is not installed: make vllm")
