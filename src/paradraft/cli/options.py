"""The options that several commands share, how their values are read, and warnings about those that have no effect."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer

from paradraft.decode.draft_length import POLICIES
from paradraft.drafters import drafter_names
from paradraft.models.runtime import PRECISIONS
from paradraft.speculation import MOST_DRAFTED
from paradraft.tree import Tree

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


Target = Annotated[str, typer.Option("--target", help="Hugging Face id, folder, or pocket (the shipped family).")]
DRAFTERS = f"one of {', '.join(drafter_names())}; its settings follow it, as in ngram:max_ngram=5."
Drafter = Annotated[str, typer.Option("--drafter", help=f"The drafter, {DRAFTERS}")]
Draft = Annotated[str | None, typer.Option("--draft", help="Draft model; the pocket target brings its own.")]
K = Annotated[int, typer.Option("-k", help=f"Tokens drafted per round, 1 to {MOST_DRAFTED}.")]
NewTokens = Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option("--top-k", help="Keep the k most likely tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option("--top-p", help="Keep the likeliest tokens that together reach p.")]
MinP = Annotated[float, typer.Option("--min-p", help="Keep tokens at least p times as likely as the likeliest.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1: what was said before becomes less likely.")]
PresencePenalty = Annotated[float, typer.Option(help="Taken off the logit of what the answer has said.")]
FrequencyPenalty = Annotated[float, typer.Option(help="The same, for each time it was said.")]
LogitBias = Annotated[
    list[str] | None, typer.Option(help="TOKEN_ID=NUMBER, added to its logit; -inf forbids it; may be repeated.")
]
Seed = Annotated[int, typer.Option(help="The same seed gives the same text, with any drafter.")]
Verify = Annotated[
    str,
    typer.Option(help="match: the same tokens as without a drafter; rejection: the same distribution."),
]
TreeBudget = Annotated[
    int | None, typer.Option(min=1, help="Let drafts branch, up to this many tokens; by default they are chains.")
]
TreePaths = Annotated[
    str | None, typer.Option(help='A fixed tree, as ranks of candidates: "0 1 0.0 0.1 0.0.0".', show_default=False)
]
Lengths = Annotated[
    str,
    typer.Option(help=f"How many of the k tokens to draft, one of {', '.join(POLICIES)}; expected: what pays here."),
]
Prompts = Annotated[Path | None, typer.Option(help='JSONL file with one {"prompt": …} per line.')]
NumPrompts = Annotated[int, typer.Option(help="How many prompts of the file to use.")]
Device = Annotated[str, typer.Option(help="A torch device, such as cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help=f"One of {', '.join(PRECISIONS)}.")]
Compile = Annotated[
    bool | None,
    typer.Option(
        help="Compile passes, also where it takes a minute or two and pays off after thousands of tokens. By default "
        "where it takes seconds: on CPUs, in float32, bfloat16 and int8.",
        show_default=False,
    ),
]
CompileAll = Annotated[
    bool,
    typer.Option(help="Compile passes, also where it takes a minute or two, as on GPUs; else by the models' own code."),
]
Capacity = Annotated[int | None, typer.Option(help="Most tokens of prompt and answer; by default the model's limit.")]


def tree_of(budget: int | None, paths: str | None) -> Tree | None:
    """The shape of drafts that two options ask for."""
    if budget is not None and paths is not None:
        raise ValueError("give either --tree-budget or --tree-paths")
    if paths is None:
        return None if budget is None else Tree(budget=budget)
    try:
        ranks = tuple(tuple(int(rank) for rank in path.split(".")) for path in paths.split())
    except ValueError:
        raise ValueError(f'--tree-paths {paths!r}: write ranks with dots between them, such as "0 1 0.0"') from None
    return Tree(paths=ranks)
