"""Default sampling parameters from the model's `generation_config.json`."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paradraft.cli import options
from paradraft.cli.ignored import given
from paradraft.cli.sections import SAMPLING
from paradraft.sampling_params import Sampling

if TYPE_CHECKING:
    from paradraft.models.target import Target

Choice = Literal["auto", "none"]
GenerationConfig = Annotated[
    Choice,
    options.option(
        "auto: settings of sampling that are not given are those of the model's generation_config.json, or of its "
        "GGUF file; none: the model's are not looked at.",
        "--generation-config", section=SAMPLING,
    ),
]  # fmt: skip
SEED_BITS = 32
UNSAID = options.Offer(
    defaults=dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")),
    helps={
        "temperature": "0 is greedy. By default the model's own, see --generation-config, or greedy.",
        "seed": "The same seed gives the same answers, with any drafter. By default one is drawn, and shown.",
    },
)
"""Options of `chat` for `Sampling`: no defaults, so that the model's apply."""


def expect_penalty(choice: Choice) -> None:
    """Silences the warning about an ignored repetition penalty in commands that apply it."""
    from paradraft.text.generation_config import PenaltyWarning

    if choice == "auto":
        warnings.simplefilter("ignore", PenaltyWarning)


def asked_by(target: Target, name: str, choice: Choice) -> Mapping[str, float]:
    """Model's sampling parameters, as fields of `Sampling`; `name` is the model's in messages.

    Raises:
        ValueError: the model's generation config has a setting that is not supported.
    """
    from paradraft.text.generation_config import sampling_defaults

    if choice == "none":
        return {}
    try:
        return sampling_defaults(target.lm.model.generation_config, name)
    except ValueError as error:
        raise ValueError(f"{error}; --generation-config none leaves it out") from None


def completed(context: typer.Context, sampling: Sampling, defaults: Mapping[str, float]) -> Sampling:
    """Fills in options that were not set: from `defaults`, and a random seed."""
    values: dict[str, Any] = {"seed": secrets.randbits(SEED_BITS), **defaults}
    return replace(sampling, **{name: value for name, value in values.items() if not given(context, (name,))})


def in_words(sampling: Sampling) -> str:
    """Settings that affect the answer; equal words mean equal answers.

    >>> in_words(Sampling(temperature=0.7, top_p=0.8, seed=5)), in_words(Sampling(top_p=0.8, repetition_penalty=1.1))
    ('temperature 0.7, top-p 0.8, seed 5', 'temperature 0 (greedy), repetition-penalty 1.1')
    """
    neutral = Sampling()
    random_only = () if sampling.is_greedy else ("top_k", "top_p", "min_p")
    names = (*random_only, "repetition_penalty", "presence_penalty", "frequency_penalty")
    changed = [name for name in names if getattr(sampling, name) != getattr(neutral, name)]
    parts = [f"temperature {sampling.temperature:g}" + " (greedy)" * sampling.is_greedy]
    parts += [f"{name.replace('_', '-')} {getattr(sampling, name):g}" for name in changed]
    return ", ".join(parts if sampling.is_greedy else [*parts, f"seed {sampling.seed}"])
