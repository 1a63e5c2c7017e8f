"""`paradraft train`: runs a recipe with live progress."""

from __future__ import annotations

import json
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from paradraft.cli import terminal
from paradraft.cli.importing import importing
from paradraft.environment import is_main_process
from paradraft.models.names import POCKET
from paradraft.train import recipe_class, trainee_module, trainee_names

LEAST_LENGTH = 1.05
"""Tokens per target pass of a drafter that is worth a try."""

if TYPE_CHECKING:
    from paradraft.train.run.progress import Evaluation, Report
    from paradraft.train.trainee import Builder, R


def run_with_display(recipe: R, build: Builder[R]) -> bool:
    """Trains with a display of loss, accuracy by position and time left: a bar on a terminal, else lines.

    Returns:
        False if the drafter was there already.

    Raises:
        ValueError, OSError, StoppedError: see `paradraft.train.run.launch.train`.
    """
    from paradraft.train.recipe import CHECKPOINT
    from paradraft.train.run import launch
    from paradraft.train.run.checkpoint import STATE
    from paradraft.train.run.processes import StoppedError
    from paradraft.train.run.provenance import read_record

    console = terminal.console()
    console.quiet = not is_main_process()
    try:
        if console.is_terminal and not console.is_dumb_terminal:
            with Live(console=console, auto_refresh=False) as live:
                is_new = launch.train(recipe, build, _Screen(live).show, announce=live.console.print)
        else:
            say = partial(console.print, soft_wrap=True)
            is_new = launch.train(recipe, build, lambda report: say(line_of(report)), announce=say)
    except StoppedError as stop:
        console.print(
            f"stopped after step {stop.step} of {stop.steps}, with a checkpoint in {recipe.out / CHECKPOINT}: "
            "the same command goes on from there",
            soft_wrap=True,
        )
        raise
    except KeyboardInterrupt:
        folder = recipe.out / CHECKPOINT
        saved = (
            f"goes on from the last checkpoint in {folder}"
            if any(folder.glob(f"step-*/{STATE}"))
            else "starts again: no checkpoint yet"
        )
        console.print(f"stopped; the same command {saved}", soft_wrap=True)
        raise
    message = (
        f"drafter written to {recipe.out}" if is_new else f"{recipe.out} is already trained; delete it to train again"
    )
    console.print(message, soft_wrap=True)
    if is_new and (kept := _kept(read_record(recipe.out))) is not None:
        console.print(kept, soft_wrap=True)
    return is_new


def _drafts(record: dict[str, Any]) -> bool:
    """Whether a run was measured, and its drafter guesses more than it did before and than hardly anything."""
    best, first = record.get("best"), record.get("before_training")
    if best is None or best["acceptance_length"] is None:
        return False
    before = (first or {}).get("acceptance_length") or 1.0
    return bool(best["acceptance_length"] > max(LEAST_LENGTH, before))


def _kept(record: dict[str, Any]) -> str | None:
    """Best checkpoint of a run beside the untrained drafter; None if none was measured."""
    best, first = record.get("best"), record.get("before_training")
    if best is None:
        return None
    figures = [
        ("{} tokens per target pass", "{:.2f}", "acceptance_length"),
        ("held-out loss {}", "{:.3f}", "held_out_loss"),
    ]
    parts = [f"kept: step {best['step']} of {record['steps_done']}"]
    for words, digits, key in figures:
        if best[key] is not None:
            before = "" if first is None else f" (before training {digits.format(first[key])})"
            parts.append(words.format(digits.format(best[key])) + before)
    return ", ".join(parts)


def line_of(report: Report) -> str:
    """A report in one line."""
    from paradraft.train.run.progress import Evaluation

    if isinstance(report, Evaluation):
        return f"{_evaluated(report)}  right by position {_shares(report)}"
    norm = "" if report.grad_norm is None else f"gradient norm {report.grad_norm:.1f}  "
    return (
        f"step {report.step}/{report.steps}  loss {report.loss:.3f}  right by position {_shares(report)}  {norm}"
        f"{report.rows_per_s:.0f} rows/s  {_minutes(report.left_s)} left"
    )


def _evaluated(report: Evaluation) -> str:
    """Evaluation in fewer than 80 characters."""
    when = f"step {report.step}" if report.step else "before training"
    length = "" if report.acceptance_length is None else f", {report.acceptance_length:.2f} tokens per target pass"
    best = ", best so far" if report.is_best and report.step else ""
    return f"{when}: held-out loss {report.loss:.3f}{length}{best}"


def _shares(report: Report) -> str:
    """Accuracy by position, from position 1 on: ".62 .35"."""
    from paradraft.train.run.progress import by_position

    (shares,) = by_position([report])
    return " ".join(f"{share:.2f}".removeprefix("0") for share in shares.values())


class _Screen:
    """Live bar and line; each evaluation leaves a line above them."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._bar = Bar(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(None),
            TextColumn("{task.description}"),
            expand=True,
        )
        self._task = self._bar.add_task("", total=None, visible=False)

    def show(self, report: Report) -> None:
        from paradraft.train.run.progress import Evaluation

        if isinstance(report, Evaluation):
            self._live.console.print(_evaluated(report), soft_wrap=True)
            return
        left = f"{_minutes(report.left_s)} left"
        self._bar.update(self._task, completed=report.step, total=report.steps, description=left, visible=True)
        line = Text(f"loss {report.loss:.3f}  right by position {_shares(report)}", no_wrap=True, overflow="ellipsis")
        self._live.update(Group(self._bar, line), refresh=True)


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def train(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"What to train: {', '.join(trainee_names())}.")],
    recipe: Annotated[Path | None, typer.Argument(metavar="RECIPE", help="A YAML recipe.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings that replace the recipe's.")
    ] = None,
    settings: Annotated[
        bool, typer.Option("--settings", help="List all settings of a recipe for NAME, and exit.")
    ] = False,
    template: Annotated[
        str | None,
        typer.Option(
            help="Write a recipe to begin with, such as qwen3, to RECIPE or NAME-TEMPLATE.yaml, and exit; generic is "
            "for any target, pocket for the shipped family."
        ),
    ] = None,
) -> None:
    """Train a drafter from a recipe. Run the same command again to resume.

    Ctrl-C and SIGTERM write a checkpoint after the current step and leave, with exit code 130 or 143; a second Ctrl-C
    leaves at once.
    """
    with importing():
        module = trainee_module(name)
        from paradraft.sources.recorded import remember_drafter
        from paradraft.train.init.templates import write_template
        from paradraft.train.recipe_file import load_recipe, settings_of
        from paradraft.train.run.model_card import next_steps
        from paradraft.train.run.processes import StoppedError
        from paradraft.train.run.provenance import read_record

    if settings:
        for key, field in settings_of(recipe_class(module)).items():
            default = "required" if field.is_required() else json.dumps(field.default).strip('"')
            print(f"{key} ({default}): {field.description}")
        return
    if template is not None:
        if overrides:
            raise ValueError(f"--template {template}: {overrides[0]!r} is for the training, leave it out")
        file = recipe or Path(f"{name}-{template}.yaml")
        write_template(name, template, file)
        todo = "" if template == POCKET else "set model, data and out in it, then "
        print(f"{file} is written: {todo}paradraft train {name} {file}")
        return
    if recipe is None:
        raise ValueError(f"train {name}: name a recipe, a YAML file; --template writes one, --settings explains it")
    try:
        loaded = load_recipe(recipe_class(module), recipe, overrides or [])
        is_new = run_with_display(loaded, module.build)
    except StoppedError as stop:
        raise typer.Exit(128 + stop.number) from None
    if is_main_process():
        placeholder = "" if loaded.measured_with else ", with the model whose text it is to guess as TARGET"
        lines = next_steps(name, loaded, loaded.out, str(loaded.out))
        print("\n".join(["", f"try it, measure it, serve it{placeholder}:", *lines]))
        target, (drafter, k) = loaded.measured_with, loaded.decoded_with(name)
        if not is_new or target in (None, POCKET) or not _drafts(read_record(loaded.out)):
            return
        if remember_drafter(target, loaded.out, drafter, k):
            print(f"paradraft chat --target {shlex.quote(target)} drafts with it from now on, without --drafter")
