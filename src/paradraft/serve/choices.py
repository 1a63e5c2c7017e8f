"""Choices: the answers to a request, validated together and decoded together."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from llguidance import LLMatcher

from paradraft.engine.answers import Chunk
from paradraft.engine.engine import Engine
from paradraft.sampling_params import Sampling
from paradraft.serve.admission import Admission, Reservation
from paradraft.serve.exchange import ApiError
from paradraft.serve.grammar import Grammar, Grammars
from paradraft.serve.limits import Limits
from paradraft.serve.metrics import AnswerMetrics, Metrics
from paradraft.serve.schemas import ApiRequest
from paradraft.serve.tools import CallReader

REASONS = {"eos": "stop", "stop": "stop", "length": "length"}
"""OpenAI's finish reasons."""
SEED_BITS = 63


@dataclass(frozen=True, kw_only=True)
class Service:
    """What the responses of a server share.

    Args:
        names: of the model in requests.
        defaults: sampling parameters that a request leaves out.
    """

    engine: Engine
    admission: Admission
    metrics: Metrics
    grammars: Grammars
    names: Sequence[str]
    limits: Limits
    defaults: Mapping[str, float]

    @property
    def model(self) -> str:
        """The model's name in answers."""
        return self.names[0]


@dataclass(kw_only=True)
class Choice:
    """One answer to a request, while it is decoded.

    Args:
        prompt: its token ids.
        chunks: its rounds; they are decoded once they are read.
        grammar: enforces the JSON schema of the answer; None for any text.
        characters: of the tokens with log probabilities.
    """

    index: int
    prompt: list[int]
    chunks: AsyncGenerator[Chunk, None]
    grammar: Grammar | None
    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: dict[str, Any] | None = None
    characters: int = 0
    finish_reason: str | None = None
    reader: CallReader | None = None
    """Separates calls of functions from the text."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    new_calls: list[dict[str, Any]] = field(default_factory=list)
    """Calls that the last round has completed."""
    drafted: int = 0
    accepted: int = 0
    first_s: float = 0.0
    """When the first round came, by `time.perf_counter`."""
    last_s: float = 0.0
    tokens_of_first: int = 0

    def add(self, chunk: Chunk, logprobs: Mapping[str, Any] | None) -> None:
        """Appends a round, with its `ApiRequest.logprobs_json`."""
        self.last_s = time.perf_counter()
        if not self.texts:
            self.first_s, self.tokens_of_first = self.last_s, len(chunk.tokens)
        self.tokens += chunk.tokens
        self.drafted += chunk.drafted
        self.accepted += chunk.accepted
        is_last, text = chunk.finish_reason is not None, chunk.text
        if self.reader is not None:
            text, self.new_calls = self.reader.read(text, is_last=is_last)
            self.calls += self.new_calls
        self.texts.append(text)
        if chunk.finish_reason is not None:
            self.finish_reason = REASONS[chunk.finish_reason]
            if self.calls and self.finish_reason == "stop":
                self.finish_reason = "tool_calls"
        if logprobs is not None:
            before = self.logprobs or {}
            self.logprobs = {
                key: before.get(key, []) + value if isinstance(value, list) else value
                for key, value in logprobs.items()
            }


def prompt_of(request: ApiRequest, prompt: Any, service: Service) -> list[int]:
    """Token ids of a prompt, which may be longer than the context.

    Raises:
        ApiError: as `choices_of`, for the settings of the request too.
    """
    try:
        tokens = request.tokens(prompt, service.engine)
        _chunks(request, tokens[:1], _limit(request, 1, service), service, 0, None)  # checks all settings
        return tokens
    except ValueError as error:
        raise mistake(error, request) from None


def _chunks(
    request: ApiRequest, tokens: list[int], limit: int, service: Service, index: int, grammar: Grammar | None
) -> AsyncGenerator[Chunk, None]:
    return service.engine.astream(
        tokens,
        max_new_tokens=limit,
        sampling=_sampling(request, index, grammar),
        stop=request.stops,
        k=0 if request.speculation == "off" else request.speculation,
        logprobs=request.most_logprobs,
    )


def choices_of(
    request: ApiRequest, prompts: Sequence[Any], service: Service, matcher: LLMatcher | None
) -> list[Choice]:
    """Validates a request, and builds `n` choices of each prompt, with consecutive seeds.

    Raises:
        ApiError: a parameter or a prompt is wrong, or an answer exceeds the context.
    """
    choices = list[Choice]()
    try:
        rows = [request.tokens(prompt, service.engine) for prompt in prompts]
        limits = [_limit(request, len(tokens), service) for tokens in rows]
        for tokens, limit in zip(rows, limits, strict=True):
            for index in range(request.n):
                grammar = None
                if matcher is not None:
                    grammar = service.grammars.grammar(matcher, prompt=len(tokens), is_compact=request.is_compact)
                chunks = _chunks(request, tokens, limit, service, index, grammar)
                reader = CallReader(request.function_names) if request.function_names else None
                choices.append(Choice(index=len(choices), prompt=tokens, chunks=chunks, grammar=grammar, reader=reader))
    except ValueError as error:
        raise mistake(error, request) from None
    return choices


def mistake(error: ValueError, request: ApiRequest) -> ApiError:
    """Converts an error of the engine; the prompt is to blame if the message begins with no parameter."""
    message = " ".join(str(error).split())
    if message.startswith("k="):
        message = "speculation: " + message
    if "stop string" in message:
        return ApiError(400, message, param="stop")
    name, *_ = re.split(r"\W", message, maxsplit=1)
    return ApiError(400, message, param=name if name in type(request).model_fields else request.prompts_name)


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


def _limit(request: ApiRequest, prompt: int, service: Service) -> int:
    """Most tokens of an answer to a prompt of `prompt` tokens; raises ApiError if the request wants more."""
    capacity, most, name = service.engine.target.capacity, service.limits.max_new_tokens, request.limit_name
    limit, room = getattr(request, name), capacity - prompt
    code = "context_length_exceeded"
    if room < 1:
        message = f"the model has room for {capacity} tokens, and the prompt has {prompt}: shorten it"
        raise ApiError(400, message, param=request.prompts_name, code=code)
    if limit is None:
        return min(room, most, request.usual_limit)
    if limit > most:
        message = f"{name}={limit}: this server gives at most {most} tokens an answer"
        raise ApiError(400, message, param=name)
    if limit > room:
        message = (
            f"the model has room for {capacity} tokens, the prompt has {prompt}, and {name}={limit}: "
            "shorten the prompt or ask for fewer"
        )
        raise ApiError(400, message, param=name, code=code)
    return int(limit)


async def decoded(
    choices: Sequence[Choice], service: Service, reservation: Reservation, arrived_s: float
) -> AsyncGenerator[tuple[Choice, Chunk], None]:
    """Decodes the choices of a request, and yields their rounds in order of arrival.

    Closing it early cancels those that are not finished. A slow reader holds no row: its unread rounds are queued.

    Args:
        reservation: a queue slot for each choice.
        arrived_s: time of the request's arrival, by `time.perf_counter`.

    Raises:
        Exception: decoding failed.
    """
    rounds: asyncio.Queue[tuple[Choice, Chunk] | Exception | None] = asyncio.Queue()

    async def decode(choice: Choice) -> None:
        counts, reason = AnswerMetrics(service.metrics, arrived_s, len(choice.prompt)), "abort"
        try:
            async with service.admission.row(reservation), aclosing(choice.chunks):
                async for chunk in choice.chunks:
                    counts.add(chunk)
                    if chunk.finish_reason is not None:
                        reason = REASONS[chunk.finish_reason]
                    rounds.put_nowait((choice, chunk))
            rounds.put_nowait(None)
        except Exception as error:
            reason = "error"
            rounds.put_nowait(_error_of(choice, error))
        finally:
            counts.end(reason)

    tasks = [asyncio.create_task(decode(choice)) for choice in choices]
    try:
        running = len(tasks)
        while running:
            item = await rounds.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _error_of(choice: Choice, error: Exception) -> Exception:
    """The engine's error, or a 400 if the answer's JSON schema allows no further token."""
    if choice.grammar is None or choice.grammar.dead_end is None or not isinstance(error, ValueError):
        return error
    name = "response_format" if choice.reader is None else "tools"
    return ApiError(400, f"{name}: {choice.grammar.dead_end}", param=name)
