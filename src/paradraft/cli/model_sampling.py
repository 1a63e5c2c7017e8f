"""How tokens are chosen where the user does not say: as the model's author asks for, in `generation_config.json`."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paradraft.cli import options
from paradraft.cli.sections import SAMPLING
from paradraft.sampling_params import Sampling

if TYPE_CHECKING:
    from paradraft.models.target import Target

Choice = Literal["auto", "none"]
GenerationConfig = Annotated[
    Choice,
    typer.Option(
        "--generation-config",
        rich_help_panel=SAMPLING,
        help="auto: settings of sampling that are not given are those of the model's generation_config.json, or of its "
        "GGUF file; none: the model's are not looked at.",
    ),
]
SEED_BITS = 32
UNSAID = options.Offer(
    defaults=dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")),
    helps={
        "temperature": "0 is greedy. By default the model's own, see --generation-config, or greedy.",
        "seed": "The same seed gives the same answers, with any drafter. By default one is drawn, and shown.",
    },
)
"""What `chat` offers of a `Sampling`."""


def expect_penalty(choice: Choice) -> None:
    """Lets a command that obeys the model load it without a warning that others do not."""
    from paradraft.text.generation_config import PenaltyWarning

    if choice == "auto":
        warnings.simplefilter("ignore", PenaltyWarning)


def asked_by(target: Target, name: str, choice: Choice) -> Mapping[str, float]:
    """What a model asks for, as fields of `Sampling`.

    Args:
        target: the model.
        name: of the model, for messages.
        choice: `--generation-config`.

    Raises:
        ValueError: the model asks for what there is not.
    """
    from paradraft.text.generation_config import sampling_defaults

    if choice == "none":
        return {}
    try:
        return sampling_defaults(target.lm.model.generation_config, name)
    except ValueError as error:
        raise ValueError(f"{error}; --generation-config none leaves it out") from None


def completed(context: typer.Context, sampling: Sampling, defaults: Mapping[str, float]) -> Sampling:
    """A sampling with the defaults in place of what was not given, and with a seed that was drawn."""
    values: dict[str, Any] = {"seed": secrets.randbits(SEED_BITS), **defaults}
    return replace(sampling, **{name: value for name, value in values.items() if not options.given(context, (name,))})


def in_words(sampling: Sampling) -> str:
    """The settings that matter; two of the same words give the same answers.

    >>> in_words(Sampling(temperature=0.7, top_p=0.8, seed=5)), in_words(Sampling(top_p=0.8, repetition_penalty=1.1))
    ('temperature 0.7, top-p 0.8, seed 5', 'temperature 0 (greedy), repetition-penalty 1.1')
    """
    neutral = Sampling()
    chance = () if sampling.is_greedy else ("top_k", "top_p", "min_p")
    names = (*chance, "repetition_penalty", "presence_penalty", "frequency_penalty")
    changed = [name for name in names if getattr(sampling, name) != getattr(neutral, name)]
    told = [f"temperature {sampling.temperature:g}" + " (greedy)" * sampling.is_greedy]
    told += [f"{name.replace('_', '-')} {getattr(sampling, name):g}" for name in changed]
    return ", ".join(told if sampling.is_greedy else [*told, f"seed {sampling.seed}"])
