"""Answers completion requests: validates one, decodes its choices, and sends the response."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import traceback
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
from paradraft.serve.choices import Choice, Service, choices_of, decoded, mistake
from paradraft.serve.exchange import DONE, ApiError, ClientGoneError, Exchange, event
from paradraft.serve.schemas import ApiRequest, read

LOG = logging.getLogger("paradraft.serve")


class Completion(Response):
    """Response to a completion request, which is decoded while it is sent."""

    def __init__(self, service: Service, schema: type[ApiRequest]) -> None:
        super().__init__()
        self._service, self._schema = service, schema

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

    async def _answer(self, body: bytes, exchange: Exchange) -> None:
        service = self._service
        request = read(body, self._schema, service.defaults)
        if request.model not in (None, service.model):
            message = f"model: {one_line(request.model)} is not served here, which is {service.model!a}"
            raise ApiError(404, message, param="model", code="model_not_found")
        try:
            prompts = request.prompts()
        except ValueError as error:
            raise mistake(error, request) from None
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
                        await exchange.event(event(piece(request, envelope, choice, chunk, logprobs)))
        used = usage(choices, request)
        if not request.stream:
            await exchange.reply(whole(request, envelope, choices, used))
            return
        if request.reports_usage:
            await exchange.event(event({**envelope, "object": request.piece_name, "choices": [], "usage": used}))
        await exchange.event(DONE, is_last=True)

    async def _matcher(self, request: ApiRequest) -> LLMatcher | None:
        """Compiled `response_format`; None for any text."""
        schema = None if request.response_format is None else request.response_format.schema_of_answers
        if schema is None:
            return None
        try:
            return await self._service.grammars.read(schema, is_compact=request.is_compact)
        except ValueError as error:
            raise ApiError(400, f"response_format: {error}", param="response_format") from None

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


def usage(choices: Sequence[Choice], request: ApiRequest) -> dict[str, int]:
    """Token counts; a prompt counts once, even with `n` answers."""
    prompt = sum(len(choice.prompt) for choice in choices[:: request.n])
    completion = sum(len(choice.tokens) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


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
        **request.piece(chunk.text, is_first=is_first),
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
    }
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
