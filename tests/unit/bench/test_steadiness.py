"""A machine that was not equally fast all the time: said where runs differ, and only there."""

from __future__ import annotations

from typing import Any

import pytest

from paradraft.bench.report.page import page
from paradraft.bench.report.summary import notes
from paradraft.bench.result_file import completed
from paradraft.bench.steadiness import UNSTEADY, steadiness, unsteady_runs
from tests.support.bench_result import figures, result


def summary(**runs: list[float]) -> dict[str, dict[str, Any]]:
    return {
        name: figures(name, tokens_per_s={"median": sorted(of)[len(of) // 2], "runs": of}) for name, of in runs.items()
    }


def test_runs_that_differ_are_said_of_the_method_in_which_they_differ_most() -> None:
    """Guards against figures of a busy machine that nobody questions."""
    found = summary(ar=[100.0, 101.0, 99.0], pard=[150.0, 120.0, 180.0], ngram=[100.0, 120.0, 110.0])
    line = "unsteady machine: runs of PARD gave 120 to 180 tokens/s (50 %); run it again when it is idle"
    assert unsteady_runs(found) == line == notes(found)[0]
    told = steadiness(found)
    assert told == {"method": "pard", "spread": pytest.approx(0.5), "is_steady": False}


def test_a_steady_machine_is_not_spoken_of() -> None:
    """Guards against a warning that always stands there, and against one about a single run."""
    edge = summary(ar=[100.0, 100.0 * (1 + UNSTEADY) - 1e-6])
    assert unsteady_runs(edge) is None and steadiness(edge) is not None
    over = summary(ar=[100.0, 100.0 * (1 + UNSTEADY) + 1e-3])
    assert unsteady_runs(over) is not None
    assert steadiness(summary(ar=[100.0], pard=[300.0])) is None and unsteady_runs(summary(ar=[100.0])) is None


def test_the_page_says_it_too() -> None:
    """Guards a report that is mailed around without the terminal's words."""
    found = completed(result())
    assert "nsteady machine" not in page(found)
    found["methods"]["ar"]["tokens_per_s"] = {"median": 100.0, "runs": [60.0, 100.0, 110.0]}
    assert "Unsteady machine: runs of AR+ gave 60 to 110 tokens/s" in page(found)
