"""Evaluations take at most a tenth of a run, unless a recipe says how often."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paradraft.train.drafters import pard
from paradraft.train.run import evaluation_time, launch
from paradraft.train.run.evaluation_time import EvaluationTime
from paradraft.train.run.progress import Evaluation
from paradraft.train.run.trainer import Loop
from tests.unit.train.run.test_expectations import recipe_for


@pytest.mark.parametrize("evaluation_s", [0.0, 0.5, 3.0, 40.0])
def test_they_stay_within_their_share(monkeypatch: pytest.MonkeyPatch, evaluation_s: float) -> None:
    """Guards a run of 1,000 s of steps with an evaluation due every 10 s: as many as the share pays, and no more."""
    now_s, made = 0.0, 0
    monkeypatch.setattr(evaluation_time, "time", SimpleNamespace(monotonic=lambda: now_s))
    clock = EvaluationTime()
    for _ in range(100):
        now_s += 10.0
        if clock.allows():
            now_s += evaluation_s
            clock.add(evaluation_s)
            made += 1
            assert made == 1 or made * evaluation_s <= evaluation_time.SHARE * now_s + 1e-9
    paid = 100 if evaluation_s <= 1 else int(evaluation_time.SHARE * now_s / evaluation_s)
    assert paid - 1 <= made <= paid + 1
    assert clock.in_words == f"evaluations took {made * evaluation_s / now_s:.0%} of the time"


@pytest.mark.parametrize("asked", [None, 1])
def test_a_run_leaves_out_what_is_too_dear(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: int | None
) -> None:
    """Guards evaluations of 100 s beside steps of a moment: the first and the last remain, or all that were asked."""
    late_s = 0.0
    evaluate = Loop._held_out

    def slow(*given: Any) -> Any:
        nonlocal late_s
        late_s += 100.0
        return evaluate(*given)

    monkeypatch.setattr(Loop, "_held_out", slow)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late_s, perf_counter=time.perf_counter)
    monkeypatch.setattr(evaluation_time, "time", clock)
    monkeypatch.setattr("paradraft.train.run.trainer.time", clock)
    recipe, reports, lines = recipe_for(family, tmp_path, steps=6, held_out=2, evaluate_every=asked), [], []
    launch.train(recipe, pard.build, reports.append, announce=lines.append)
    steps = [report.step for report in reports if isinstance(report, Evaluation)]
    assert steps == ([0, 6] if asked is None else [0, 1, 2, 3, 4, 5, 6])
    assert lines[-1] in ("evaluations took 99% of the time", "evaluations took 100% of the time")
