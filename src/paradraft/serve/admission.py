"""Who is decoded, who waits, and who is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from paradraft.serve.limits import Limits
from paradraft.serve.replies import ApiError


@dataclass
class Reservation:
    """Places in the queue that a request has, one for each of its answers.

    Args:
        waiting: how many of its answers have not begun.
    """

    waiting: int


class Admission:
    """Lets requests in, answers into the batch, and nobody in any more when the server is to end.

    All of it happens in the thread of the event loop.

    Args:
        limits: how many, and for how long.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._rows = asyncio.Semaphore(limits.max_batch)
        self._timeouts: set[asyncio.Timeout] = set()
        self.running = 0
        """Answers that are decoded."""
        self.waiting = 0
        """Answers that wait."""
        self.is_closing = False

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way."""
        return not self._timeouts

    def close(self) -> None:
        """Lets nobody in any more; those who are in have some time to end."""
        self.is_closing = True
        end_s = asyncio.get_running_loop().time() + self._limits.drain_s
        for timeout in self._timeouts:
            if (planned_s := timeout.when()) is None or planned_s > end_s:
                timeout.reschedule(end_s)

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Surrounds all work for a request.

        Raises:
            ApiError: the server ends, or the request takes too long.
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
        """Places in the queue for the answers of a request.

        Raises:
            ApiError: there are not so many.
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
        """Surrounds the decoding of one answer; first it waits for its turn."""
        async with self._rows:
            reservation.waiting -= 1
            self.waiting -= 1
            self.running += 1
            try:
                yield
            finally:
                self.running -= 1


def ending() -> ApiError:
    """What is said of a server that ends."""
    headers = {"Retry-After": "1", "Connection": "close"}
    return ApiError(
        503, "the server is shutting down: ask another one, or later", code="shutting_down", headers=headers
    )
