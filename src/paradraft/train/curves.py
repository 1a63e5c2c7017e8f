"""The history of a training run: a file of lines while it goes on, and a picture of it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paradraft.train.progress import Evaluation, Progress, Report

HISTORY = "history.jsonl"
PICTURE = "curves.png"


def forget_after(folder: Path, step: int) -> None:
    """Takes what came after a step out of the history: a resumed run does those steps again."""
    kept = [entry for entry in read_history(folder) if entry["step"] <= step]
    new = folder / f"{HISTORY}.new"
    new.write_text("".join(json.dumps(entry) + "\n" for entry in kept), encoding="utf-8")
    os.replace(new, folder / HISTORY)


def append(folder: Path, report: Report) -> None:
    """Adds a line to the history."""
    with (folder / HISTORY).open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(asdict(report)) + "\n")


def read_history(folder: Path) -> list[dict[str, Any]]:
    """All whole lines of the history, if there is one; a process that was killed may have left half of one."""
    file = folder / HISTORY
    entries = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue
    return entries


def draw(folder: Path) -> None:
    """Draws the history into `curves.png`: loss, accuracy by depth on held-out rows, and acceptance length."""
    from matplotlib.figure import Figure

    entries = read_history(folder)
    training = [entry for entry in entries if entry.keys() == set(Progress.__dataclass_fields__)]
    held_out = [entry for entry in entries if entry.keys() == set(Evaluation.__dataclass_fields__)]
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    loss, accuracy, length = figure.subplots(1, 3)
    loss.plot(*_line(training, "loss"), label="training", color="0.6")
    loss.plot(*_line(held_out, "loss"), label="held out", marker="o")
    loss.set_title("loss")
    loss.legend()
    by_depth = held_out or training
    for depth in range(len(by_depth[0]["accuracy"]) if by_depth else 0):
        steps = [entry["step"] for entry in by_depth]
        accuracy.plot(steps, [entry["accuracy"][depth] for entry in by_depth], label=f"depth {depth}")
    accuracy.set_title("rows predicted correctly")
    accuracy.set_ylim(0, 1)
    if by_depth:
        accuracy.legend(fontsize="small", ncols=2)
    length.plot(*_line(held_out, "acceptance_length"), marker="o")
    length.set_title("tokens per target pass")
    for axes in (loss, accuracy, length):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    figure.savefig(folder / PICTURE, dpi=120)


def _line(entries: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    known = [entry for entry in entries if entry[key] is not None]
    return [entry["step"] for entry in known], [entry[key] for entry in known]
