"""Answers completion requests: validates one, decodes its choices, and sends the response."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
import traceback
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from functools import cache
from typing import Any

from llguidance import LLMatcher
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paradraft.engine.answers import Chunk
from paradraft.errors import one_line
from paradraft.serve.admission import ending
from paradraft.serve.chat import ChatCompletionRequest
from paradraft.serve.choices import Choice, Service, choices_of, decoded, mistake, prompt_of
from paradraft.serve.completions import CompletionRequest
from paradraft.serve.exchange import DONE, ApiError, ClientGoneError, Exchange, event
from paradraft.serve.schemas import ApiRequest, read

LOG = logging.getLogger("paradraft.serve")


class EngineReply(Response):
    """Response to a JSON request that needs the engine."""

    def __init__(self, service: Service) -> None:
        super().__init__()
        self._service = service

    @abstractmethod
    async def _answer(self, body: bytes, exchange: Exchange) -> None:
        """Sends the answer; raises ApiError."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers the request, until the client disconnects."""
        exchange = Exchange(scope, receive, send, self._service.limits.max_body_bytes)
        try:
            async with self._service.admission.request():
                with self._service.admission.bodies() as count:
                    body = await exchange.body(count)
                    await exchange.while_connected(self._answer(body, exchange))
        except ClientGoneError:
            return
        except asyncio.CancelledError:  # a second signal forces the shutdown
            await exchange.fail(ending())
        except ApiError as error:
            await exchange.fail(error)
        except Exception as error:
            # Without the error's message, which may contain parts of a prompt.
            frames = "".join(traceback.format_tb(error.__traceback__))
            LOG.error("%s while answering a request\n%s", type(error).__name__, frames)
            await exchange.fail(ApiError(500, "the answer has failed: the server's log says where", code="failed"))


class TokenizeReply(EngineReply):
    """Response with the token ids of a prompt: a request of either kind of completions, as vLLM's `/tokenize` has."""

    async def _answer(self, body: bytes, exchange: Exchange) -> None:
        service = self._service
        schema = ChatCompletionRequest if is_conversation(body) else CompletionRequest
        request, prompts = checked(body, schema, service)
        exchange.headers = request.headers
        if len(prompts) > 1:
            raise ApiError(400, f"{request.prompts_name}: {len(prompts)} prompts, send one", param=request.prompts_name)
        service.admission.check(request.n)
        tokens = await asyncio.to_thread(prompt_of, request, prompts[0], service)
        most = service.engine.target.capacity
        await exchange.reply({"tokens": tokens, "count": len(tokens), "max_model_len": most})


class Completion(EngineReply):
    """Response to a completion request, which is decoded while it is sent."""

    def __init__(self, service: Service, schema: type[ApiRequest]) -> None:
        super().__init__(service)
        self._schema = schema

    async def _answer(self, body: bytes, exchange: Exchange) -> None:
        service = self._service
        request, prompts = checked(body, self._schema, service)
        exchange.headers = request.headers
        with service.admission.reserve(len(prompts) * request.n) as reservation:
            matcher = await self._matcher(request)
            # In a thread, because long texts take time.
            choices = await asyncio.to_thread(choices_of, request, prompts, service, matcher)
            created = int(time.time())
            envelope = {"id": request.id_prefix + secrets.token_hex(12), "created": created, "model": service.model}
            async with aclosing(decoded(choices, service, reservation, exchange.arrived_s)) as stream:
                async for choice, chunk in stream:
                    logprobs = self._logprobs(chunk, choice, request)
                    choice.add(chunk, logprobs)
                    if request.stream:
                        data = piece(request, envelope, choice, chunk, logprobs)
                        if all(each.finish_reason for each in choices):
                            data["timings"] = timings(choices, request, exchange.arrived_s)
                        await exchange.event(event(data))
        used = usage(choices, request)
        if not request.stream:
            written = whole(request, envelope, choices, used)
            await exchange.reply({**written, "timings": timings(choices, request, exchange.arrived_s)})
            return
        if request.reports_usage:
            await exchange.event(event({**envelope, "object": request.piece_name, "choices": [], "usage": used}))
        await exchange.event(DONE, is_last=True)

    async def _matcher(self, request: ApiRequest) -> LLMatcher | None:
        """The compiled constraint on answers; None for any text."""
        if (constraint := request.constraint(self._service.engine.target.tokenizer)) is None:
            return None
        try:
            return await self._service.grammars.read(constraint, is_compact=request.is_compact)
        except ValueError as error:
            name = "tools" if request.function_names else "response_format"
            raise ApiError(400, f"{name}: {error}", param=name) from None

    def _logprobs(self, chunk: Chunk, choice: Choice, request: ApiRequest) -> dict[str, Any] | None:
        """Log probabilities of a round that is no part of `choice` yet; None if they are not requested."""
        if request.most_logprobs is None:
            return None
        decode = self._service.engine.target.tokenizer.decode

        @cache
        def shown(token: int) -> tuple[str, str]:
            # Different tokens may have the same text, so that a request may ask for ids.
            text = str(decode([token]))
            return f"token_id:{token}" if request.return_tokens_as_token_ids else text, text

        logprobs = request.logprobs_json(chunk.logprobs, shown, choice.characters)
        choice.characters += sum(len(shown(each.token)[1]) for each in chunk.logprobs)
        return logprobs


def not_served(model: str, service: Service) -> ApiError:
    """Error of a request for another model."""
    message = f"model: {one_line(model)} is not served here, which is {service.model!a}"
    return ApiError(404, message, param="model", code="model_not_found")


def is_conversation(body: bytes) -> bool:
    """Whether a request has messages."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):  # which `checked` reports
        return False
    return isinstance(value, dict) and "messages" in value


def checked(body: bytes, schema: type[ApiRequest], service: Service) -> tuple[ApiRequest, list[Any]]:
    """A request and its prompts; raises ApiError if it is wrong, or for another model."""
    request = read(body, schema, service.defaults)
    if request.model is not None and request.model not in service.names:
        raise not_served(request.model, service)
    try:
        return request, request.prompts()
    except ValueError as error:
        raise mistake(error, request) from None


def usage(choices: Sequence[Choice], request: ApiRequest) -> dict[str, int]:
    """Token counts; a prompt counts once, even with `n` answers."""
    prompt = sum(len(choice.prompt) for choice in choices[:: request.n])
    completion = sum(len(choice.tokens) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def timings(choices: Sequence[Choice], request: ApiRequest, arrived_s: float) -> dict[str, Any]:
    """Speed and acceptance of a request whose choices have ended, under llama.cpp's names.

    The tokens of the first round come with the prompt's time, so the rate is that of all others; None without any.
    """
    first_s, last_s = min(choice.first_s for choice in choices), max(choice.last_s for choice in choices)
    tokens = sum(len(choice.tokens) for choice in choices)
    later = tokens - sum(choice.tokens_of_first for choice in choices)
    return {
        "prompt_n": usage(choices, request)["prompt_tokens"],
        "prompt_ms": 1e3 * (first_s - arrived_s),
        "predicted_n": tokens,
        "predicted_ms": 1e3 * (last_s - first_s),
        "predicted_per_second": later / (last_s - first_s) if later and last_s > first_s else None,
        "draft_n": sum(choice.drafted for choice in choices),
        "draft_n_accepted": sum(choice.accepted for choice in choices),
    }


def whole(
    request: ApiRequest, envelope: Mapping[str, Any], choices: Sequence[Choice], used: Mapping[str, int]
) -> dict[str, Any]:
    """Body of a response without streaming."""
    written = [
        {
            "index": choice.index,
            **request.whole("".join(choice.texts)),
            "logprobs": choice.logprobs,
            "finish_reason": choice.finish_reason,
        }
        for choice in choices
    ]
    for choice, each in zip(choices, written, strict=True):
        if choice.calls:
            each["message"] |= {"content": each["message"]["content"] or None, "tool_calls": choice.calls}
    body = {**envelope, "object": request.whole_name, "choices": written, "usage": used}
    if request.return_token_ids:
        for choice, each in zip(choices, written, strict=True):
            _add_ids(request, body, each, choice.tokens, choice.prompt)
    return body


def piece(
    request: ApiRequest, envelope: Mapping[str, Any], choice: Choice, chunk: Chunk, logprobs: dict[str, Any] | None
) -> dict[str, Any]:
    """Stream event for a round that `choice` already contains."""
    is_first = len(choice.texts) == 1
    written = {
        "index": choice.index,
        **request.piece(choice.texts[-1], is_first=is_first),
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
    }
    if choice.new_calls:
        first = len(choice.calls) - len(choice.new_calls)
        written["delta"]["tool_calls"] = [
            {"index": at, **call} for at, call in enumerate(choice.new_calls, start=first)
        ]
    data = {**envelope, "object": request.piece_name, "choices": [written]}
    if request.return_token_ids:
        _add_ids(request, data, written, chunk.tokens, choice.prompt if is_first else None)
    if request.reports_usage:
        data["usage"] = None
    if request.paradraft:
        data["paradraft"] = {
            "drafted_text": chunk.drafted_text,
            "own_text": chunk.own_text,
            "accepted": chunk.accepted,
            "drafted": chunk.drafted,
            "tokens": len(chunk.tokens),
        }
    return data


def _add_ids(
    request: ApiRequest, body: dict[str, Any], choice: dict[str, Any], tokens: list[int], prompt: list[int] | None
) -> None:
    """Adds token ids to a body under vLLM's keys."""
    choice["token_ids"] = tokens
    if prompt is not None:
        (body if request.has_one_prompt else choice)["prompt_token_ids"] = prompt
