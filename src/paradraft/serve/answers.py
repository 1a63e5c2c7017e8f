"""Decodes the choices of a request and merges their chunks into one stream, in order of arrival."""

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
"""OpenAI's finish reasons."""


class Answers:
    """Decodes choices with an engine, under admission control."""

    def __init__(self, engine: Engine, admission: Admission, metrics: Metrics) -> None:
        self.engine, self.admission, self.metrics = engine, admission, metrics

    async def stream(
        self, choices: Sequence[Choice], reservation: Reservation, arrived_s: float
    ) -> AsyncGenerator[tuple[Choice, Chunk], None]:
        """Streams the chunks of all choices of a request. Closing early cancels those that are not finished.

        A slow reader holds no row: its unread chunks are queued.

        Args:
            choices: of one request.
            reservation: a queue slot for each choice.
            arrived_s: time of the request's arrival, by `time.perf_counter`.

        Raises:
            Exception: decoding failed.
        """
        chunks: asyncio.Queue[tuple[Choice, Chunk] | Exception | None] = asyncio.Queue()
        tasks = [asyncio.create_task(self._decode(choice, reservation, arrived_s, chunks)) for choice in choices]
        try:
            running = len(tasks)
            while running:
                item = await chunks.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _decode(
        self,
        choice: Choice,
        reservation: Reservation,
        arrived_s: float,
        output: asyncio.Queue[tuple[Choice, Chunk] | Exception | None],
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
                        output.put_nowait((choice, chunk))
            output.put_nowait(None)
        except Exception as error:
            reason = "error"
            output.put_nowait(_error_of(choice, error))
        finally:
            counts.end(reason)


def _error_of(choice: Choice, error: Exception) -> Exception:
    """The engine's error, or a 400 if the answer's JSON schema allows no further token."""
    if choice.grammar is None or choice.grammar.dead_end is None or not isinstance(error, ValueError):
        return error
    return ApiError(400, f"response_format: {choice.grammar.dead_end}", param="response_format")
