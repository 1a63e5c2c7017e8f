"""Requests of any number of threads in one batch: whoever waits for tokens runs the next round for all."""

from __future__ import annotations

import asyncio
import sys
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

from paradraft.core import RequestError
from paradraft.decode.batch import Batch
from paradraft.decode.generation import Generation
from paradraft.models.forward import NotFiniteError


@dataclass(kw_only=True)
class _Watched:
    """A request that is decoded for somebody who does not wait in a thread.

    Args:
        generation: the request.
        loop: in which they wait.
        wake: lets them know.
        told_rounds: of how many rounds they know.
        is_over: whether they know that the answer has ended.
    """

    generation: Generation
    loop: asyncio.AbstractEventLoop
    wake: Callable[[], None]
    told_rounds: int = 0
    is_over: bool = False

    @property
    def has_news(self) -> bool:
        """Whether there is something that they do not know."""
        generation = self.generation
        return generation.is_told or generation.is_cancelled or generation.told_rounds > self.told_rounds


def _call_all(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()


class _Worker:
    """A thread that runs one function after the other, until nothing refers to the worker any more.

    It is one and the same thread, because the allocator gives each the memory of one that has ended or, if that is not
    quite over, of another: decoding in turns in both would hold twice as much.
    """

    def __init__(self) -> None:
        self._work = SimpleQueue[Callable[[], None] | None]()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._work.put, None).atexit = False

    def run(self, function: Callable[[], None]) -> None:
        """Runs a function after those before it."""
        if self._thread is None:
            self._thread = threading.Thread(target=_run_all, args=(self._work,), name="decoding", daemon=True)
            self._thread.start()
        self._work.put(function)


def _run_all(work: SimpleQueue[Callable[[], None] | None]) -> None:
    while (function := work.get()) is not None:
        function()
        del function  # it refers to what should be able to go while the thread waits


def _have_news(all_watched: Sequence[_Watched]) -> bool:
    return any(watched.has_news for watched in all_watched)


class Scheduler:
    """Decodes the requests of several threads together.

    A thread that waits for tokens runs rounds, in which all requests take part; the others wait for it to tell them of
    theirs. So a stream whose reader is slow goes on while others decode, and what it gets is kept for its reader. While
    somebody watches an answer grow, long prompts of others are read in pieces between the rounds. A
    round that fails costs the request that is to blame its answer; the others are read again and go on.

    Args:
        batch: nothing else may use it, or its target while it has rows.
        in_round: what surrounds rounds.
    """

    def __init__(self, batch: Batch, in_round: Callable[[], AbstractContextManager[None]]) -> None:
        self._batch = batch
        self._in_round = in_round
        self._changed = threading.Condition()
        self._waiting = deque[Generation]()
        self._runner: int | None = None
        self._watching = threading.Lock()
        self._watched: list[_Watched] = []
        self._worker = _Worker()
        self._is_watching = False

    def stream(self, generation: Generation) -> Generator[None, None, None]:
        """Decodes one request; yields each time it has new tokens, the last time when it has ended.

        A generator that is closed before cancels the request.

        Raises:
            ValueError: the answer failed, or this thread is in the middle of a round already.
        """
        seen, is_over = 0, False
        generation.is_watched = True

        def has_news() -> bool:
            return generation.is_told or generation.told_rounds > seen

        try:
            self._waiting.append(generation)
            while not is_over:
                self._wait_until(has_news)
                if generation.error is not None:
                    raise generation.error
                # What comes while the reader pauses is news too, the end as well.
                is_over, seen = generation.is_told, generation.told_rounds
                yield
        finally:
            generation.is_cancelled = True

    def answer(self, generations: Sequence[Generation], *, most: int) -> Generator[Generation, None, None]:
        """Decodes requests, and yields each as soon as it has ended; the next one then takes its row.

        A generator that is closed before cancels the others.

        Args:
            generations: with no token yet.
            most: how many of them are decoded together.

        Raises:
            ValueError: an answer failed, or this thread is in the middle of a round already.
        """
        ahead = deque(generations)
        active: list[Generation] = []
        try:
            while ahead or active:
                while ahead and len(active) < most:
                    active.append(ahead.popleft())
                    self._waiting.append(active[-1])
                self._wait_until(lambda: any(generation.is_told for generation in active))
                for generation in [generation for generation in active if generation.is_told]:
                    if generation.error is not None:
                        raise generation.error
                    active.remove(generation)
                    yield generation
        finally:
            for generation in active:
                generation.is_cancelled = True

    def watch(self, generation: Generation, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        """Decodes one request in a thread of the scheduler's own, which all such requests share.

        Args:
            generation: with no token yet; it leaves when `is_cancelled` is set.
            loop: in whose thread somebody waits.
            wake: is called there each time there are new tokens, and when the answer has ended or failed.
        """
        generation.is_watched = True
        with self._watching:
            self._watched.append(_Watched(generation=generation, loop=loop, wake=wake))
            self._waiting.append(generation)
            if not self._is_watching:
                self._is_watching = True
                self._worker.run(self._watch)

    def _watch(self) -> None:
        """Runs rounds until nobody waits for any; then the thread has nothing of an engine, which can be let go of."""
        goes_on = False
        while True:
            with self._watching:
                self._watched = [watched for watched in self._watched if not watched.is_over]
                if not self._watched:
                    self._is_watching = False
                    return
                all_watched = list(self._watched)
            try:
                goes_on = self._wait_until(partial(_have_news, all_watched), goes_on=goes_on)
            except BaseException as error:  # all who wait here would wait for ever
                if not isinstance(error, Exception):
                    error = RuntimeError(f"{type(error).__name__} while decoding: {error}")
                for watched in all_watched:
                    watched.generation.fail(error)
                    watched.generation.is_told = True
            # Once for a loop: each call wakes its thread, which then competes with this one.
            wakes: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = defaultdict(list)
            for watched in all_watched:
                if watched.has_news:
                    watched.is_over = watched.generation.is_told or watched.generation.is_cancelled
                    watched.told_rounds = watched.generation.told_rounds
                    wakes[watched.loop].append(watched.wake)
            for loop, of_loop in wakes.items():
                with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                    loop.call_soon_threadsafe(_call_all, of_loop)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """The target and the drafter for somebody else's batch; requests that are under way go on afterwards."""
        with self._changed:
            while self._runner is not None:
                self._wait()
            self._runner = threading.get_ident()
        try:
            with self._in_round():
                self._start_over()
                yield
        finally:
            self._rest()

    def _wait_until(self, is_ready: Callable[[], bool], *, goes_on: bool = False) -> bool:
        """Runs rounds, or waits while another thread runs them; returns whether this one did.

        Args:
            is_ready: whether there is nothing more to wait for.
            goes_on: whether this thread ran the last round, and all it has done since is part of what rounds take.
        """
        with self._changed:
            while self._runner is not None and not is_ready():
                goes_on = False
                self._wait()
            if is_ready():
                return False
            self._runner = threading.get_ident()
        try:
            with self._in_round():
                while not is_ready():
                    if goes_on:
                        self._batch.clock.lap("other")
                    self._run_round()
                    goes_on = True
        finally:
            self._rest()
        return True

    def _wait(self) -> None:
        if self._runner == threading.get_ident():
            raise ValueError("this engine is in the middle of another answer of the same thread: load a second engine")
        self._changed.wait()

    def _rest(self) -> None:
        with self._changed:
            self._runner = None
            self._changed.notify_all()

    def _run_round(self) -> None:
        batch = self._batch
        if batch.generations and not batch.is_current:
            self._start_over()
        joining: list[Generation] = []
        rows = batch.members
        try:
            batch.leave([generation for generation in batch.members if generation.is_cancelled])
            most = self._most_to_read()
            if batch.reading is not None:
                most -= batch.read(most)
            if batch.reading is None and (joining := self._next_to_join(most)):
                rows = rows + joining
                batch.leave([generation for generation in batch.generations if generation.is_finished])
                self._let_in(joining, most)
            if batch.members:  # who waits may have gone just now
                batch.step()
        except BaseException as error:
            outside = [generation for generation in joining if generation not in batch.members]
            to_blame, cause = self._to_blame(error, outside)
            for generation in to_blame:
                generation.fail(cause)
            self._waiting.extendleft(reversed(outside))
            self._start_over()
            if not to_blame:
                raise
        finally:
            self._tell(rows)

    def _most_to_read(self) -> int:
        """How many tokens of prompts may be read before the next round: where somebody watches answers grow, as many as
        take about as long as a round."""
        is_watched = any(generation.is_watched for generation in self._batch.generations)
        return self._batch.pace.most if is_watched else sys.maxsize

    def _next_to_join(self, most: int) -> list[Generation]:
        """Takes the first requests that wait, whose prompts have at most so many unread tokens together, or the first
        one alone."""
        joining: list[Generation] = []
        while self._waiting:
            generation = self._waiting.popleft()
            if generation.is_cancelled or generation.is_finished:
                continue
            most -= self._batch.unread(generation.so_far)
            if joining and most < 0:
                self._waiting.appendleft(generation)
                break
            joining.append(generation)
        return joining

    def _let_in(self, joining: list[Generation], most: int) -> None:
        """Adds requests to the batch, and reads their prompts; of a longer one so many tokens."""
        batch = self._batch
        if batch.generations and batch.unread(joining[0].so_far) > most:
            batch.begin(joining[0])
            batch.read(most)
        else:
            batch.join(joining)

    def _tell(self, rows: list[Generation]) -> None:
        """Lets the readers of requests know of the rounds that are over."""
        with self._changed:
            for generation in rows:
                if generation.is_finished and not generation.is_told:
                    generation.stats.append(self._batch.clock.end(generation.request.id))
                # In this order, and read in the other one: whoever knows of the end knows of all rounds.
                generation.told_rounds = len(generation.round_ends)
                generation.is_told = generation.is_told or generation.is_finished
            self._changed.notify_all()

    def _to_blame(self, error: BaseException, joining: list[Generation]) -> tuple[list[Generation], Exception]:
        """Which requests a round failed for; none if that is not known."""
        rows = self._batch.members + joining
        if isinstance(error, RequestError):
            return [row for row in rows if row.request.id in error.requests], error.cause
        if isinstance(error, NotFiniteError):
            return [rows[error.row]], error
        if joining and isinstance(error, Exception):
            return joining, error
        return [], Exception()

    def _start_over(self) -> None:
        """Empties the batch; its requests join again, with the tokens that they have."""
        unfinished = [generation for generation in self._batch.members if not generation.is_finished]
        for generation in unfinished:
            generation.stats.append(self._batch.clock.end(generation.request.id))
        self._batch.clear()
        self._waiting.extendleft(reversed(unfinished))
