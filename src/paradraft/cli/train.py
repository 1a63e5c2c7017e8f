"""`paradraft train`: runs a recipe with live progress on the terminal."""

from __future__ import annotations

import json
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from paradraft.environment import is_main_process
from paradraft.train import recipe_class, trainee_module, trainee_names

if TYPE_CHECKING:
    from paradraft.train.progress import Evaluation, Progress, Report
    from paradraft.train.recipe import Recipe
    from paradraft.train.trainee import Builder, R


def run_with_display(recipe: R, build: Builder[R]) -> None:
    """Trains, showing loss, per-depth accuracy and time left; says so if it was done before.

    On a terminal one table is kept up to date; elsewhere every report is a line.

    Raises:
        ValueError, OSError, StoppedError: see `paradraft.train.launch.train`.
    """
    from paradraft.train import launch
    from paradraft.train.checkpoint import STATE
    from paradraft.train.provenance import read_record
    from paradraft.train.stopping import StoppedError

    console = Console(highlight=False, quiet=not is_main_process())
    try:
        if console.is_terminal:
            with Live(console=console, auto_refresh=False) as live:
                is_new = launch.train(recipe, build, _Screen(live).show, announce=live.console.print)
        else:
            say = partial(console.print, soft_wrap=True)
            is_new = launch.train(recipe, build, lambda report: say(_line(report)), announce=say)
    except StoppedError as stop:
        console.print(
            f"stopped after step {stop.step} of {stop.steps}, with a checkpoint in {recipe.out / launch.CHECKPOINT}: "
            "the same command goes on from there",
            soft_wrap=True,
        )
        raise
    except KeyboardInterrupt:
        folder = recipe.out / launch.CHECKPOINT
        saved = (
            f"goes on from the last checkpoint in {folder}"
            if any(folder.glob(f"step-*/{STATE}"))
            else "starts again: no checkpoint yet"
        )
        console.print(f"stopped; the same command {saved}", soft_wrap=True)
        raise
    said = (
        f"drafter written to {recipe.out}" if is_new else f"{recipe.out} is already trained; delete it to train again"
    )
    console.print(said, soft_wrap=True)
    if is_new and (kept := _kept(read_record(recipe.out))) is not None:
        console.print(kept, soft_wrap=True)


def _kept(record: dict[str, Any]) -> str | None:
    """Which of the drafters of a run was kept; None if none was measured."""
    best = record.get("best")
    if best is None:
        return None
    length = best["acceptance_length"]
    said = "" if length is None else f", {length:.2f} tokens per target pass"
    return f"kept: step {best['step']} of {record['steps_done']}{said}, held-out loss {best['held_out_loss']:.3f}"


def next_steps(name: str, recipe: Recipe) -> list[str]:
    """Lines to paste: they answer with the drafter that was trained, measure it, and serve it where vLLM can.

    Args:
        name: of what was trained, which is the drafter's too.
        recipe: of the run.
    """
    from paradraft.drafters import drafter_config
    from paradraft.export.engines import vllm_config

    target, out = recipe.measured_with or "TARGET", str(recipe.out)
    k = getattr(recipe, "k", None)
    has_own_tree = getattr(drafter_config(name, out), "tree", None) is not None
    depth = None if has_own_tree else k
    models = f"--target {shlex.quote(target)}"
    method = f"{name}:draft={out}" if depth is None else f"{name}:k={depth}:draft={out}"
    drafter = f"--drafter {name}" if depth is None else f"--drafter {name} -k {depth}"
    lines = [
        f"paradraft generate {models} {drafter} --draft {shlex.quote(out)} --prompt 'Once upon a time'",
        f"paradraft bench {models} --methods {shlex.quote(f'ar,{method}')}",
    ]
    if k is not None and (config := vllm_config({1: k}, name, out)) is not None:
        del config["num_speculative_tokens_per_batch_size"]
        lines.append(f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(config))}")
    return lines


def _line(report: Report) -> str:
    from paradraft.train.progress import Evaluation

    accuracy = " ".join(f"{share:.2f}" for share in report.accuracy)
    if isinstance(report, Evaluation):
        length = report.acceptance_length
        said = "" if length is None else f"  {length:.2f} tokens per target pass"
        best = "  (best so far)" if report.is_best else ""
        return f"step {report.step}: held-out loss {report.loss:.3f}  accuracy by depth {accuracy}{said}{best}"
    norm = "" if report.grad_norm is None else f"gradient norm {report.grad_norm:.1f}  "
    return (
        f"step {report.step}/{report.steps}  loss {report.loss:.3f}  accuracy by depth {accuracy}  {norm}"
        f"{report.rows_per_s:.0f} rows/s  {_minutes(report.left_s)} left"
    )


class _Screen:
    """One table, kept up to date: the last report and the last evaluation."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._progress: Progress | None = None
        self._evaluation: Evaluation | None = None

    def show(self, report: Report) -> None:
        from paradraft.train.progress import Evaluation

        if isinstance(report, Evaluation):
            self._evaluation = report
        else:
            self._progress = report
        self._live.update(self._table(), refresh=True)

    def _table(self) -> Table:
        table = Table()
        shown = [report for report in (self._progress, self._evaluation) if report is not None]
        for name in ("", "loss", *(f"depth {depth}" for depth in range(len(shown[0].accuracy))), "tokens per pass"):
            table.add_column(name, justify="right")
        if (progress := self._progress) is not None:
            table.title = f"step {progress.step}/{progress.steps} · {_minutes(progress.left_s)} left"
            table.add_row("training", f"{progress.loss:.3f}", *(f"{share:.0%}" for share in progress.accuracy))
        if (held_out := self._evaluation) is not None:
            length = "" if held_out.acceptance_length is None else f"{held_out.acceptance_length:.2f}"
            accuracy = (f"{share:.0%}" for share in held_out.accuracy)
            table.add_row(f"held out, step {held_out.step}", f"{held_out.loss:.3f}", *accuracy, length)
        return table


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def train_drafter(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"What to train: {', '.join(trainee_names())}.")],
    recipe: Annotated[Path | None, typer.Argument(metavar="RECIPE", help="A YAML recipe.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings that replace the recipe's.")
    ] = None,
    settings: Annotated[
        bool, typer.Option("--settings", help="List all settings of a recipe for NAME, and exit.")
    ] = False,
) -> None:
    """Train a drafter from a recipe. Run the same command again to resume.

    Ctrl-C and SIGTERM write a checkpoint after the current step and leave, with exit code 130 or 143; a second Ctrl-C
    leaves at once.
    """
    from paradraft.train.recipe_file import load_recipe, settings_of
    from paradraft.train.stopping import StoppedError

    module = trainee_module(name)
    if settings:
        for key, field in settings_of(recipe_class(module)).items():
            default = "required" if field.is_required() else json.dumps(field.default).strip('"')
            print(f"{key} ({default}): {field.description}")
        return
    if recipe is None:
        raise ValueError(f"train {name}: name a recipe, a YAML file; --settings lists what it may say")
    try:
        wanted = load_recipe(recipe_class(module), recipe, overrides or [])
        run_with_display(wanted, module.build)
    except StoppedError as stop:
        raise typer.Exit(128 + stop.number) from None
    if is_main_process():
        unknown = "" if wanted.measured_with else ", with the model whose text it is to guess as TARGET"
        print("\n".join(["", f"try it, measure it, serve it{unknown}:", *next_steps(name, wanted)]))
