"""Options that commands share, and warnings about options without effect.

A command with a parameter of type `Speculation`, `Sampling` or `Runtime` gets options for its fields: types and
defaults come from the fields, names and help texts from `OPTIONS`.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from paradraft.cli import sections
from paradraft.cli.importing import importing
from paradraft.data.prompt_source import DEFAULT
from paradraft.drafters import drafter_class, drafter_names
from paradraft.engine.speculation import LENGTHS, MOST_DRAFTED, Speculation, gamma_of
from paradraft.models.runtime import PRECISIONS, Runtime
from paradraft.placement import Placement, cpus_of, stages_of
from paradraft.sampling_params import Sampling
from paradraft.serve.limits import Limits
from paradraft.tree import Tree
from paradraft.wording import number_of

Rule = tuple[bool, str, Collection[str]]
"""Whether the rule holds for this run, its condition in words, and the parameters without effect."""


def without_chance(is_greedy: bool) -> Rule:
    """Options ignored by greedy runs."""
    return is_greedy, "at temperature 0", ("top_k", "top_p", "min_p", "seed", "seeds")


def without_drafter(speculation: Speculation) -> Rule:
    """Options ignored without a drafter."""
    return speculation.drafter == "none", "without a drafter", ("k", "verify", "lengths", "draft_dtype")


def with_own_tree(speculation: Speculation) -> Rule:
    """Options ignored with a drafter whose settings fix the size of its drafts."""
    is_own = drafter_class(speculation.drafter).traits.branching == "own"
    return is_own, "with this drafter, whose own settings say how deep it drafts", ("k",)


def use_threads(threads: int | None) -> None:
    """Sets torch's thread count; None leaves it. Raises ValueError if the process has fewer CPUs."""
    if threads is None:
        return
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or threads)
    if threads > cpus:
        raise ValueError(f"--threads {threads}: this process has {number_of(cpus, 'CPU')}, use at most as many")
    import torch

    torch.set_num_threads(threads)


def with_gamma(speculation: Speculation) -> Rule:
    """Options ignored with a fixed gamma."""
    return isinstance(speculation.gamma, int), "with --gamma, which says how many tokens are drafted", ("k",)


def without_process(placement: Placement) -> Rule:
    """Options ignored without a drafter process."""
    return (
        not placement.has_process and placement.target_stages is None,
        "without --draft-cpus or --draft-device",
        ("draft_timeout_s",),
    )


def warn_ignored(context: typer.Context, *rules: Rule) -> None:
    """Warns of each set option without effect; rules may name parameters that the command does not have."""
    for holds, when, names in rules:
        for option in given(context, names) if holds else ():
            print(f"warning: {option} has no effect {when}", file=sys.stderr)


def checked(check: Callable[[str], object]) -> Callable[[str | None], str | None]:
    """Callback that validates an option's text at once; `check` raises ValueError."""

    def callback(text: str | None) -> str | None:
        if text is not None:
            check(text)
        return text

    return callback


def given(context: typer.Context, names: Collection[str]) -> list[str]:
    """Named parameters that are set on the command line, as option names."""
    options = {str(parameter.name): parameter.opts[0] for parameter in context.command.params}
    sources = {name: context.get_parameter_source(name) for name in options if name in names}
    return [options[name] for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


TARGET = "Hugging Face id, folder, .gguf file or REPO:Q4_K_M, or pocket (the shipped family)"
Target = Annotated[str, typer.Option("--target", help=f"{TARGET}.")]
NewTokens = Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")]
_PROMPTS = 'JSONL file with one {"prompt": …} or {"messages": […]} per line; - is the standard input.'
Prompts = Annotated[Path | None, typer.Option(help=_PROMPTS)]
MeasuredPrompts = Annotated[
    Path | None, typer.Option("--prompts", help=f"{_PROMPTS} By default {DEFAULT}.", show_default=False)
]
"""Prompts of commands that measure, with a default."""
TemplateVariables = Annotated[
    str | None,
    typer.Option(
        "--chat-template-kwargs",
        help='JSON object of variables of the chat template, such as {"enable_thinking": false}.',
    ),
]


FEW = 8
"""Default number of prompts of audits and exports."""


def num_prompts_option(usual: int) -> Any:
    """Option `--num-prompts` of a command with this default."""
    return typer.Option(
        help=f"How many of the prompts to use, from the first; by default {usual}, or all where there are fewer."
    )


Threads = Annotated[
    int | None,
    typer.Option(min=1, rich_help_panel=sections.HARDWARE, help="CPU threads; by default torch's choice."),
]
VllmPython = Annotated[
    Path | None,
    typer.Option(
        envvar="PARADRAFT_VLLM_PYTHON",
        rich_help_panel=sections.SERVERS,
        help="The Python of vLLM's environment; by default the one that make vllm makes.",
    ),
]
LlamaCppPython = Annotated[
    Path | None,
    typer.Option(
        envvar="PARADRAFT_LLAMA_CPP_PYTHON",
        rich_help_panel=sections.SERVERS,
        help="The Python of llama.cpp's environment; by default the one that make llama-cpp makes.",
    ),
]
Plot = Annotated[Path | None, typer.Option("--plot", rich_help_panel=sections.RESULTS, help="Write a PNG.")]
DRAFTERS = f"one of {', '.join(drafter_names())}; its settings follow it, as in ngram:max_ngram=5."

OPTIONS: dict[type, dict[str, Any]] = {
    Speculation: {
        "drafter": typer.Option(
            help=f"The drafter, {DRAFTERS} lookahead is for GPUs, where passes of many tokens are cheap."
        ),
        "draft": typer.Option(help="Draft model; the pocket target brings its own."),
        "k": typer.Option("-k", "--k", help=f"Most tokens drafted per round, 1 to {MOST_DRAFTED}."),
        "verify": typer.Option(
            help="match: the same tokens as without a drafter; typical, or typical:epsilon=0.09:delta=0.3: not "
            "lossless; rejection: the same distribution."
        ),
        "tree_budget": typer.Option(
            min=1, help="Let drafts branch, up to this many tokens; by default they are chains."
        ),
        "tree_paths": typer.Option(help='A fixed tree, as ranks of candidates: "0 1 0.0 0.1 0.0.0".'),
        "lengths": typer.Option(
            help=f"How many of the k tokens to draft: {', '.join(LENGTHS)}. expected: what pays here; auto: "
            "that, where it cannot change a text (passes in C++, match rule, no --gamma), else fixed, which is all."
        ),
        "gamma": typer.Option(
            help="Draft while the target verifies (PEARL), this many tokens ahead; auto: as many as are fastest here. "
            "By default the two take turns."
        ),
    },
    Sampling: {
        "temperature": typer.Option(help="0 is greedy."),
        "top_k": typer.Option(help="Keep the k most likely tokens; 0 keeps all."),
        "top_p": typer.Option(help="Keep the likeliest tokens that together reach p."),
        "min_p": typer.Option(help="Keep tokens at least p times as likely as the likeliest."),
        "repetition_penalty": typer.Option(help="Above 1: what was said before becomes less likely."),
        "presence_penalty": typer.Option(help="Taken off the logit of what the answer has said."),
        "frequency_penalty": typer.Option(help="Subtracted from a token's logit per occurrence."),
        "logit_bias": typer.Option(help="TOKEN_ID=NUMBER, added to its logit; -inf forbids it; may be repeated."),
        "seed": typer.Option(help="The same seed gives the same text, with any drafter."),
    },
    Runtime: {
        "device": typer.Option(help="A torch device, such as cpu or cuda; auto is a GPU if there is one."),
        "dtype": typer.Option(
            help=f"One of {', '.join(PRECISIONS)}; auto is the checkpoint's. int8 changes texts hardly more than "
            "bfloat16; int4 costs quality: 0.12 nats a token of a 135M model, 0.02 of a 0.5B one (docs/quantized.md)."
        ),
        "draft_dtype": typer.Option(help="The same for a draft model; by default that of --dtype."),
        "tokenizer": typer.Option(
            help="Folder or Hugging Face id of the target's tokenizer, by default the target's own: for a .gguf file "
            "whose tokenizer is not known here."
        ),
        "compiled": typer.Option(
            "--compile/--no-compile",
            help="Force torch.compile (1-2 min start-up). By default only where compiling takes seconds: on CPUs, in "
            "float32, bfloat16, int8 and int4.",
        ),
        "capacity": typer.Option(help="Most tokens of prompt and answer; by default the model's limit."),
    },
    Placement: {
        "target_cpus": typer.Option(help="CPUs that the target computes on, such as 0 or 0-3,6; by default all."),
        "target_stages": typer.Option(
            help="Devices that share the target's layers, such as cuda:0/cuda:1, or cpu:0/cpu:1 for CPUs 0 and 1. With "
            "--gamma the drafter is on them too, where the target is not at that time."
        ),
        "tensor_parallel": typer.Option(
            "--tensor-parallel", help="The processes that torchrun has started share each layer of the target."
        ),
        "draft_cpus": typer.Option(help="With --gamma: CPUs of the drafter, which then has a process of its own."),
        "draft_device": typer.Option(help="With --gamma: a torch device for the drafter in a process of its own."),
        "draft_timeout_s": typer.Option(help="Seconds after which a drafter's process that says nothing is given up."),
    },
    Limits: {
        "max_batch": typer.Option(help="Maximum batch size; n=4 counts as 4."),
        "max_queue": typer.Option(help="Most answers that wait for their turn; more are refused (429)."),
        "max_new_tokens": typer.Option(help="Most tokens of an answer."),
        "max_body_bytes": typer.Option(help="Most bytes of a request."),
        "timeout_s": typer.Option(help="Seconds after which a request is given up, waiting included."),
        "drain_s": typer.Option(help="Seconds that requests have to end when the server is told to."),
    },
}
"""Options of each dataclass, in the order of the help."""
SECTIONS = {
    Speculation: sections.DRAFTING, Sampling: sections.SAMPLING, Runtime: sections.HARDWARE,
    Placement: sections.DEVICES, Limits: sections.LIMITS,
}  # fmt: skip
"""Help section of each dataclass; see `paradraft.cli.sections`."""
IN_TURN = (Sampling, Placement, Limits, Runtime, Speculation)
"""Order of reading: dataclasses that import torch come last, so that mistakes in the others are reported at once."""
TYPES: dict[str, Any] = {
    "tree_budget": int | None,
    "tree_paths": str | None,
    "logit_bias": list[str] | None,
    "gamma": str | None,
    "target_cpus": str | None,
    "target_stages": str | None,
    "draft_cpus": str | None,
}
"""Types of options that are parsed into a field of another type; their default is None."""
REQUIRED = inspect.Parameter.empty
"""Default of a required option."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Changes to a dataclass's options in one command: `Annotated[Sampling, Offer(without=("seed",))]`.

    Args:
        without: options left out; their fields keep the dataclass's defaults.
        defaults: by option, instead of the dataclass's; `REQUIRED` for none.
        helps: help texts by option, instead of those in `OPTIONS`.
    """

    without: Collection[str] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    helps: Mapping[str, str] = field(default_factory=dict)


PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
FIXED = Offer(defaults={"lengths": "fixed"})
"""Options of `Speculation` in commands that examine drafts: all K tokens in every round, even if slower."""
COMPILED = Offer(
    defaults={"compiled": True},
    helps={
        "compiled": "Decode by compiled passes, even if that takes 1-2 min, as on GPUs; else by the models' own code."
    },
)
"""Options of `Runtime` in commands that measure: passes are compiled."""


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorates a command: `typer` sees the options of each dataclass of `OPTIONS`, the command gets the dataclass."""
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    parts: dict[type, tuple[str, list[str]]] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        kind, offer = _offered(hints[name])
        options = list(_options(kind, offer)) if kind in OPTIONS else [parameter.replace(annotation=hints[name])]
        parameters += options
        if kind in OPTIONS:
            parts[kind] = name, [option.name for option in options]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for kind in filter(parts.__contains__, IN_TURN):
            name, options = parts[kind]
            with importing():
                values[name] = _read(kind, {option: values.pop(option) for option in options})
        command(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it; mypy knows no such attribute
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _offered(hint: Any) -> tuple[Any, Offer]:
    kind, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    return kind, next((note for note in notes if isinstance(note, Offer)), Offer())


def _options(kind: type, offer: Offer) -> Iterator[inspect.Parameter]:
    assert {*offer.without, *offer.defaults, *offer.helps} <= {*OPTIONS[kind]}
    types = get_type_hints(kind) | TYPES
    defaults = {field.name: field.default for field in fields(kind)} | dict.fromkeys(TYPES) | dict(offer.defaults)
    for name, option in OPTIONS[kind].items():
        if name not in offer.without:
            changed = copy(option)
            changed.help, changed.rich_help_panel = offer.helps.get(name, option.help), SECTIONS[kind]
            hint: Any = Annotated[types[name], changed]
            yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hint)


def _read(kind: type, values: dict[str, Any]) -> Any:
    if kind is Speculation:
        values["tree"] = tree_of(values.pop("tree_budget", None), values.pop("tree_paths", None))
        values["gamma"] = gamma_of(values.get("gamma"))
    if kind is Placement:
        values |= {name: cpus_of(values.get(name)) for name in ("target_cpus", "draft_cpus")}
        values["target_stages"] = stages_of(values.get("target_stages"))
    if kind is Sampling:  # None: an option without a default, not set
        values = {name: value for name, value in values.items() if value is not None}
    if "logit_bias" in values:
        values["logit_bias"] = biases_of(values["logit_bias"])
    return kind(**values)


def tree_of(budget: int | None, paths: str | None) -> Tree | None:
    """Draft tree of `--tree-budget` or `--tree-paths`."""
    if budget is not None and paths is not None:
        raise ValueError("give either --tree-budget or --tree-paths")
    if paths is None:
        return None if budget is None else Tree(budget=budget)
    try:
        ranks = tuple(tuple(int(rank) for rank in path.split(".")) for path in paths.split())
    except ValueError:
        raise ValueError(f'--tree-paths {paths!r}: write ranks with dots between them, such as "0 1 0.0"') from None
    return Tree(paths=ranks)


def biases_of(pairs: list[str]) -> dict[int, float]:
    """Parses the values of `--logit-bias`.

    >>> biases_of(["17=-2.5", "3=-inf"])
    {17: -2.5, 3: -inf}
    """
    biases: dict[int, float] = {}
    for pair in pairs:
        token, _, bias = pair.partition("=")
        try:
            token_id, value = int(token), float(bias)
        except ValueError:
            raise ValueError(f"--logit-bias {pair}: write TOKEN_ID=NUMBER, such as 17=-2.5 or 17=-inf") from None
        if token_id in biases:
            raise ValueError(f"--logit-bias {pair}: token {token_id} has a bias already, give it one")
        biases[token_id] = value
    return biases


def key_in(variable: str | None, option: str = "--api-key-env") -> str | None:
    """API key in an environment variable; None for no key. Raises ValueError, naming `option`, if it holds none."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise ValueError(f"{option} {variable}: there is no key in this environment variable")
    return key


def check_png(file: Path | None) -> None:
    """Raises ValueError unless the file is a .png and matplotlib is installed."""
    if file is None:
        return
    if file.suffix != ".png":
        raise ValueError(f"--plot {file}: name a .png file")
    if find_spec("matplotlib") is None:
        raise ValueError(f"--plot {file}: matplotlib draws it, pip install 'paradraft[bench]'")
