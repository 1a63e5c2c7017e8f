"""History of a training run: a JSONL file, and a plot of it."""

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
    """Deletes reports after a step from the history, because a resumed run repeats them.

    Args:
        step: the last step that is not repeated.
        is_evaluated: whether the evaluation after this step is kept too.
    """
    new = folder / f"{HISTORY}.new"
    last = (step, is_evaluated)
    kept = (report for report in read_history(folder) if (report.step, isinstance(report, Evaluation)) <= last)
    new.write_text("".join(map(_line, kept)), encoding="utf-8")
    os.replace(new, folder / HISTORY)


def append(folder: Path, report: Report) -> None:
    """Appends a report to the history."""
    with (folder / HISTORY).open("a", encoding="utf-8") as lines:
        lines.write(_line(report))


def read_history(folder: Path) -> list[Report]:
    """Reads all reports of the history, if there is one; skips invalid lines, which a killed process may leave."""
    file = folder / HISTORY
    of_report: TypeAdapter[Report] = TypeAdapter(Report)
    reports = []
    for line in file.read_bytes().splitlines() if file.exists() else []:
        with suppress(ValidationError):
            reports.append(of_report.validate_json(line))
    return reports


def draw(folder: Path) -> None:
    """Plots the history to `curves.png`: loss, accuracy by position on held-out rows, and acceptance length."""
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
    plotted: Sequence[Report] = held_out or training
    accuracies = by_position(plotted)
    for position in range(1, 1 + min(map(len, accuracies), default=0)):
        points = _points((report.step, share[position]) for report, share in zip(plotted, accuracies, strict=True))
        accuracy.plot(*points, label=f"position {position}")
    accuracy.set_title("right guesses by position in the draft")
    accuracy.set_ylim(0, 1)
    if plotted:
        accuracy.legend(fontsize="small", ncols=2)
    length.plot(*_points((report.step, report.acceptance_length) for report in held_out), marker="o")
    length.set_title("tokens per target pass")
    for axes in (loss, accuracy, length):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    figure.savefig(folder / PICTURE, dpi=120)


def _line(report: Report) -> str:
    return json.dumps(asdict(report)) + "\n"


def _points(pairs: Iterable[tuple[int, float | None]]) -> tuple[list[int], list[float]]:
    """Steps and values, without missing values."""
    known = [(step, value) for step, value in pairs if value is not None]
    return [step for step, _ in known], [value for _, value in known]
