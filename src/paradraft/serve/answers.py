"""Decodes the choices of a request beside those of others, and tells the pieces in the order in which they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from paradraft.engine.engine import Chunk, Engine
from paradraft.serve.admission import Admission, Reservation
from paradraft.serve.metrics import AnswerMetrics, Metrics
from paradraft.serve.questions import Choice
from paradraft.serve.replies import ApiError

REASONS = {"eos": "stop", "stop": "stop", "length": "length"}
"""OpenAI's names of the reasons for which answers end."""


class Answers:
    """Decodes choices.

    Args:
        engine: decodes all of them together.
        admission: says whose turn it is.
        metrics: counts.
    """

    def __init__(self, engine: Engine, admission: Admission, metrics: Metrics) -> None:
        self.engine, self.admission, self.metrics = engine, admission, metrics

    async def stream(
        self, choices: Sequence[Choice], reservation: Reservation, arrived_s: float
    ) -> AsyncGenerator[tuple[Choice, Chunk], None]:
        """The pieces of all choices. Whoever closes it ends those that are not finished.

        A reader that is slow holds no row: what it has not taken is kept.

        Args:
            choices: of one request.
            reservation: a place for each.
            arrived_s: when the request came.

        Raises:
            Exception: decoding has failed.
        """
        news: asyncio.Queue[tuple[Choice, Chunk] | Exception | None] = asyncio.Queue()
        tasks = [asyncio.create_task(self._tell(choice, reservation, arrived_s, news)) for choice in choices]
        try:
            left = len(tasks)
            while left:
                told = await news.get()
                if isinstance(told, Exception):
                    raise told
                if told is None:
                    left -= 1
                else:
                    yield told
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _tell(
        self,
        choice: Choice,
        reservation: Reservation,
        arrived_s: float,
        news: asyncio.Queue[tuple[Choice, Chunk] | Exception | None],
    ) -> None:
        counts, reason = AnswerMetrics(self.metrics, arrived_s, len(choice.tokens)), "abort"
        try:
            async with self.admission.row(reservation):
                chunks = self.engine.astream(
                    choice.tokens,
                    max_new_tokens=choice.max_new_tokens,
                    sampling=choice.sampling,
                    stop=choice.stop,
                    k=choice.k,
                    logprobs=choice.logprobs,
                )
                async with aclosing(chunks):
                    async for chunk in chunks:
                        counts.add(chunk)
                        if chunk.finish_reason is not None:
                            reason = REASONS[chunk.finish_reason]
                        news.put_nowait((choice, chunk))
            news.put_nowait(None)
        except Exception as error:
            reason = "error"
            news.put_nowait(_complaint(choice, error))
        finally:
            counts.end(reason)


def _complaint(choice: Choice, error: Exception) -> Exception:
    """What has failed: the engine, or the schema of an answer that came to where it knows no way on."""
    if choice.grammar is None or choice.grammar.dead_end is None or not isinstance(error, ValueError):
        return error
    return ApiError(400, f"response_format: {choice.grammar.dead_end}", param="response_format")
