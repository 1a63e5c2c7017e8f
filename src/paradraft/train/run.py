"""Runs a recipe with live progress on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.live import Live
from rich.table import Table

from paradraft.train.recipe import PardRecipe
from paradraft.train.trainer import CHECKPOINT, Progress, is_trained, train_pard


def run_with_display(recipe: PardRecipe) -> None:
    """Trains, showing loss, per-depth accuracy and time left; says so if it was done before.

    On a terminal one table is kept up to date; elsewhere every report is a line.

    Raises:
        ValueError: see `train_pard`.
    """
    console = Console(highlight=False)
    if is_trained(recipe):
        console.print(f"{recipe.out} is already trained; delete it to train again", soft_wrap=True)
        return
    try:
        if console.is_terminal:
            with Live(console=console, auto_refresh=False) as live:
                train_pard(recipe, lambda progress: live.update(_table(progress), refresh=True))
        else:
            train_pard(recipe, lambda progress: console.print(_line(progress), soft_wrap=True))
    except KeyboardInterrupt:
        folder = recipe.out / CHECKPOINT
        saved = (
            f"goes on from the last checkpoint in {folder}" if folder.exists() else "starts again: no checkpoint yet"
        )
        console.print(f"stopped; the same command {saved}", soft_wrap=True)
        raise
    console.print(f"drafter written to {recipe.out}", soft_wrap=True)


def _line(progress: Progress) -> str:
    accuracy = " ".join(f"{share:.2f}" for share in progress.accuracy)
    return (
        f"step {progress.step}/{progress.steps}  loss {progress.loss:.3f}  accuracy by depth {accuracy}  "
        f"{progress.rows_per_s:.0f} rows/s  {_minutes(progress.left_s)} left"
    )


def _table(progress: Progress) -> Table:
    table = Table(title=f"step {progress.step}/{progress.steps} · {_minutes(progress.left_s)} left")
    for name in ("loss", *(f"depth {depth}" for depth in range(len(progress.accuracy)))):
        table.add_column(name, justify="right")
    table.add_row(f"{progress.loss:.3f}", *(f"{share:.0%}" for share in progress.accuracy))
    return table


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
