"""Ctrl-C and SIGTERM: a checkpoint after the step, and nothing left behind in the process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from paradraft.train.run.processes import STOP_SIGNALS, StoppedError, stop_requests
from paradraft.train.run.progress import Report
from tests.support.training import train_pard
from tests.unit.train.run.test_trainer import recipe_for
from tests.unit.train.test_resume import measuring, result, run_of


def asks_at(step: int, *numbers: int) -> Callable[[Report], None]:
    def report(report: Report) -> None:
        if report.step == step and hasattr(report, "steps"):
            for number in numbers:
                os.kill(os.getpid(), number)

    return report


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in STOP_SIGNALS]


@pytest.mark.parametrize(
    ("step", "number"),
    [
        (1, signal.SIGTERM),
        (3, signal.SIGINT),
        pytest.param(1, signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(3, signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_asked_to_stop_loses_no_step(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, step: int
) -> None:
    """Guards up to `save_every` steps: a run that was asked to stop left without a checkpoint, and SIGTERM was not
    heard at all. It takes the step that it is in, and ends with what a run that was never stopped ends with."""
    measuring(monkeypatch, (1.5, 2.0, 1.2, 1.1, 1.8, 1.3))
    whole = run_of(family, tmp_path / "whole")
    train_pard(whole, lambda report: None)
    stopped = run_of(family, tmp_path / "stopped")
    before = handlers()
    with pytest.raises(StoppedError) as raised:
        train_pard(stopped, asks_at(step, number))
    assert (raised.value.number, raised.value.step, raised.value.steps) == (number, step + 1, 6)
    assert isinstance(raised.value, KeyboardInterrupt), "whoever only catches errors stops too"
    assert handlers() == before
    steps: list[int] = []
    train_pard(stopped, lambda report: steps.append(report.step))
    assert steps[0] == step + 1, "the evaluation after the last step comes first: nobody waited for it"
    assert steps.count(step + 1) == 1
    assert result(stopped.out) == result(whole.out)


def test_a_stop_before_the_last_evaluation(family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the end of a run: its last evaluation may be what makes it too long, and it is made up for."""
    measuring(monkeypatch, (1.5, 2.0, 1.2, 1.1, 1.8, 2.3))
    whole = run_of(family, tmp_path / "whole")
    train_pard(whole, lambda report: None)
    stopped = run_of(family, tmp_path / "stopped")
    with pytest.raises(StoppedError, match="stopped after step 6 of 6"):
        train_pard(stopped, asks_at(5, signal.SIGTERM))
    train_pard(stopped, lambda report: None)
    assert result(stopped.out) == result(whole.out)


def test_a_second_ctrl_c_leaves_at_once(family: Path, tmp_path: Path) -> None:
    """Guards people in a hurry; SIGTERM may come twice, as torchrun and a cluster both send it."""
    recipe = recipe_for(family, tmp_path)
    before = handlers()
    with pytest.raises(KeyboardInterrupt) as raised:
        train_pard(recipe, asks_at(1, signal.SIGINT, signal.SIGINT))
    assert not isinstance(raised.value, StoppedError)
    assert handlers() == before and not (recipe.out / "checkpoint").exists()
    with pytest.raises(StoppedError):
        train_pard(recipe, asks_at(1, signal.SIGTERM, signal.SIGTERM))


def test_a_request_that_comes_too_late_is_sent_on(family: Path, tmp_path: Path) -> None:
    """Guards programs that train and then do more, such as the demo: Ctrl-C in the last step ends them too, after the
    drafter is in its place."""
    recipe = recipe_for(family, tmp_path, steps=2)
    with pytest.raises(KeyboardInterrupt) as raised:
        train_pard(recipe, asks_at(2, signal.SIGINT))
    assert not isinstance(raised.value, StoppedError)
    assert (recipe.out / "config.json").exists() and not (recipe.out / "checkpoint").exists()


def test_signals_are_heard_in_the_main_thread_alone() -> None:
    """Guards programs that train in a thread of their own, where Python lets no handler be set."""
    before, found = handlers(), list[object]()

    def enter() -> None:
        with stop_requests() as request:
            found.extend([request.number, *handlers()])

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [None, *before]


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """Guards runs under nohup and in the background of a script, which Ctrl-C is not meant for."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_requests() as request:
            os.kill(os.getpid(), signal.SIGINT)
            assert request.number is None
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_puts_the_handlers_back() -> None:
    """Guards the process against a run that fails."""
    before = handlers()
    with pytest.raises(ValueError, match="failed"), stop_requests():
        raise ValueError("failed")
    assert handlers() == before
