"""Answers to requests: decoded by the scheduler, with texts assembled from tokens, whole or streamed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from paradraft.core import Request
from paradraft.decode.generation import AnswerText, Generation, StopStrings, stop_strings
from paradraft.decode.logprobs import TokenLogprobs
from paradraft.decode.stats import Stats, added
from paradraft.engine.scheduler import Scheduler
from paradraft.text.tokenization import Detokenizer

Stop = str | Sequence[str] | None


@dataclass(frozen=True, kw_only=True)
class Result:
    """The answer to one prompt.

    Args:
        text: the text of the new tokens as it follows the prompt's, including the space between the two. It has no
            special tokens, ends before the stop string, and leaves out a character that the limit cut.
        tokens: new token ids; the last is the EOS token if finish_reason is "eos".
        finish_reason: "eos", "stop" (a stop string) or "length".
        stats: counts of this answer; the times are those of its batch.
        accepted: accepted draft tokens of each round; one of the target's own follows unless the answer ends first.
        delivered_s: seconds from the request to the tokens of each round. The first is the time to first token (TTFT),
            the differences are the inter-token latencies (ITL).
    """

    text: str
    tokens: list[int]
    finish_reason: str
    stats: Stats
    accepted: tuple[int, ...]
    delivered_s: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """The new tokens of one round of a streamed answer.

    Args:
        drafted_text: text of the accepted draft tokens.
        own_text: text of the target's own token.
        tokens: ids of the accepted tokens, then of the target's own.
        accepted: number of accepted draft tokens.
        drafted: number of tokens drafted in the round, side branches included.
        finish_reason: as in a `Result`, in the last chunk; None before.
        logprobs: the target's log probabilities of the tokens, if requested.
    """

    drafted_text: str
    own_text: str
    tokens: list[int]
    accepted: int
    drafted: int = 0
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def text(self) -> str:
        """Text of the round; the texts of all rounds joined are the answer."""
        return self.drafted_text + self.own_text


def _chunks_of(generation: Generation, first: int, last: int) -> Iterator[Chunk]:
    begin = generation.round_ends[first - 1] if first else 0
    reason = None if generation.error is not None else generation.finish_reason
    rounds = len(generation.round_ends)  # read after the reason, which is set after the last round
    for index in range(first, last):
        accepted, end = generation.accepted[index], generation.round_ends[index]
        pieces = generation.pieces[begin:end]
        yield Chunk(
            drafted_text="".join(pieces[:accepted]),
            own_text="".join(pieces[accepted:]),
            tokens=generation.tokens[begin:end],
            accepted=accepted,
            drafted=generation.drafted[index],
            finish_reason=reason if index == rounds - 1 else None,
            logprobs=tuple(generation.logprobs[begin:end]),
        )
        begin = end


class Answers:
    """Decodes checked requests by a scheduler, and assembles their texts.

    `stop` are strings that end an answer, see `Engine.generate`; wrong ones raise ValueError at the call.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: PreTrainedTokenizerBase) -> None:
        self._scheduler = scheduler
        self._detokenizer = Detokenizer(tokenizer)
        self._ids = itertools.count()

    def stop_strings(self, stop: Stop) -> StopStrings:
        """Checks stop strings; raises ValueError."""
        return stop_strings(stop, self._detokenizer.special)

    def generation(self, request: Request, strings: StopStrings | None) -> Generation:
        """The generation of a request; without `strings` its text is assembled only at the end."""
        text = None if strings is None else self._text(request, strings)
        return Generation(replace(request, id=next(self._ids)), text)

    def whole(self, requests: Sequence[Request], stop: Stop, *, most: int) -> list[Result]:
        """Answers requests, at most `most` together."""
        strings = self.stop_strings(stop)
        generations = [self.generation(request, strings if strings.patterns else None) for request in requests]
        results: dict[int, Result] = {}
        with closing(self._scheduler.answer(generations, most=most)) as finished:
            for generation in finished:
                results[generation.request.id] = self._result(generation, strings)
        return [results[generation.request.id] for generation in generations]

    async def awhole(self, request: Request, stop: Stop) -> Result:
        """Answers a request in an event loop."""
        strings = self.stop_strings(stop)
        generation = self.generation(request, strings)
        async for _ in self._awatched(generation):
            pass
        return self._result(generation, strings)

    def streamed(self, request: Request, stop: Stop) -> Generator[Chunk, None, None]:
        """Answers a request as a stream."""
        return self._watched(self.generation(request, self.stop_strings(stop)))

    def astreamed(self, request: Request, stop: Stop) -> AsyncGenerator[Chunk, None]:
        """Answers a request as a stream in an event loop."""
        return self._awatched(self.generation(request, self.stop_strings(stop)))

    def _watched(self, generation: Generation) -> Generator[Chunk, None, None]:
        rounds = 0
        with closing(self._scheduler.stream(generation)) as news:
            for _ in news:
                available = generation.told_rounds
                yield from _chunks_of(generation, rounds, available)
                rounds = available

    async def _awatched(self, generation: Generation) -> AsyncGenerator[Chunk, None]:
        rounds, has_news = 0, asyncio.Event()
        try:
            self._scheduler.watch(generation, asyncio.get_running_loop(), has_news.set)
            is_over = False
            while not is_over:
                await has_news.wait()
                has_news.clear()
                # In this order: an error is set after the rounds before it, and before the end flag.
                is_over, error, available = generation.is_told, generation.error, generation.told_rounds
                for chunk in _chunks_of(generation, rounds, available):
                    yield chunk
                rounds = available
                if error is not None:
                    raise error
        finally:
            generation.is_cancelled = True

    def _text(self, request: Request, strings: StopStrings) -> AnswerText:
        return AnswerText(self._detokenizer.after(request.tokens), strings)

    def _result(self, generation: Generation, strings: StopStrings) -> Result:
        pieces = generation.pieces
        if not strings.patterns:
            text = self._text(generation.request, strings)
            pieces = [*map(text.add, generation.tokens), text.end()]
        assert generation.finish_reason is not None
        return Result(
            text="".join(pieces),
            tokens=generation.tokens,
            finish_reason=generation.finish_reason,
            stats=added(generation.stats),
            accepted=tuple(generation.accepted),
            delivered_s=tuple(generation.delivered_s),
        )
