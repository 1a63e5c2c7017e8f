"""The history of a training run: a file of lines while it goes on, and a picture of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from paradraft.train.run.progress import Evaluation, Progress, Report, by_position

HISTORY = "history.jsonl"
PICTURE = "curves.png"


def forget_after(folder: Path, step: int, *, is_evaluated: bool) -> None:
    """Takes what came after a step out of the history: a resumed run does it again.

    Args:
        folder: of the run.
        step: the last one that is not done again.
        is_evaluated: whether the evaluation after it is not made again either.
    """
    new = folder / f"{HISTORY}.new"
    last = (step, is_evaluated)
    kept = (report for report in read_history(folder) if (report.step, isinstance(report, Evaluation)) <= last)
    new.write_text("".join(map(_line, kept)), encoding="utf-8")
    os.replace(new, folder / HISTORY)


def append(folder: Path, report: Report) -> None:
    """Adds a line to the history."""
    with (folder / HISTORY).open("a", encoding="utf-8") as lines:
        lines.write(_line(report))


def read_history(folder: Path) -> list[Report]:
    """All reports of the history, if there is one.

    A line that is none is left out: a process that was killed may have written half of one.
    """
    file = folder / HISTORY
    of_report: TypeAdapter[Report] = TypeAdapter(Report)
    reports = []
    for line in file.read_bytes().splitlines() if file.exists() else []:
        with suppress(ValidationError):
            reports.append(of_report.validate_json(line))
    return reports


def draw(folder: Path) -> None:
    """Draws the history into `curves.png`: loss, accuracy by position on held-out rows, and acceptance length."""
    from matplotlib.figure import Figure

    reports = read_history(folder)
    training = [report for report in reports if isinstance(report, Progress)]
    held_out = [report for report in reports if isinstance(report, Evaluation)]
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    loss, accuracy, length = figure.subplots(1, 3)
    loss.plot(*_points((report.step, report.loss) for report in training), label="training", color="0.6")
    loss.plot(*_points((report.step, report.loss) for report in held_out), label="held out", marker="o")
    loss.set_title("loss")
    loss.legend()
    told: Sequence[Report] = held_out or training
    shares = by_position(told)
    for position in range(1, 1 + min(map(len, shares), default=0)):
        points = _points((report.step, of[position]) for report, of in zip(told, shares, strict=True))
        accuracy.plot(*points, label=f"position {position}")
    accuracy.set_title("right guesses by position in the draft")
    accuracy.set_ylim(0, 1)
    if told:
        accuracy.legend(fontsize="small", ncols=2)
    length.plot(*_points((report.step, report.acceptance_length) for report in held_out), marker="o")
    length.set_title("tokens per target pass")
    for axes in (loss, accuracy, length):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    figure.savefig(folder / PICTURE, dpi=120)


def _line(report: Report) -> str:
    return json.dumps(asdict(report)) + "\n"


def _points(measured: Iterable[tuple[int, float | None]]) -> tuple[list[int], list[float]]:
    """Steps, and what was measured at them, where something was."""
    known = [(step, value) for step, value in measured if value is not None]
    return [step for step, _ in known], [value for _, value in known]
