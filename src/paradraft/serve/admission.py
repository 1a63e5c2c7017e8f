"""Admission control: running, queued, rejected (429)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from paradraft.serve.limits import Limits
from paradraft.serve.replies import ApiError


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
    def reserve(self, answers: int) -> Iterator[Reservation]:
        """Reserves a queue slot for each answer of a request.

        Raises:
            ApiError: the queue is full.
        """
        most = self._limits.max_batch + self._limits.max_queue
        if answers > most:
            raise ApiError(400, f"the request asks for {answers} answers, and at most {most} may wait: ask for fewer")
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
