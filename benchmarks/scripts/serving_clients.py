"""Clients of the soak of a server: they send requests, compare what comes back, and go without a word."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx2
from serving_requests import JSON, Good, Request, answer_of, difference

from paradraft.serve.limits import Limits

LIMITS = Limits(max_batch=8)
"""Those of the server."""


@dataclass
class Record:
    """What all clients have seen.

    Args:
        counts: requests by kind and by status; those that were told to come again are counted each time.
        compared: good answers.
        differences: of them from what they should be.
        unexpected: responses that should be others, and connections that broke.
        latencies_s: of good answers, from the request that was let in.
    """

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    compared: int = 0
    differences: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)


class Client:
    """Sends requests one after the other, and looks at what comes back.

    Args:
        http: of the server.
        good: requests that are answered.
        wrong: requests that are refused.
        seed: of its choices.
        record: what it has seen.
    """

    def __init__(
        self, http: httpx2.AsyncClient, good: Sequence[Good], wrong: Sequence[Request], seed: str, record: Record
    ) -> None:
        self._http, self._good, self._wrong = http, good, wrong
        self._chooser, self._record = random.Random(seed), record

    async def run(self, end_s: float) -> None:
        """Sends one request after the other until a time."""
        kinds = {self.ask_good: 50, self.ask_wrong: 25, self.leave: 20, self.ask_too_much: 5}
        while time.monotonic() < end_s:
            (ask,) = self._chooser.choices(list(kinds), list(kinds.values()))
            await ask()
            await asyncio.sleep(self._chooser.uniform(0.0, 0.05))

    async def burst(self, end_s: float, requests: int, every_s: float) -> None:
        """Sends more at once than the queue holds, again and again."""
        while time.monotonic() < end_s:
            await asyncio.gather(*(self.ask_good("burst") for _ in range(requests)))
            await asyncio.sleep(min(every_s, max(0.0, end_s - time.monotonic())))

    async def ask_good(self, kind: str = "good") -> None:
        """A request that is answered, to readers of which some are slow."""
        good = self._chooser.choice(self._good)
        body = self._body(good, streamed := self._chooser.random() < 0.5)
        pause_s = self._chooser.choice((0.0, 0.0, 0.0, 0.05)) if streamed else 0.0
        if (found := await self._exchange(kind, Request(content=body, status=200, path=good.path), pause_s)) is None:
            return
        self._record.compared += 1
        try:
            told = difference(good.wanted, answer_of(found, streamed))
        except (ValueError, LookupError, TypeError) as error:
            told = f"{type(error).__name__}: {error} in {found[-200:]!r}"
        if told is not None:
            self._record.differences.append(f"{body.decode()}: {told}")

    async def ask_wrong(self) -> None:
        """A request that is refused, and says which parameter is to blame."""
        wrong = self._chooser.choice(self._wrong)
        found = await self._exchange("wrong", wrong)
        if found is not None and (param := json.loads(found)["error"]["param"]) != wrong.param:
            self._record.unexpected.append(f"{wrong}: it names {param}")

    async def ask_too_much(self) -> None:
        """A body that is too long, with its length before it or without."""
        content = b'{"prompt": "' + b"a" * LIMITS.max_body_bytes + b'"}'
        await self._exchange("oversized", Request(content=content, status=413), in_pieces=self._chooser.random() < 0.5)

    async def leave(self) -> None:
        """A client that goes: in the middle of its body, before the first token, or in the middle of a stream."""
        how = self._chooser.choice(("in its body", "early", "in a stream"))
        good = self._chooser.choice(self._good)
        body = self._body(good, how == "in a stream" or self._chooser.random() < 0.5)
        try:
            if how == "in its body":
                await self._leave_body(body, good.path)
            elif how == "in a stream":
                await self._leave_stream(body, good.path)
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._chooser.uniform(0.0, 0.05)):
                        await self._exchange("cancelled too late", Request(content=body, status=200, path=good.path))
        except (httpx2.HTTPError, OSError) as error:
            self._record.unexpected.append(f"cancelled, {body!r}: {type(error).__name__}: {error}")
        self._record.counts["cancelled", how] += 1

    async def _leave_body(self, body: bytes, path: str) -> None:
        _, writer = await asyncio.open_connection(self._http.base_url.host, self._http.base_url.port)
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[: len(body) // 2])
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def _leave_stream(self, body: bytes, path: str) -> None:
        """Reads a few events at most."""
        most = self._chooser.randint(1, 4)
        async with self._http.stream("POST", path, content=body, headers=JSON) as response:
            if response.status_code not in (200, 429):
                self._record.unexpected.append(f"cancelled, {body!r}: {response.status_code}")
            async for _ in response.aiter_lines():
                if (most := most - 1) == 0:
                    return

    def _body(self, good: Good, streamed: bool) -> bytes:
        """A request, with something that changes no text."""
        more: dict[str, Any] = {"speculation": self._chooser.choice((None, None, "off", 0, 1, 2, 3, 4))}
        if streamed:
            more |= {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps(good.body | more).encode()

    async def _exchange(
        self, kind: str, asked: Request, pause_s: float = 0.0, *, in_pieces: bool = False
    ) -> bytes | None:
        """The body of a response; None if it is wrong. Waits and asks again if the server says so."""
        told = f"{kind}, {asked.method} {asked.path} {asked.content[:100]!r}"
        refused_s = time.monotonic()
        try:
            while True:
                begun_s = time.monotonic()
                status, again_s, found = await self._send(asked, pause_s, in_pieces)
                self._record.counts[kind, str(status)] += 1
                if status != 429 or time.monotonic() > refused_s + LIMITS.timeout_s:
                    break
                await asyncio.sleep(again_s * self._chooser.uniform(0.5, 1.5))
        except httpx2.HTTPError as error:
            self._record.counts[kind, type(error).__name__] += 1
            self._record.unexpected.append(f"{told}: {type(error).__name__}: {error}")
            return None
        if status != asked.status:
            self._record.unexpected.append(f"{told}: {status} in place of {asked.status}: {found[:300]!r}")
            return None
        if status == 200:
            self._record.latencies_s.append(time.monotonic() - begun_s)
        return found

    async def _send(self, asked: Request, pause_s: float, in_pieces: bool) -> tuple[int, float, bytes]:
        """Status, seconds after which to come again, and body of a response."""
        content = _pieces(asked.content) if in_pieces else asked.content
        async with self._http.stream(asked.method, asked.path, content=content, headers=asked.headers) as response:
            found = b""
            async for part in response.aiter_bytes():
                found += part
                await asyncio.sleep(pause_s)
        return response.status_code, float(response.headers.get("Retry-After", 1)), found


async def _pieces(content: bytes) -> AsyncIterator[bytes]:
    for begin in range(0, len(content), 2**16):
        yield content[begin : begin + 2**16]
