"""Command table and top-level app. A command is imported when named, its libraries when it runs: see importing.py."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from paradraft.cli.sections import SectionedCommand

HELP = {"help_option_names": ["-h", "--help"]}


COMMANDS = {
    "generate": "Answer prompts.",
    "chat": "Talk with a model.",
    "serve": "Answer requests over HTTP, as OpenAI's servers do.",
    "record": "Record what a model thinks likely, so that answers are drafted better.",
    "init-draft": "Make a draft to train for a target that has no small sibling.",
    "regenerate": "Let the target answer prompts: what its drafter is trained on.",
    "train": "Train a drafter from a recipe.",
    "adapt": "Let a drafter go on learning from the answers of a log of rounds, at the lowest priority.",
    "train-judge": "Train a head that accepts drafted tokens which change no answer. Not lossless.",
    "trim": "Leave out the rows of a draft's output head that its target's answers hardly need.",
    "merge": "Merge a low-rank adapter (LoRA) into its base model.",
    "drafters": "List the drafters that fit a target, with what each yields here.",
    "bench": "Compare methods on the same prompts, interleaved.",
    "report": "Show a result of paradraft bench again.",
    "plan": "Choose how many tokens to draft at each batch size.",
    "simulate": "Predict speeds from the times of passes.",
    "export": "Write a drafter as an engine that serves loads it.",
    "audit": "Check that a drafter changes nothing.",
}
"""First sentence of each command's help, in the order of the help.

A command is the function of its name, in the module of its name in `paradraft.cli.commands`, with underscores.
"""


class Commands(TyperGroup):
    """Command group that imports a command when it is named."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of the help."""
        return list(COMMANDS)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolves the command; an unknown name fails with a suggestion."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            near = get_close_matches(args[0], COMMANDS, n=1)
            known = near[0] if near else "one of " + ", ".join(COMMANDS)
            ctx.fail(f"unknown command {args[0]!r}: use {known}")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Imports a command; None if unknown."""
        if cmd_name not in self.commands and cmd_name in COMMANDS:
            name = cmd_name.replace("-", "_")
            module = import_module(f"paradraft.cli.commands.{name}")
            alone = new_app()
            alone.command(cmd_name, cls=SectionedCommand, context_settings=HELP)(getattr(module, name))
            self.add_command(typer.main.get_command(alone), cmd_name)
        return self.commands.get(cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def new_app(**settings: Any) -> typer.Typer:
    """Typer app without rich's boxes, which truncate long option names on narrow terminals."""
    return typer.Typer(
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings=HELP,
        **{"add_completion": False} | settings,
    )


def _print_version(show_version: bool) -> None:
    if show_version:
        print(f"paradraft {version('paradraft')}")
        raise typer.Exit


app = new_app(
    cls=Commands,
    add_completion=True,
    help="Speculative decoding with parallel drafters: train, decode, prove, measure, plan.",
)


@app.callback()
def of_all_commands(
    *,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of the program itself."""
    del show_version
