from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paradraft.train.run import curves
from paradraft.train.run.progress import Evaluation, Progress

pytestmark = pytest.mark.usefixtures("drawn")
LINES = [b"7", b"{}", b'{"step": "x"}', b'{"step": 1, "loss": 2}', b"[" * 100_000, b"\xff\xfe", b'{"a": "\xff"}']
"""What is no report."""


def progress(step: int) -> Progress:
    return Progress(step=step, steps=9, loss=1.0 / step, accuracy=(0.5, 0.25), rows_per_s=10.0, left_s=1.0)


def evaluation(step: int, length: float | None) -> Evaluation:
    return Evaluation(step=step, loss=0.5, accuracy=(0.4, 0.2), acceptance_length=length, is_best=True)


def steps(folder: Path) -> list[int]:
    return [report.step for report in curves.read_history(folder)]


def test_a_resumed_run_tells_its_history_once(tmp_path: Path) -> None:
    """Guards against curves that run back and forth: steps that will be done again are forgotten, and half a line of a
    killed process is no error."""
    curves.forget_after(tmp_path, 0, is_evaluated=True)
    for step in range(1, 6):
        curves.append(tmp_path, progress(step))
    with (tmp_path / curves.HISTORY).open("a") as file:
        file.write('{"step": 6, "lo')
    curves.forget_after(tmp_path, 4, is_evaluated=True)
    assert steps(tmp_path) == [1, 2, 3, 4]
    curves.append(tmp_path, evaluation(5, 2.0))
    assert curves.read_history(tmp_path)[-2:] == [progress(4), evaluation(5, 2.0)], "to the last bit"


def test_an_evaluation_that_is_made_again_is_told_once(tmp_path: Path) -> None:
    """Guards runs that are killed after an evaluation and before the next checkpoint: it stood in the history twice."""
    for report in (evaluation(0, 1.0), progress(1), progress(2), evaluation(2, 2.0)):
        curves.append(tmp_path, report)
    curves.forget_after(tmp_path, 2, is_evaluated=False)
    assert curves.read_history(tmp_path) == [evaluation(0, 1.0), progress(1), progress(2)]
    curves.forget_after(tmp_path, 0, is_evaluated=False)
    assert curves.read_history(tmp_path) == []


@pytest.mark.parametrize("line", LINES)
def test_lines_that_are_no_report_are_left_out(tmp_path: Path, line: bytes) -> None:
    """Guards a resumed run against a history that was damaged or edited."""
    (tmp_path / curves.HISTORY).write_bytes(line + b"\n")
    curves.append(tmp_path, progress(2))
    assert curves.read_history(tmp_path) == [progress(2)]
    curves.forget_after(tmp_path, 2, is_evaluated=True)
    assert curves.read_history(tmp_path) == [progress(2)]


def test_a_stop_while_forgetting_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the first part of the curves against a second kill, just after a run has gone on."""
    for step in range(1, 6):
        curves.append(tmp_path, progress(step))
    write = Path.write_text
    monkeypatch.setattr(Path, "write_text", lambda file, text, **rest: (write(file, text[:9], **rest), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        curves.forget_after(tmp_path, 4, is_evaluated=True)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]


def test_the_picture_counts_positions_from_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards one way to count: what decoding calls position 1 is depth 0 of a row, but depth 1 of a prompt token."""
    from matplotlib.axes import Axes

    drawn: list[tuple[list[float], str]] = []
    plot = Axes.plot
    monkeypatch.setattr(
        Axes, "plot", lambda axes, x, y, **how: drawn.append((y, how.get("label", ""))) or plot(axes, x, y, **how)
    )
    for accuracy in ((0.4, 0.2), (0.0, 0.4, 0.2)):
        drawn.clear()
        curves.forget_after(tmp_path, 0, is_evaluated=True)
        curves.append(tmp_path, replace(evaluation(1, None), accuracy=accuracy))
        curves.draw(tmp_path)
        assert [line for line in drawn if line[1].startswith("pos")] == [([0.4], "position 1"), ([0.2], "position 2")]
        assert not any("depth" in label for _, label in drawn)


def test_the_picture_is_drawn_whatever_was_measured(tmp_path: Path) -> None:
    """Guards short runs, which would fail in their last second: nothing reported, no evaluation, no target, and a
    history that was damaged."""
    for number, reports in enumerate([[], [progress(1)], [progress(1), evaluation(2, None)], [evaluation(2, 1.5)]]):
        folder = tmp_path / str(number)
        folder.mkdir()
        curves.forget_after(folder, 0, is_evaluated=True)
        for report in reports:
            curves.append(folder, report)
        with (folder / curves.HISTORY).open("ab") as file:
            file.write(b"\n".join(LINES) if number else b"")
        curves.draw(folder)
        assert (folder / curves.PICTURE).read_bytes()[1:4] == b"PNG"
