"""Prompts and what is asked for them, checked against the target before any work is done."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from paradraft.core import Sampling
from paradraft.models.target import Target
from paradraft.models.texts import opening

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and what was asked for it.

    Args:
        tokens: of the prompt.
        max_new_tokens: most tokens of its answer.
        sampling: how they are chosen.
    """

    tokens: list[int]
    max_new_tokens: int
    sampling: Sampling


def requests_of(
    target: Target,
    prompts: list[str] | list[list[int]],
    max_new_tokens: int | Sequence[int],
    sampling: Sampling | Sequence[Sampling],
) -> list[Request]:
    """Tokenizes and checks prompts.

    Args:
        target: who will answer.
        prompts: texts; or rows of token ids, which are taken as they are.
        max_new_tokens: most tokens of an answer, for all prompts or for each.
        sampling: for all prompts or for each.

    Raises:
        ValueError: a prompt (named by number) is empty, is no valid text or has an unknown token id, it and
            its answer do not fit into the model, or a setting does not fit the target or the number of prompts.
    """
    limits = _each("max_new_tokens", max_new_tokens, int, len(prompts))
    samplings = _each("sampling", sampling, Sampling, len(prompts))
    requests, rows = [], list[str | list[int]](prompts)
    for number, (prompt, limit, chosen) in enumerate(zip(rows, limits, samplings, strict=True), start=1):
        name = f"prompt {number}" if len(prompts) > 1 else "the prompt"
        request = Request(tokens=_tokens(target, prompt, name), max_new_tokens=limit, sampling=chosen)
        _check(request, target, name)
        requests.append(request)
    return requests


def _tokens(target: Target, prompt: str | list[int], name: str) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: look at its character {error.start + 1}") from None
    return opening(prompt, target.tokenizer) if prompt else []


def _check(request: Request, target: Target, name: str) -> None:
    tokens, limit, biases = request.tokens, request.max_new_tokens, dict(request.sampling.biases)
    known = target.lm.vocab_size
    if not tokens:
        raise ValueError(f"{name} is empty: give at least one token")
    if limit < 1:
        raise ValueError(f"max_new_tokens={limit}: ask for at least 1")
    unknown = next((token for token in tokens if not 0 <= token < known), None)
    if unknown is not None:
        raise ValueError(f"{name} has the token id {unknown}: use 0 to {known - 1}")
    if biases and max(biases) >= known:
        raise ValueError(f"logit_bias: {max(biases)} is not among the {known} token ids")
    if sum(bias == -math.inf for bias in biases.values()) >= known - 1:
        raise ValueError("logit_bias: nearly all tokens are forbidden: leave at least two")
    if len(tokens) + limit > target.capacity:
        raise ValueError(
            f"{name} has {len(tokens)} tokens and {limit} are asked for, but the model has room "
            f"for {target.capacity}: shorten the prompt or lower max_new_tokens"
        )


def _each(name: str, value: _T | Sequence[_T], kind: type[_T], number: int) -> list[_T]:
    """A setting for each of `number` prompts."""
    values = [value] * number if isinstance(value, kind) or not isinstance(value, Sequence) else list(value)
    for one in values:
        if not isinstance(one, kind):
            raise ValueError(f"{name}={one!r}: use {'a whole number' if kind is int else f'a {kind.__name__}'}")
    if len(values) != number:
        raise ValueError(f"{name}: {len(values)} values for {number} prompts; give one for all, or one for each")
    return values
