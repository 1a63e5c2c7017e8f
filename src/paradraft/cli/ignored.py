"""Options that a run has no use for: a setting that is ignored warns."""

from __future__ import annotations

import sys
from collections.abc import Collection

import typer

Rule = tuple[bool, str, Collection[str]]
"""Whether it holds for this run, when that is, and which parameters then have no effect."""


def without_chance(is_greedy: bool) -> Rule:
    """What a run that draws no random numbers ignores."""
    return is_greedy, "at temperature 0", ("top_k", "top_p", "min_p", "seed", "seeds")


def without_drafter(drafter: str) -> Rule:
    """What a run that drafts nothing ignores."""
    return drafter == "none", "without a drafter", ("k", "verify", "lengths")


def warn_ignored(context: typer.Context, *rules: Rule) -> None:
    """Says in a line for each option that was given and that a rule names that it has no effect.

    Args:
        context: of the command.
        rules: they may name parameters that the command does not have.
    """
    for holds, when, names in rules:
        for option in given(context, names) if holds else ():
            print(f"warning: {option} has no effect {when}", file=sys.stderr)


def given(context: typer.Context, names: Collection[str]) -> list[str]:
    """Those of the named parameters that stand on the command line, as they are written there."""
    options = {str(parameter.name): parameter.opts[0] for parameter in context.command.params}
    sources = {name: context.get_parameter_source(name) for name in options if name in names}
    return [options[name] for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
