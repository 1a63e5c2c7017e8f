"""Options that are set on the command line, and warnings about those without effect."""

from __future__ import annotations

import sys
from collections.abc import Collection

import typer

from paradraft.drafters import drafter_class
from paradraft.engine.speculation import Speculation
from paradraft.placement import Placement

Rule = tuple[bool, str, Collection[str]]
"""Whether the rule holds for this run, its condition in words, and the parameters without effect."""
SHARED = Placement()


def without_chance(is_greedy: bool) -> Rule:
    """Options ignored by greedy runs."""
    return is_greedy, "at temperature 0", ("top_k", "top_p", "min_p", "seed", "seeds")


def without_drafter(speculation: Speculation) -> Rule:
    """Options ignored without a drafter."""
    return speculation.drafter == "none", "without a drafter", ("k", "verify", "lengths", "draft_dtype")


def of_drafting(speculation: Speculation, placement: Placement = SHARED, *, has_grammars: bool = False) -> list[Rule]:
    """Options of the drafter that are ignored with this drafter, gamma or placement, or without grammars."""
    traits = drafter_class(speculation.drafter).traits
    has_own_tree = traits.branching == "own"
    has_devices = placement.has_process or placement.target_stages is not None
    return [
        without_drafter(speculation),
        (has_own_tree, "with this drafter, whose own settings say how deep it drafts", ("k",)),
        (traits.needs_grammar and not has_grammars, "without a JSON schema: this drafter is for serve", ("drafter",)),
        (isinstance(speculation.gamma, int), "with --gamma, which says how many tokens are drafted", ("k",)),
        (not has_devices, "without --draft-cpus or --draft-device", ("draft_timeout_s",)),
    ]


def warn_ignored(context: typer.Context, *rules: Rule) -> None:
    """Warns of each set option without effect; rules may name parameters that the command does not have."""
    for holds, when, names in rules:
        for option in given(context, names) if holds else ():
            print(f"warning: {option} has no effect {when}", file=sys.stderr)


def refuse(context: typer.Context, names: Collection[str], why: str) -> None:
    """Raises ValueError if one of these parameters is set."""
    for option in given(context, names):
        raise ValueError(f"{option} {why}")


def given(context: typer.Context, names: Collection[str]) -> list[str]:
    """Named parameters that are set on the command line, as option names."""
    options = {str(parameter.name): parameter.opts[0] for parameter in context.command.params}
    sources = {name: context.get_parameter_source(name) for name in options if name in names}
    return [options[name] for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
