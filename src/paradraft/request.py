"""Prompts and what is asked for them, checked against the target before any work is done."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from paradraft.core import Request
from paradraft.errors import one_line, whole_number
from paradraft.models.target import Target
from paradraft.models.tokenization import encode_prompt
from paradraft.sampling_params import Sampling

_T = TypeVar("_T")


def requests_of(
    target: Target,
    prompts: list[str] | list[list[int]] | list[str | list[int]],
    max_new_tokens: int | Sequence[int],
    sampling: Sampling | Sequence[Sampling],
) -> list[Request]:
    """Tokenizes and checks prompts; the ids of the requests are their numbers, from 0.

    Args:
        target: who will answer.
        prompts: a list of texts; or of lists of token ids, which are taken as they are.
        max_new_tokens: most tokens of an answer, for all prompts or for each.
        sampling: for all prompts or for each.

    Raises:
        ValueError: a prompt (named by number) is empty, is no valid text or has an unknown token id, it and
            its answer do not fit into the model, or a setting has the wrong type or does not fit the target or the
            number of prompts.
    """
    if not isinstance(prompts, list):
        raise ValueError(f"prompts={one_line(prompts)}: use a text, a list of texts, or a list of lists of token ids")
    if not prompts:
        raise ValueError("prompts=[]: give at least one prompt")
    rows = list[str | list[int]](prompts)
    if len({isinstance(prompt, str) for prompt in rows if isinstance(prompt, (str, list))}) > 1:
        raise ValueError("prompts: some are texts and some are token ids: give all of them in one way")
    limits = _each("max_new_tokens", max_new_tokens, lambda value: whole_number("max_new_tokens", value), len(prompts))
    samplings = _each("sampling", sampling, _sampling, len(prompts))
    requests = []
    for number, (prompt, limit, chosen) in enumerate(zip(rows, limits, samplings, strict=True), start=1):
        name = f"prompt {number}" if len(prompts) > 1 else "the prompt"
        tokens = _tokens(target, prompt, name)
        _check(tokens, limit, chosen, target, name)
        request = Request(id=number - 1, tokens=tokens, sampling=chosen, max_new_tokens=limit, eos_ids=target.eos_ids)
        requests.append(request)
    return requests


def _tokens(target: Target, prompt: str | list[int], name: str) -> list[int]:
    if isinstance(prompt, list):
        return _token_ids(prompt, name)
    if not isinstance(prompt, str):
        raise ValueError(f"{name} is {one_line(prompt)}: use a text, or a list of token ids such as [[17, 4]]")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: look at its character {error.start + 1}") from None
    return encode_prompt(prompt, target.tokenizer) if prompt else []


def _token_ids(prompt: list[int], name: str) -> list[int]:
    try:
        return [whole_number("token id", token) for token in prompt]
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _sampling(value: object) -> Sampling:
    if not isinstance(value, Sampling):
        raise ValueError(f"sampling={one_line(value)}: use a Sampling")
    return value


def _check(tokens: list[int], limit: int, sampling: Sampling, target: Target, name: str) -> None:
    biases, known = dict(sampling.biases), target.lm.vocab_size
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


def _each(name: str, value: object, checked: Callable[[object], _T], number: int) -> list[_T]:
    """A setting for each of `number` prompts."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        values = [checked(one) for one in value]
    else:
        values = [checked(value)] * number
    if len(values) != number:
        raise ValueError(f"{name}: {len(values)} values for {number} prompts; give one for all, or one for each")
    return values
