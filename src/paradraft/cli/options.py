"""Options of commands, declared as the fields of dataclasses.

A command has a dataclass of its own, and among its fields `Speculation`, `Sampling`, `Runtime` and others of
`OPTIONS`: types and defaults of their options come from their fields, names and help texts from `OPTIONS`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import copy
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from paradraft.cli import sections
from paradraft.cli.importing import importing
from paradraft.cli.values import biases_of, tree_of
from paradraft.data.prompt_source import DEFAULT
from paradraft.drafters import drafter_names
from paradraft.engine.speculation import LENGTHS, MOST_DRAFTED, Speculation, gamma_of
from paradraft.models.runtime import PRECISIONS, Runtime
from paradraft.placement import Placement, cpus_of, stages_of
from paradraft.sampling_params import Sampling
from paradraft.serve.limits import Limits


def option(
    help_text: str,
    *names: str,
    section: str | None = None,
    least: int | None = None,
    most: int | None = None,
    check: Callable[[str], object] | None = None,
    variable: str | None = None,
    show_default: bool = True,
) -> Any:
    """An option, for `Annotated`.

    Args:
        check: raises ValueError for a wrong text, before the command's libraries are imported.
        variable: of the environment, with the value where the option is not set.
    """

    def checked(text: str | None) -> str | None:
        if check is not None and text is not None:
            check(text)
        return text

    return typer.Option(
        *names, help=help_text, rich_help_panel=section, min=least, max=most, envvar=variable,
        show_default=show_default, callback=None if check is None else checked,
    )  # fmt: skip


TARGET = "Hugging Face id, folder, .gguf file or REPO:Q4_K_M, or pocket (the shipped family)"
Target = Annotated[str, option(f"{TARGET}.", "--target")]
NewTokens = Annotated[int, option("Most tokens of an answer.", least=1)]
_PROMPTS = 'JSONL file with one {"prompt": …} or {"messages": […]} per line; - is the standard input.'
Prompts = Annotated[Path | None, option(_PROMPTS)]
MeasuredPrompts = Annotated[Path | None, option(f"{_PROMPTS} By default {DEFAULT}.", "--prompts", show_default=False)]
"""Prompts of commands that measure, with a default."""
TemplateVariables = Annotated[
    str | None,
    option(
        'JSON object of variables of the chat template, such as {"enable_thinking": false}.', "--chat-template-kwargs"
    ),
]
Rounds = Annotated[
    Path | None,
    option(
        "Add the tokens of each answer, and where its rounds began, to this JSONL file: a drafter is trained on them. "
        "It holds what users wrote.",
        "--rounds", section=sections.DRAFTING,
    ),
]  # fmt: skip
FEW = 8
"""Default number of prompts of audits and exports."""


def num_prompts_option(usual: int) -> Any:
    """Option `--num-prompts` of a command with this default."""
    return option(f"How many of the prompts to use, from the first; by default {usual}, or all where there are fewer.")


Threads = Annotated[int | None, option("CPU threads; by default torch's choice.", section=sections.HARDWARE, least=1)]
VllmPython = Annotated[
    Path | None,
    option(
        "The Python of vLLM's environment; by default the one that make vllm makes, else this one, else that of the "
        "command vllm in the PATH.",
        section=sections.SERVERS, variable="PARADRAFT_VLLM_PYTHON",
    ),
]  # fmt: skip
LlamaCppPython = Annotated[
    Path | None,
    option(
        "The Python of llama.cpp's environment; by default the one that make llama-cpp makes.",
        section=sections.SERVERS, variable="PARADRAFT_LLAMA_CPP_PYTHON",
    ),
]  # fmt: skip
Plot = Annotated[Path | None, option("Write a PNG.", "--plot", section=sections.RESULTS)]
DRAFTERS = (
    f"one of {', '.join(drafter_names())}; its settings follow it, as in ngram:max_ngram=5. a+b drafts with both."
)

OPTIONS: dict[type, dict[str, Any]] = {
    Speculation: {
        "drafter": option(
            f"The drafter, {DRAFTERS} lookahead is for GPUs, where passes of many tokens are cheap. auto: the drafter "
            "of --draft, else the last one trained for the target, else suffix, maybe with recycle, where draft "
            "lengths can adapt, else none."
        ),
        "draft": option("Draft model; the pocket target brings its own."),
        "k": option(f"Most tokens drafted per round, 1 to {MOST_DRAFTED}.", "-k", "--k"),
        "verify": option(
            "match: the same tokens as without a drafter; rejection: the same distribution; block: that, and more "
            "accepted where tokens are sampled. Not lossless: typical, or typical:epsilon=0.09:delta=0.3; "
            "judge:head=FILE of train-judge."
        ),
        "tree_budget": option("Let drafts branch, up to this many tokens; by default they are chains.", least=1),
        "tree_paths": option('A fixed tree, as ranks of candidates: "0 1 0.0 0.1 0.0.0".'),
        "lengths": option(
            f"How many of the k tokens to draft: {', '.join(LENGTHS)}. expected: what pays here; auto: "
            "that, where it cannot change a text (passes in C++, match rule, no --gamma), else fixed, which is all."
        ),
        "gamma": option(
            "Draft while the target verifies (PEARL), this many tokens ahead; auto: as many as are fastest here. "
            "By default the two take turns."
        ),
    },
    Sampling: {
        "temperature": option("0 is greedy."),
        "top_k": option("Keep the k most likely tokens; 0 keeps all."),
        "top_p": option("Keep the likeliest tokens that together reach p."),
        "min_p": option("Keep tokens at least p times as likely as the likeliest."),
        "repetition_penalty": option("Above 1: what was said before becomes less likely."),
        "presence_penalty": option("Taken off the logit of what the answer has said."),
        "frequency_penalty": option("Subtracted from a token's logit per occurrence."),
        "logit_bias": option("TOKEN_ID=NUMBER, added to its logit; -inf forbids it; may be repeated."),
        "seed": option("The same seed gives the same text, with any drafter."),
    },
    Runtime: {
        "device": option("A torch device, such as cpu or cuda; auto is a GPU if there is one."),
        "dtype": option(
            f"One of {', '.join(PRECISIONS)}; auto is the checkpoint's. int8 changes texts hardly more than "
            "bfloat16; int4 costs quality: 0.12 nats a token of a 135M model, 0.02 of a 0.5B one (docs/quantized.md)."
        ),
        "draft_dtype": option(
            "The same for a draft model; by default that of --dtype, beside a target in few bits int8."
        ),
        "tokenizer": option(
            "Folder or Hugging Face id of the target's tokenizer, by default the target's own: for a .gguf file "
            "whose tokenizer is not known here."
        ),
        "compiled": option(
            "Force torch.compile (1-2 min start-up). By default only where compiling takes seconds: on CPUs, in "
            "float32, bfloat16, int8 and int4.",
            "--compile/--no-compile",
        ),
        "capacity": option("Most tokens of prompt and answer; by default the model's limit."),
    },
    Placement: {
        "target_cpus": option("CPUs that the target computes on, such as 0 or 0-3,6; by default all."),
        "target_stages": option(
            "Devices that share the target's layers, such as cuda:0/cuda:1, or cpu:0/cpu:1 for CPUs 0 and 1. With "
            "--gamma the drafter is on them too, where the target is not at that time."
        ),
        "tensor_parallel": option(
            "The processes that torchrun has started share each layer of the target.", "--tensor-parallel"
        ),
        "draft_cpus": option("With --gamma: CPUs of the drafter, which then has a process of its own."),
        "draft_device": option("With --gamma: a torch device for the drafter in a process of its own."),
        "draft_timeout_s": option("Seconds after which a drafter's process that says nothing is given up."),
    },
    Limits: {
        "max_batch": option("Maximum batch size; n=4 counts as 4."),
        "max_queue": option("Most answers that wait for their turn; more are refused (429)."),
        "max_new_tokens": option("Most tokens of an answer."),
        "max_body_bytes": option("Most bytes of a request."),
        "timeout_s": option("Seconds after which a request is given up, waiting included."),
        "drain_s": option("Seconds that requests have to end when the server is told to."),
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
    "tree_budget": int | None, "logit_bias": list[str] | None,
    **dict.fromkeys(("tree_paths", "gamma", "target_cpus", "target_stages", "draft_cpus"), str | None),
}  # fmt: skip
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
AUTOMATIC = Offer(defaults={"drafter": "auto"})
"""Options of `Speculation` in commands that decode for users."""
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
    """Decorates a command with parameters that are dataclasses: `typer` sees an option for each of their fields.

    A command's own dataclass may have fields that are dataclasses of `OPTIONS`.
    """
    hints = get_type_hints(command, include_extras=True)
    own: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind) and kind not in OPTIONS}
    parameters: list[inspect.Parameter] = []
    parts: dict[Any, tuple[str, list[str]]] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        declared = _fields(own[name]) if name in own else [parameter.replace(annotation=hints[name])]
        for each in declared:
            kind, offer = _offered(each.annotation)
            options = list(_options(kind, offer)) if kind in OPTIONS else [each]
            parameters += options
            if kind in OPTIONS:
                parts[kind] = each.name, [option.name for option in options]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for kind in filter(parts.__contains__, IN_TURN):
            name, options = parts[kind]
            with importing():
                values[name] = _read(kind, {option: values.pop(option) for option in options})
        for name, own_kind in own.items():
            values[name] = own_kind(**{each.name: values.pop(each.name) for each in fields(own_kind)})
        command(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it; mypy knows no such attribute
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _fields(kind: Any) -> list[inspect.Parameter]:
    """Fields of a command's dataclass as parameters."""
    hints = get_type_hints(kind, include_extras=True)
    return [
        _parameter(each.name, hints[each.name], REQUIRED if each.default is MISSING else each.default)
        for each in fields(kind)
    ]


def _parameter(name: str, hint: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


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
            yield _parameter(name, Annotated[types[name], changed], defaults[name])


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
