"""Shows how far a run of `regenerate` is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich import progress as bars
from rich.console import Console

from paradraft.train.regenerate import Progress

EVERY_S = 10.0
"""Seconds between two lines where there is no terminal."""


@contextmanager
def shown(console: Console) -> Iterator[Callable[[Progress], None]]:
    """Gives a report for `regenerate`: a bar on a terminal, elsewhere a line now and then."""
    if console.is_terminal:
        with bars.Progress(bars.BarColumn(), bars.TextColumn("{task.description}"), console=console) as bar:
            task = bar.add_task("")
            yield lambda progress: bar.update(
                task, total=progress.total, completed=progress.total - progress.missing, description=line_of(progress)
            )
        return
    last_s = -math.inf

    def report(progress: Progress) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= EVERY_S:
            last_s = time.monotonic()
            console.print(line_of(progress), soft_wrap=True)

    yield report


def line_of(progress: Progress) -> str:
    """Done, speed, and time left."""
    parts = [f"{progress.total - progress.missing}/{progress.total} answers"]
    elapsed_s = time.monotonic() - progress.started_s
    if progress.written and elapsed_s > 0:
        left_s = elapsed_s / progress.written * (progress.missing - len(progress.failed))
        parts += [f"{progress.tokens / elapsed_s:.0f} tokens/s", f"{timedelta(seconds=round(left_s))} left"]
    if progress.failed:
        parts.append(f"{len(progress.failed)} failed")
    return "  ".join(parts)
