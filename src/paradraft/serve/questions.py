"""Splits a request into choices and validates them before decoding."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from llguidance import LLMatcher

from paradraft.engine.engine import Engine
from paradraft.sampling_params import Sampling
from paradraft.serve.grammar import Grammar
from paradraft.serve.limits import Limits
from paradraft.serve.replies import ApiError
from paradraft.serve.schemas import ApiRequest

SEED_BITS = 63


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One answer to decode.

    Args:
        tokens: of the prompt.
        sampling: its `processors` include the grammar.
        k: most tokens drafted per round; None for the engine's.
        logprobs: top tokens reported per position; None reports no log probabilities.
        grammar: enforces the JSON schema of the answer; None for any text.
    """

    index: int
    tokens: list[int]
    sampling: Sampling
    max_new_tokens: int
    stop: str | list[str]
    k: int | None
    logprobs: int | None
    grammar: Grammar | None = None


def choices_of(
    request: ApiRequest,
    prompts: Sequence[list[int]],
    engine: Engine,
    limits: Limits,
    name: str,
    matcher: LLMatcher | None = None,
) -> list[Choice]:
    """Builds `n` choices of each prompt, with consecutive seeds.

    Args:
        engine: validates the choices.
        name: of the prompt parameter, for errors.
        matcher: compiled JSON schema of the answers; None for any text.

    Raises:
        ApiError: a parameter is wrong, or an answer exceeds the context.
    """
    token_limits = [_limit(request, len(tokens), engine, limits, name) for tokens in prompts]
    k = 0 if request.speculation == "off" else request.speculation
    choices: list[Choice] = []
    try:
        for tokens, max_new_tokens in zip(prompts, token_limits, strict=True):
            for index in range(request.n):
                grammar = None
                if matcher is not None:
                    grammar = Grammar(matcher, prompt=len(tokens), eos_ids=engine.target.eos_ids)
                sampling = _sampling(request, index, grammar)
                choice = Choice(
                    index=len(choices),
                    tokens=tokens,
                    sampling=sampling,
                    max_new_tokens=max_new_tokens,
                    stop=request.stop,
                    k=k,
                    logprobs=request.most_logprobs,
                    grammar=grammar,
                )
                engine.check(
                    tokens,
                    max_new_tokens=max_new_tokens,
                    sampling=sampling,
                    stop=request.stop,
                    k=k,
                    logprobs=choice.logprobs,
                )
                choices.append(choice)
    except ValueError as error:
        raise mistake(error, request, name) from None
    return choices


def mistake(error: ValueError, request: ApiRequest, name: str) -> ApiError:
    """Converts an error of the engine; `name` is the parameter to blame if the message begins with none."""
    message = " ".join(str(error).split())
    if re.match(r"k=", message):
        message = "speculation: " + message
    if "stop string" in message:
        return ApiError(400, message, param="stop")
    first = re.match(r"\w+", message)
    is_named = first is not None and first[0] in type(request).model_fields
    return ApiError(400, message, param=first[0] if first is not None and is_named else name)


def _sampling(request: ApiRequest, index: int, grammar: Grammar | None) -> Sampling:
    return Sampling(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias={int(token): bias for token, bias in request.logit_bias.items()},
        processors=() if grammar is None else (grammar,),
        seed=secrets.randbits(SEED_BITS) if request.seed is None else request.seed + index,
    )


def _limit(request: ApiRequest, prompt: int, engine: Engine, limits: Limits, name: str) -> int:
    """Most tokens of an answer to a prompt of `prompt` tokens."""
    room = engine.target.capacity - prompt
    if room < 1:
        raise ApiError(
            400,
            f"the model has room for {engine.target.capacity} tokens, and the prompt has {prompt}: shorten it",
            param=name,
            code="context_length_exceeded",
        )
    if request.limit is None:
        return min(room, limits.max_new_tokens, request.usual_limit)
    if request.limit > limits.max_new_tokens:
        message = (
            f"{request.limit_name}={request.limit}: this server gives at most {limits.max_new_tokens} tokens an answer"
        )
        raise ApiError(400, message, param=request.limit_name)
    if request.limit > room:
        raise ApiError(
            400,
            f"the model has room for {engine.target.capacity} tokens, the prompt has {prompt}, and "
            f"{request.limit_name}={request.limit}: shorten the prompt or ask for fewer",
            param=request.limit_name,
            code="context_length_exceeded",
        )
    return request.limit
