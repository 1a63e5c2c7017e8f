"""Tokenizes prompts into requests and checks them against the target."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from paradraft.core import Request
from paradraft.engine.speculation import Speculation
from paradraft.errors import one_line, whole_number
from paradraft.models.target import Target
from paradraft.sampling_params import Sampling
from paradraft.text.tokenization import encode_prompt
from paradraft.wording import number_of

_T = TypeVar("_T")
Prompt = str | Sequence[int] | Tensor | np.ndarray
"""A text; or token ids, which are taken as they are: a list, a tuple, an array or a tensor of one dimension."""
Prompts = Sequence[str] | Sequence[Sequence[int]] | Sequence[Prompt] | Tensor | np.ndarray
"""Several prompts: a list or a tuple, or an array or a tensor of two dimensions."""
MOST_LOGPROBS = 20
"""Most top tokens reported for each position of an answer."""
_USE = "use a text, token ids, or a list of these"


def rows_of(prompts: Prompt | Prompts) -> tuple[list[object], bool]:
    """List of prompts, and whether `prompts` is a single one, outside a list.

    Raises:
        ValueError: they are neither a prompt nor several, or there is none.

    >>> rows_of("a"), rows_of([1, 2]), rows_of([[1, 2], "a"]), rows_of(np.array([[1], [2]]))
    ((['a'], True), ([[1, 2]], True), ([[1, 2], 'a'], False), ([[1], [2]], False))
    """
    if isinstance(prompts, str):
        return [prompts], True
    rows = _plain(prompts)
    if not isinstance(rows, list):
        raise ValueError(f"prompts={one_line(prompts)}: {_USE}")
    if not rows:
        raise ValueError("prompts=[]: give at least one prompt")
    is_single = isinstance(rows[0], Real)
    return ([rows] if is_single else rows), is_single


def _plain(value: object) -> object:
    if isinstance(value, Tensor | np.ndarray):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


def requests_of(
    target: Target,
    prompts: Sequence[object],
    max_new_tokens: int | Sequence[int],
    sampling: Sampling | Sequence[Sampling],
) -> list[Request]:
    """Tokenizes and checks prompts; request ids count from 0.

    `max_new_tokens` and `sampling` are for all prompts, or sequences with one entry for each.

    Raises:
        ValueError: a prompt (numbered from 1) is empty, is no valid text or has an unknown token id, it and its answer
            exceed the model's context, or a setting has the wrong type or does not fit the target or the number of
            prompts.
    """
    limits = _each("max_new_tokens", max_new_tokens, lambda value: whole_number("max_new_tokens", value), len(prompts))
    samplings = _each("sampling", sampling, _sampling, len(prompts))
    requests = []
    for index, (prompt, limit, each) in enumerate(zip(prompts, limits, samplings, strict=True)):
        name = f"prompt {index + 1}" if len(prompts) > 1 else "the prompt"
        tokens = tokens_of(target, prompt, name)
        _check(tokens, limit, each, target, name)
        request = Request(id=index, tokens=tokens, sampling=each, max_new_tokens=limit, eos_ids=target.eos_ids)
        requests.append(request)
    return requests


def check_round(speculation: Speculation, k: int | None, logprobs: int | None) -> None:
    """Raises ValueError if the rounds of an engine cannot have these settings of a request; see `Engine.astream`."""
    for name, value in (("k", k), ("logprobs", logprobs)):
        if value is not None and speculation.gamma is not None:
            raise ValueError(f"{name}={value}: an engine that drafts ahead does not have it, leave {name} out")
    if logprobs is not None and not 0 <= whole_number("logprobs", logprobs) <= MOST_LOGPROBS:
        raise ValueError(f"logprobs={logprobs}: use 0 to {MOST_LOGPROBS}")
    if k is not None and not 0 <= whole_number("k", k) <= speculation.k:
        raise ValueError(f"k={k}: this engine drafts at most {speculation.k} tokens per round, use 0 to that")


def tokens_of(target: Target, prompt: object, name: str = "the prompt") -> list[int]:
    """Token ids of a prompt; raises ValueError, naming the prompt `name`, unless it is a text or token ids."""
    prompt = _plain(prompt)
    if isinstance(prompt, list):
        tokens = _token_ids(prompt, name)
        _check_ids(tokens, target, name)
        return tokens
    if not isinstance(prompt, str):
        chats = ", or engine.chat for messages" if isinstance(prompt, dict) else ""
        raise ValueError(f"{name} is {one_line(prompt)}: use a text, or a list of token ids such as [17, 4]{chats}")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: look at its character {error.start + 1}") from None
    return encode_prompt(prompt, target.tokenizer) if prompt else []


def _token_ids(prompt: list[Any], name: str) -> list[int]:
    try:
        return [whole_number("token id", token) for token in prompt]
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _sampling(value: object) -> Sampling:
    if not isinstance(value, Sampling):
        raise ValueError(f"sampling={one_line(value)}: use a Sampling")
    return value


def _check(tokens: list[int], limit: int, sampling: Sampling, target: Target, name: str) -> None:
    biases, vocab_size = dict(sampling.biases), target.lm.vocab_size
    if not tokens:
        raise ValueError(f"{name} is empty: give at least one token")
    if limit < 1:
        raise ValueError(f"max_new_tokens={limit}: ask for at least 1")
    _check_ids(tokens, target, name)
    if biases and max(biases) >= vocab_size:
        raise ValueError(f"logit_bias: {max(biases)} is not among the {vocab_size} token ids")
    if sum(bias == -math.inf for bias in biases.values()) >= vocab_size - 1:
        raise ValueError("logit_bias: nearly all tokens are forbidden: leave at least two")
    if len(tokens) + limit > target.capacity:
        raise ValueError(
            f"{name} has {number_of(len(tokens), 'token')} and {limit} are asked for, but the model has room "
            f"for {target.capacity}: shorten the prompt or lower max_new_tokens"
        )


def _check_ids(tokens: list[int], target: Target, name: str) -> None:
    most = target.lm.vocab_size - 1
    unknown = next((token for token in tokens if not 0 <= token <= most), None)
    if unknown is not None:
        raise ValueError(f"{name} has the token id {unknown}: use 0 to {most}")


def _each(name: str, value: object, checked: Callable[[object], _T], count: int) -> list[_T]:
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        values = [checked(each) for each in value]
    else:
        values = [checked(value)] * count
    if len(values) != count:
        raise ValueError(f"{name}: {len(values)} values for {count} prompts; give one for all, or one for each")
    return values
