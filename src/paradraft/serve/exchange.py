"""One HTTP request and its response over ASGI: JSON replies, stream events, and errors in OpenAI's format."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

LINGER_S, LINGER_TIMES = 2.0, 4
"""Limits on reading the rest of a refused request before closing: seconds, and multiples of the body limit."""
STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
"""Error types by status; others are `invalid_request_error`."""


class ApiError(Exception):
    """Error response in OpenAI's format.

    Args:
        message: one line, for people.
        param: the wrong key of the request.
        code: for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    @property
    def body(self) -> dict[str, Any]:
        """JSON body of the response."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def reply(self) -> Response:
        """Response with this error."""
        return JsonReply(self.body, status_code=self.status, headers=self.headers)


class JsonReply(JSONResponse):
    """JSON response in ASCII."""

    def render(self, content: object) -> bytes:
        """JSON as bytes."""
        return to_json(content)


def to_json(content: object) -> bytes:
    """JSON in ASCII, so that lone surrogates, which a client may send and an error may repeat, can be encoded."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def event(content: object) -> bytes:
    """Server-sent event with JSON data."""
    return b"data: " + to_json(content) + b"\n\n"


class ClientGoneError(Exception):
    """The client has disconnected."""


class Exchange:
    """One HTTP request and its response over ASGI; `most_bytes` limits the request's body."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, most_bytes: int) -> None:
        self.scope, self._receive, self._send, self._most_bytes = scope, receive, send, most_bytes
        self.arrived_s = time.perf_counter()
        self.headers: Mapping[str, str] = {}
        """More headers of an answer that is no error."""
        self._is_read = False
        """Whether the whole request was received."""
        self.is_begun = False
        """Whether part of the response was sent."""

    async def body(self, count: Callable[[int], None]) -> bytes:
        """Reads the body; calls `count` with the size of each part.

        Raises:
            ApiError: it is too long, or not JSON, or `count` raised it.
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
            count(len(parts[-1]))
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
        await JsonReply(body, headers=self.headers)(self.scope, self._receive, self.send)

    async def event(self, data: bytes, *, is_last: bool = False) -> None:
        """Sends a server-sent event, after the headers if it is the first."""
        if not self.is_begun:
            more = [(name.lower().encode(), value.encode()) for name, value in self.headers.items()]
            await self.send({"type": "http.response.start", "status": 200, "headers": STREAM + more})
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
