"""What a run is expected to take and to yield: measured, or recorded in a file that anybody can read."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paradraft.train.drafters import pard
from paradraft.train.run import launch, trainer
from paradraft.train.run.curves import read_history
from paradraft.train.run.expectations import CURVES, MEASURED, UNMEASURED, Curve, FirstSteps, curves_in_words
from paradraft.train.run.progress import Evaluation
from paradraft.train.run.trainer import Loop
from tests.unit.train.run.test_trainer import recipe_for

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.family)
def test_a_curve_is_that_of_its_file(curve: Curve, tmp_path: Path) -> None:
    """Guards against a promise that no run has kept: each point is an evaluation of the recorded run, and as much of
    its rows as of its steps is learnt there."""
    (tmp_path / "history.jsonl").write_bytes((ROOT / curve.file).read_bytes())
    held_out = [report for report in read_history(tmp_path) if isinstance(report, Evaluation)]
    last = curve.points[-1][0]
    for rows, length in curve.points:
        found = [one for one in held_out if one.acceptance_length and f"{one.acceptance_length:.2f}" == f"{length:.2f}"]
        assert any(abs(one.step / held_out[-1].step - rows / last) < 0.01 for one in found)
        assert f"{length:.2f}" in curve.in_words


def test_it_is_said_where_no_real_model_was_recorded() -> None:
    """Guards whoever takes the pocket family for evidence; and drafters of which no run is recorded at all."""
    pocket, *real = curves_in_words("pard")
    assert "pocket family" in pocket and "1.98 tokens per target pass before" in pocket
    assert "Qwen2.5-Coder 1.5B" in real[0] and all(line.startswith("recorded before, ") for line in real)
    (plain,) = curves_in_words("eagle:k=3")
    assert plain.startswith("no eagle drafter for a real model is recorded yet")


def test_hours_come_from_measured_steps_and_evaluations() -> None:
    """Guards the first step, which prepares what all others use and would promise too many hours, and a resumed run,
    which has not measured an evaluation yet."""
    for evaluation_s, detail in ((30.0, "5 evaluations of 30 s"), (None, "5 evaluations come on top")):
        first = FirstSteps(steps=1000, evaluations=5, evaluation_s=evaluation_s)
        times = [500.0] * UNMEASURED + [20.0] * (MEASURED + 3)
        lines = [first.add(600, taken_s=taken_s) for taken_s in times]
        (line,) = filter(None, lines)
        assert lines.index(line) == UNMEASURED + MEASURED - 1
        hours = (1000 * 20.0 + 5 * (evaluation_s or 0.0)) / 3600
        assert line.startswith(f"expected: 600,000 rows in 1,000 steps, {hours:.1f} hours (30 rows/s in ")
        assert line.endswith(f"; {detail})")
    unmeasured = FirstSteps(steps=9, evaluations=0, evaluation_s=None)
    *_, last = (unmeasured.add(600, taken_s=20.0) for _ in range(UNMEASURED + MEASURED))
    assert last is not None and last.endswith(f", 180 s (30 rows/s in {MEASURED} steps)")


def test_an_evaluation_counts_once(family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards runs that evaluate often: an evaluation between two measured steps is no part of them. The clock goes on
    for 3 s in a step, and for 1000 s in an evaluation."""
    now_s = 0.0
    step, evaluate = Loop._step, Loop._evaluate

    def timed_step(*given: Any) -> Any:
        nonlocal now_s
        now_s += 3.0
        return step(*given)

    def timed_evaluation(*given: Any) -> bool:
        nonlocal now_s
        now_s += 1000.0
        return evaluate(*given)

    monkeypatch.setattr(Loop, "_step", timed_step)
    monkeypatch.setattr(Loop, "_evaluate", timed_evaluation)
    monkeypatch.setattr(trainer, "time", SimpleNamespace(perf_counter=lambda: now_s, monotonic=time.monotonic))
    lines: list[str] = []
    recipe = recipe_for(family, tmp_path, steps=6, held_out=2, evaluate_every=1)
    launch.train(recipe, pard.build, lambda report: None, announce=lines.append)
    (line,) = (line for line in lines if line.startswith("expected: "))
    assert f"in 6 steps, {(6 * 3 + 6 * 1000) / 60:.0f} minutes (" in line and "; 6 evaluations of 1000 s)" in line
