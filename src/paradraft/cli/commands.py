"""The commands. Each is imported when it is asked for; what it works with, when it runs: see importing.py."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from paradraft.cli.sections import SectionedCommand

HELP = {"help_option_names": ["-h", "--help"]}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a command is.

    Args:
        module: in this package.
        function: in the module.
        help: the first sentence of its help.
    """

    module: str
    function: str
    help: str


COMMANDS = {
    "generate": Place(module="generate", function="generate", help="Answer prompts."),
    "chat": Place(module="chat", function="chat", help="Talk with a model."),
    "serve": Place(module="serve", function="serve", help="Answer requests over HTTP, as OpenAI's servers do."),
    "init-draft": Place(
        module="init_draft", function="init_draft", help="Make a draft to train for a target that has no small sibling."
    ),
    "regenerate": Place(
        module="regenerate",
        function="regenerate",
        help="Let the target answer prompts: what its drafter is trained on.",
    ),
    "train": Place(module="train", function="train_drafter", help="Train a drafter from a recipe."),
    "bench": Place(module="bench", function="bench", help="Compare methods on the same prompts, interleaved."),
    "report": Place(module="report", function="report", help="Show a result of paradraft bench again."),
    "plan": Place(module="plan", function="plan", help="Choose how many tokens to draft at each batch size."),
    "simulate": Place(module="simulate", function="simulate", help="Predict speeds from the times of passes."),
    "export": Place(module="export", function="export", help="Write a drafter as an engine that serves loads it."),
    "audit": Place(module="audit", function="audit", help="Check that a drafter changes nothing."),
}
"""In the order of the help."""


class Commands(TyperGroup):
    """The commands by their names."""

    def list_commands(self, ctx: Any) -> list[str]:
        """In the order of the help."""
        return list(COMMANDS)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the arguments begin with; of a name that is none, what it may have been."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            near = get_close_matches(args[0], COMMANDS, n=1)
            known = near[0] if near else "one of " + ", ".join(COMMANDS)
            ctx.fail(f"unknown command {args[0]!r}: use {known}")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command, imported; None if there is none of this name."""
        if cmd_name not in self.commands and (place := COMMANDS.get(cmd_name)) is not None:
            module = import_module(f"paradraft.cli.{place.module}")
            alone = new_app()
            alone.command(cmd_name, cls=SectionedCommand, context_settings=HELP)(getattr(module, place.function))
            self.add_command(typer.main.get_command(alone), cmd_name)
        return self.commands.get(cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The list in the help, for which nothing is imported."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, place.help) for name, place in COMMANDS.items()])


def new_app(**settings: Any) -> typer.Typer:
    """Without rich's boxes, which cut the names of long options off where a terminal is narrow."""
    return typer.Typer(
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings=HELP,
        **{"add_completion": False} | settings,
    )


def _print_version(is_asked: bool) -> None:
    if is_asked:
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
    is_asked: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """What the program itself is asked for."""
    del is_asked
