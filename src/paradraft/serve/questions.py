"""What is asked of the engine: one choice for each answer of a request, checked before any is begun."""

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
from paradraft.serve.schemas import Asked

SEED_BITS = 63


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One answer that is asked for.

    Args:
        index: in the response.
        tokens: of the prompt.
        sampling: how its tokens are chosen.
        max_new_tokens: most tokens of it.
        stop: strings that end it.
        k: most tokens drafted for it per round, if fewer than for others.
        logprobs: how many of the likeliest tokens to tell for each token; None tells no probabilities.
        grammar: what the answer must be, which is one of the processors of `sampling`; None for any text.
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
    asked: Asked,
    prompts: Sequence[list[int]],
    engine: Engine,
    limits: Limits,
    name: str,
    matcher: LLMatcher | None = None,
) -> list[Choice]:
    """The answers that a request asks for: `n` of each prompt, with seeds one after the other.

    Args:
        asked: the request.
        prompts: as tokens.
        engine: who will answer.
        limits: of the server.
        name: of the parameter that has the prompts.
        matcher: of the schema of its answers; None for any text.

    Raises:
        ApiError: a parameter is wrong, or an answer does not fit.
    """
    most = [_limit(asked, len(tokens), engine, limits, name) for tokens in prompts]
    k = 0 if asked.speculation == "off" else asked.speculation
    choices: list[Choice] = []
    try:
        for tokens, max_new_tokens in zip(prompts, most, strict=True):
            for number in range(asked.n):
                grammar = None
                if matcher is not None:
                    grammar = Grammar(matcher, prompt=len(tokens), eos_ids=engine.target.eos_ids)
                sampling = _sampling(asked, number, grammar)
                choice = Choice(
                    index=len(choices),
                    tokens=tokens,
                    sampling=sampling,
                    max_new_tokens=max_new_tokens,
                    stop=asked.stop,
                    k=k,
                    logprobs=asked.most_logprobs,
                    grammar=grammar,
                )
                engine.check(
                    tokens,
                    max_new_tokens=max_new_tokens,
                    sampling=sampling,
                    stop=asked.stop,
                    k=k,
                    logprobs=choice.logprobs,
                )
                choices.append(choice)
    except ValueError as error:
        raise mistake(error, asked, name) from None
    return choices


def mistake(error: ValueError, asked: Asked, name: str) -> ApiError:
    """What the engine says to a wrong setting, with the parameter that it is about.

    Args:
        error: the engine's.
        asked: the request.
        name: of the parameter to blame where the message does not begin with one.
    """
    message = " ".join(str(error).split())
    if re.match(r"k=", message):
        message = "speculation: " + message
    if "stop string" in message:
        return ApiError(400, message, param="stop")
    first = re.match(r"\w+", message)
    is_named = first is not None and first[0] in type(asked).model_fields
    return ApiError(400, message, param=first[0] if first is not None and is_named else name)


def _sampling(asked: Asked, number: int, grammar: Grammar | None) -> Sampling:
    return Sampling(
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        min_p=asked.min_p,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        repetition_penalty=asked.repetition_penalty,
        logit_bias={int(token): bias for token, bias in asked.logit_bias.items()},
        processors=() if grammar is None else (grammar,),
        seed=secrets.randbits(SEED_BITS) if asked.seed is None else asked.seed + number,
    )


def _limit(asked: Asked, prompt: int, engine: Engine, limits: Limits, name: str) -> int:
    """Most tokens of an answer to a prompt of so many."""
    room = engine.target.capacity - prompt
    if room < 1:
        raise ApiError(
            400,
            f"the model has room for {engine.target.capacity} tokens, and the prompt has {prompt}: shorten it",
            param=name,
            code="context_length_exceeded",
        )
    if asked.limit is None:
        return min(room, limits.max_new_tokens, asked.usual_limit)
    if asked.limit > limits.max_new_tokens:
        message = (
            f"{asked.limit_name}={asked.limit}: this server gives at most {limits.max_new_tokens} tokens an answer"
        )
        raise ApiError(400, message, param=asked.limit_name)
    if asked.limit > room:
        raise ApiError(
            400,
            f"the model has room for {engine.target.capacity} tokens, the prompt has {prompt}, and "
            f"{asked.limit_name}={asked.limit}: shorten the prompt or ask for fewer",
            param=asked.limit_name,
            code="context_length_exceeded",
        )
    return asked.limit
