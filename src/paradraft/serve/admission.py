"""Admission control (running, queued, rejected with 429), and the server that drains it before it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from paradraft.serve.connection import BACKLOG, Connection, Connections, most_connections
from paradraft.serve.exchange import ApiError
from paradraft.serve.limits import Limits

LAST_S = 2
"""Seconds after the drain time for sending the last errors to clients."""


@dataclass
class Reservation:
    """Queue slots of a request; `waiting` counts its answers that are not running yet."""

    waiting: int


class Admission:
    """Admits requests to the queue and answers to the batch; rejects all once the server shuts down.

    Runs in the event loop's thread only.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._rows = asyncio.Semaphore(limits.max_batch)
        self._timeouts: set[asyncio.Timeout] = set()
        self.running = 0
        """Answers being decoded."""
        self.waiting = 0
        """Answers in the queue."""
        self.is_closing = False
        self.connections = Connections(most=most_connections())
        self._most_bytes = (limits.max_batch + limits.max_queue) * limits.max_body_bytes
        self._bytes = 0

    @property
    def is_idle(self) -> bool:
        """Whether no request is running or queued."""
        return not self._timeouts

    def close(self) -> None:
        """Rejects new requests; running ones have `drain_s` to end."""
        self.is_closing = True
        end_s = asyncio.get_running_loop().time() + self._limits.drain_s
        for timeout in self._timeouts:
            if (planned_s := timeout.when()) is None or planned_s > end_s:
                timeout.reschedule(end_s)

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Context manager around all work for a request.

        Raises:
            ApiError: the server shuts down, or the request times out.
        """
        if self.is_closing:
            raise ending()
        try:
            async with asyncio.timeout(self._limits.timeout_s) as timeout:
                self._timeouts.add(timeout)
                try:
                    yield
                finally:
                    self._timeouts.discard(timeout)
        except TimeoutError:
            if not timeout.expired():
                raise
            if self.is_closing:
                raise ending() from None
            limit_s = self._limits.timeout_s
            raise ApiError(408, f"the request took longer than {limit_s:g} s: ask for less", code="timeout") from None

    @contextmanager
    def bodies(self) -> Iterator[Callable[[int], None]]:
        """Context manager around a request whose body is in memory; yields a function that counts received bytes.

        All bodies together may be as large as those of all requests that may be admitted; the function raises ApiError
        for more.
        """
        size = 0

        def count(more: int) -> None:
            nonlocal size
            size += more
            self._bytes += more
            if self._bytes > self._most_bytes:
                message = f"{self._bytes} bytes of requests are being received: try again later"
                raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1", "Connection": "close"})

        try:
            yield count
        finally:
            self._bytes -= size

    def check(self, answers: int) -> int:
        """Most answers that may be decoded or wait; raises ApiError if a request asks for more."""
        most = self._limits.max_batch + self._limits.max_queue
        if answers > most:
            raise ApiError(400, f"the request asks for {answers} answers, and at most {most} may wait: ask for fewer")
        return most

    @contextmanager
    def reserve(self, answers: int) -> Iterator[Reservation]:
        """Reserves a queue slot for each answer of a request.

        Raises:
            ApiError: the queue is full.
        """
        most = self.check(answers)
        if self.running + self.waiting + answers > most:
            message = f"{self.running} answers are decoded and {self.waiting} wait: try again later"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})
        reservation = Reservation(answers)
        self.waiting += answers
        try:
            yield reservation
        finally:
            self.waiting -= reservation.waiting
            reservation.waiting = 0

    @asynccontextmanager
    async def row(self, reservation: Reservation) -> AsyncIterator[None]:
        """Context manager around decoding one answer; waits for a free row first."""
        async with self._rows:
            reservation.waiting -= 1
            self.waiting -= 1
            self.running += 1
            try:
                yield
            finally:
                self.running -= 1


def ending() -> ApiError:
    """Error of a server that shuts down."""
    headers = {"Retry-After": "1", "Connection": "close"}
    return ApiError(
        503, "the server is shutting down: ask another one, or later", code="shutting_down", headers=headers
    )


class Server(uvicorn.Server):
    """Server whose first signal drains running requests and rejects new ones; a second signal ends it at once."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                http=partial(Connection, admission.connections),  # type: ignore[arg-type]  # which it only calls
                backlog=BACKLOG,
                server_header=False,
                timeout_graceful_shutdown=LAST_S,
            )
        )
        self._admission = admission
        self._is_ending = False

    def end(self) -> None:
        """Starts the shutdown; thread-safe."""
        self._is_ending = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles SIGINT and SIGTERM."""
        if self._is_ending:
            self.force_exit = self.should_exit = True
        self.end()

    async def on_tick(self, counter: int) -> bool:
        """Runs ten times a second: drains, then exits when idle."""
        if self._is_ending and not self._admission.is_closing:
            self._admission.close()
        if self._admission.is_closing and self._admission.is_idle:
            self.should_exit = True
        return await super().on_tick(counter)
