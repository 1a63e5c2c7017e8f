"""ASGI endpoint: reads a request, decodes its choices, and sends the response until the client disconnects."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import traceback
from collections.abc import Awaitable, Mapping
from contextlib import aclosing, suppress
from typing import Any

from llguidance import LLMatcher
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from paradraft.engine.engine import Chunk
from paradraft.errors import one_line
from paradraft.serve.admission import ending
from paradraft.serve.answers import Answers
from paradraft.serve.forms import AnswerProgress, Form, piece, usage, whole
from paradraft.serve.grammar import Grammars
from paradraft.serve.limits import Limits
from paradraft.serve.questions import Choice, choices_of, mistake
from paradraft.serve.replies import DONE, ApiError, JsonReply, event
from paradraft.serve.schemas import ApiRequest, read
from paradraft.serve.shown_tokens import ShownToken, shown_tokens

LOG = logging.getLogger("paradraft.serve")
LINGER_S, LINGER_TIMES = 2.0, 4
"""Limits on reading the rest of a refused request before closing: seconds, and multiples of the body limit."""
STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class ClientGoneError(Exception):
    """The client has disconnected."""


class Exchange:
    """One HTTP request and its response over ASGI; `most_bytes` limits the request's body."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, most_bytes: int) -> None:
        self.scope, self._receive, self._send, self._most_bytes = scope, receive, send, most_bytes
        self.arrived_s = time.perf_counter()
        self._is_read = False
        """Whether the whole request was received."""
        self.is_begun = False
        """Whether part of the response was sent."""

    async def body(self) -> bytes:
        """Reads the body.

        Raises:
            ApiError: it is too long, or not JSON.
            ClientGoneError: the client disconnects.
        """
        headers = dict(self.scope["headers"])
        if headers.get(b"content-type", b"").split(b";")[0].strip().lower() != b"application/json":
            # Browsers let a page of another site send other types without a CORS preflight.
            raise ApiError(415, "the body has another type than JSON: send Content-Type: application/json")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._most_bytes:
            raise self._too_long()
        parts, size = [], 0
        while not self._is_read:
            parts.append(await self._read())
            size += len(parts[-1])
            if size > self._most_bytes:
                # A variable for the error would keep it, and through its traceback the body, until a full collection.
                raise self._too_long()
        return b"".join(parts)

    def _too_long(self) -> ApiError:
        message = f"the body is longer than {self._most_bytes} bytes: send less"
        return ApiError(413, message, headers={"Connection": "close"})

    async def _read(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        self._is_read = not message.get("more_body", False)
        return message.get("body", b"")

    async def while_connected(self, work: Awaitable[None]) -> None:
        """Awaits some work; cancels it if the client disconnects.

        Raises:
            ClientGoneError: the client disconnected before the work was done.
        """
        task, gone = asyncio.ensure_future(work), asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGoneError
            await task
        finally:
            for each in (task, gone):
                each.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)
            # A task keeps its error, whose traceback refers to this frame: with the task in a variable, both and the
            # request would stay until a full collection.
            del task, gone, each

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def send(self, message: Message) -> None:
        """Sends an ASGI message of the response."""
        self.is_begun = True
        await self._send(message)

    async def reply(self, body: object) -> None:
        """Sends a JSON response."""
        await JsonReply(body)(self.scope, self._receive, self.send)

    async def event(self, data: bytes, *, is_last: bool = False) -> None:
        """Sends a server-sent event, after the headers if it is the first."""
        if not self.is_begun:
            await self.send({"type": "http.response.start", "status": 200, "headers": STREAM})
        await self.send({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def fail(self, error: ApiError) -> None:
        """Sends an error, as the response or as the last event of a stream."""
        if self.is_begun:
            await self.event(event(error.body), is_last=True)
        elif "Connection" in (error.headers or {}):
            await self._fail_and_close(error.reply)
        else:
            await error.reply(self.scope, self._receive, self.send)

    async def _fail_and_close(self, reply: Response) -> None:
        """Sends a response, then closes the connection.

        Reads on before closing: a client that is still sending at the close would get a network error instead of the
        response.
        """
        await self.send({"type": "http.response.start", "status": reply.status_code, "headers": reply.raw_headers})
        await self.send({"type": "http.response.body", "body": bytes(reply.body), "more_body": True})
        with suppress(ClientGoneError, TimeoutError):
            async with asyncio.timeout(LINGER_S):
                budget = LINGER_TIMES * self._most_bytes
                while budget > 0 and not self._is_read:
                    budget -= len(await self._read())
        await self.send({"type": "http.response.body", "body": b""})


class CompletionEndpoint:
    """ASGI application for completions or chat; `defaults` are sampling parameters that a request leaves out."""

    def __init__(
        self,
        form: Form,
        answers: Answers,
        grammars: Grammars,
        model: str,
        limits: Limits,
        defaults: Mapping[str, float],
    ) -> None:
        self._form, self._answers, self._grammars, self._model, self._limits = form, answers, grammars, model, limits
        self._defaults = defaults

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        exchange = Exchange(scope, receive, send, self._limits.max_body_bytes)
        try:
            async with self._answers.admission.request():
                body = await exchange.body()
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
        request = read(body, self._form.schema, self._defaults)
        if request.model not in (None, self._model):
            message = f"model: {one_line(request.model)} is not served here, which is {self._model!a}"
            raise ApiError(404, message, param="model", code="model_not_found")
        try:
            rows = self._form.prompts(request)
        except ValueError as error:
            raise mistake(error, request, self._form.prompts_name) from None
        with self._answers.admission.reserve(len(rows) * request.n) as reservation:
            matcher = await self._matcher(request)
            prompts, choices = await asyncio.to_thread(self._choices, request, rows, matcher)
            stream = self._answers.stream(choices, reservation, exchange.arrived_s)
            answers = [AnswerProgress() for _ in choices]
            created = int(time.time())
            envelope = {"id": self._form.id_prefix + secrets.token_hex(12), "created": created, "model": self._model}
            async with aclosing(stream):
                async for choice, chunk in stream:
                    answers[choice.index].add(chunk, self._shown(chunk, choice, request))
                    if request.stream:
                        data = piece(self._form, envelope, choice, chunk, answers[choice.index], request)
                        await exchange.event(event(data))
        used = usage(prompts, answers)
        if not request.stream:
            await exchange.reply(whole(self._form, envelope, choices, answers, used, request))
            return
        if request.stream_options is not None and request.stream_options.include_usage:
            last = {**envelope, "object": self._form.piece_name, "choices": [], "usage": used}
            await exchange.event(event(last))
        await exchange.event(DONE, is_last=True)

    def _shown(self, chunk: Chunk, choice: Choice, request: ApiRequest) -> list[ShownToken] | None:
        return shown_tokens(chunk, choice, self._answers.engine, by_id=request.return_tokens_as_token_ids)

    async def _matcher(self, request: ApiRequest) -> LLMatcher | None:
        """Compiled `response_format`; None for any text."""
        schema = None if request.response_format is None else request.response_format.schema_of_answers
        if schema is None:
            return None
        try:
            return await self._grammars.read(schema)
        except ValueError as error:
            raise ApiError(400, f"response_format: {error}", param="response_format") from None

    def _choices(
        self, request: ApiRequest, rows: list[Any], matcher: LLMatcher | None
    ) -> tuple[list[list[int]], list[Choice]]:
        """Tokenizes the prompts and builds the choices; runs in a thread, because long texts take time."""
        form, engine = self._form, self._answers.engine
        try:
            prompts = [form.tokens(row, request, engine) for row in rows]
        except ValueError as error:
            raise mistake(error, request, form.prompts_name) from None
        return prompts, choices_of(request, prompts, engine, self._limits, form.prompts_name, matcher)
