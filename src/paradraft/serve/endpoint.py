"""Answers one request: reads it, has it decoded, and sends what comes, until the end or until the client has gone."""

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
from paradraft.serve.forms import Answer, Form, piece, usage, whole
from paradraft.serve.grammar import Grammars
from paradraft.serve.limits import Limits
from paradraft.serve.questions import Choice, choices_of, mistake
from paradraft.serve.replies import DONE, ApiError, JsonReply, event
from paradraft.serve.schemas import Asked, read
from paradraft.serve.shown_tokens import ShownToken, shown_tokens

LOG = logging.getLogger("paradraft.serve")
LINGER_S, LINGER_TIMES = 2.0, 4
"""How much of a refused request is read before its connection is closed: seconds, and times what a body may have."""
STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class ClientGoneError(Exception):
    """Nobody waits for the answer."""


class Exchange:
    """One request and its response, as far as both have come.

    Args:
        scope: the request, as ASGI has it.
        receive: gives what comes.
        send: takes what is sent.
        most_bytes: of the request.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, most_bytes: int) -> None:
        self.scope, self._receive, self._send, self._most_bytes = scope, receive, send, most_bytes
        self.arrived_s = time.perf_counter()
        self._is_read = False
        """Whether all of the request has come."""
        self.is_begun = False
        """Whether something of the response is sent."""

    async def body(self) -> bytes:
        """The body of the request.

        Raises:
            ApiError: it is too long, or not JSON.
            ClientGoneError: it does not come.
        """
        headers = dict(self.scope["headers"])
        if headers.get(b"content-type", b"").split(b";")[0].strip().lower() != b"application/json":
            # What a page of another site may send without asking has another type.
            raise ApiError(415, "the body has another type than JSON: send Content-Type: application/json")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._most_bytes:
            raise self._too_long()
        parts, size = [], 0
        while not self._is_read:
            parts.append(await self._read())
            size += len(parts[-1])
            if size > self._most_bytes:
                # A variable for the error would keep it, and by its traceback what was read, until a full collection.
                raise self._too_long()
        return b"".join(parts)

    def _too_long(self) -> ApiError:
        message = f"the body is longer than {self._most_bytes} bytes: send less"
        return ApiError(413, message, headers={"Connection": "close"})

    async def _read(self) -> bytes:
        """The next part of the request.

        Raises:
            ClientGoneError: it does not come.
        """
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        self._is_read = not message.get("more_body", False)
        return message.get("body", b"")

    async def while_connected(self, work: Awaitable[None]) -> None:
        """Does some work; it is cancelled when the client goes.

        Raises:
            ClientGoneError: the client has gone before the work was done.
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
            # A task keeps its error, whose traceback has this frame: with the task in a variable, they and the request
            # would stay until a full collection.
            del task, gone, each

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def send(self, message: Message) -> None:
        """Sends a part of the response."""
        self.is_begun = True
        await self._send(message)

    async def reply(self, body: object) -> None:
        """Sends a response in JSON."""
        await JsonReply(body)(self.scope, self._receive, self.send)

    async def event(self, data: bytes, *, is_last: bool = False) -> None:
        """Sends a part of a stream, which begins with it if nothing is sent yet."""
        if not self.is_begun:
            await self.send({"type": "http.response.start", "status": 200, "headers": STREAM})
        await self.send({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def fail(self, error: ApiError) -> None:
        """Sends an error: as the response, or as the last event of a stream."""
        if self.is_begun:
            await self.event(event(error.body), is_last=True)
        elif "Connection" in (error.headers or {}):
            await self._fail_and_close(error.reply)
        else:
            await error.reply(self.scope, self._receive, self.send)

    async def _fail_and_close(self, reply: Response) -> None:
        """Sends a response after which the connection is closed. First it reads on: a client that is still sending when
        the connection is closed gets an error of the network, and not the response."""
        await self.send({"type": "http.response.start", "status": reply.status_code, "headers": reply.raw_headers})
        await self.send({"type": "http.response.body", "body": bytes(reply.body), "more_body": True})
        with suppress(ClientGoneError, TimeoutError):
            async with asyncio.timeout(LINGER_S):
                left = LINGER_TIMES * self._most_bytes
                while left > 0 and not self._is_read:
                    left -= len(await self._read())
        await self.send({"type": "http.response.body", "body": b""})


class Endpoint:
    """Answers requests of one form, as an ASGI application.

    Args:
        form: of the requests.
        answers: decodes.
        grammars: reads schemas of answers.
        model: the name under which it is served.
        limits: of each request.
        defaults: of parameters of sampling that a request does not give.
    """

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
        except asyncio.CancelledError:  # the server has been told twice to end
            await exchange.fail(ending())
        except ApiError as error:
            await exchange.fail(error)
        except Exception as error:
            # Not what the error says, which may have something of a prompt.
            frames = "".join(traceback.format_tb(error.__traceback__))
            LOG.error("%s while answering a request\n%s", type(error).__name__, frames)
            await exchange.fail(ApiError(500, "the answer has failed: the server's log says where", code="failed"))

    async def _answer(self, body: bytes, exchange: Exchange) -> None:
        asked = read(body, self._form.schema, self._defaults)
        if asked.model not in (None, self._model):
            message = f"model: {one_line(asked.model)} is not served here, which is {self._model!a}"
            raise ApiError(404, message, param="model", code="model_not_found")
        try:
            rows = self._form.prompts(asked)
        except ValueError as error:
            raise mistake(error, asked, self._form.prompts_name) from None
        with self._answers.admission.reserve(len(rows) * asked.n) as reservation:
            matcher = await self._matcher(asked)
            prompts, choices = await asyncio.to_thread(self._choices, asked, rows, matcher)
            stream = self._answers.stream(choices, reservation, exchange.arrived_s)
            answers = [Answer() for _ in choices]
            created = int(time.time())
            envelope = {"id": self._form.id_prefix + secrets.token_hex(12), "created": created, "model": self._model}
            async with aclosing(stream):
                async for choice, chunk in stream:
                    answers[choice.index].add(chunk, self._shown(chunk, choice, asked))
                    if asked.stream:
                        told = piece(self._form, envelope, choice, chunk, answers[choice.index], asked)
                        await exchange.event(event(told))
        used = usage(prompts, answers)
        if not asked.stream:
            await exchange.reply(whole(self._form, envelope, choices, answers, used, asked))
            return
        if asked.stream_options is not None and asked.stream_options.include_usage:
            last = {**envelope, "object": self._form.piece_name, "choices": [], "usage": used}
            await exchange.event(event(last))
        await exchange.event(DONE, is_last=True)

    def _shown(self, chunk: Chunk, choice: Choice, asked: Asked) -> list[ShownToken] | None:
        return shown_tokens(chunk, choice, self._answers.engine, by_id=asked.return_tokens_as_token_ids)

    async def _matcher(self, asked: Asked) -> LLMatcher | None:
        """What answers must be; None for any text."""
        schema = None if asked.response_format is None else asked.response_format.schema_of_answers
        if schema is None:
            return None
        try:
            return await self._grammars.read(schema)
        except ValueError as error:
            raise ApiError(400, f"response_format: {error}", param="response_format") from None

    def _choices(
        self, asked: Asked, rows: list[Any], matcher: LLMatcher | None
    ) -> tuple[list[list[int]], list[Choice]]:
        """Prompts as tokens, and what is asked of the engine; in a thread, for a long text takes its time."""
        form, engine = self._form, self._answers.engine
        try:
            prompts = [form.tokens(row, asked, engine) for row in rows]
        except ValueError as error:
            raise mistake(error, asked, form.prompts_name) from None
        return prompts, choices_of(asked, prompts, engine, self._limits, form.prompts_name, matcher)
