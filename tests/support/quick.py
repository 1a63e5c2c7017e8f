"""Which cases of a test `make test` runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], *, quick: Collection[Any]) -> list[Any]:
    """All cases, values or tuples of them, of which `make test` runs these, and `make test-long` all."""
    found = list(cases)
    assert all(case in found for case in quick), f"not all of {quick} are among the cases"
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in quick else pytest.mark.slow,
            id=" ".join(case) if isinstance(case, list) else None,
        )
        for case in found
    ]
