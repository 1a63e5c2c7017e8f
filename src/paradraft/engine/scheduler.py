"""Continuous batching across threads: a thread that waits for tokens runs the next round for all."""

from __future__ import annotations

import asyncio
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
    """A request whose reader waits in an event loop, and what the reader was last notified of."""

    generation: Generation
    loop: asyncio.AbstractEventLoop
    wake: Callable[[], None]
    notified_rounds: int = 0
    is_over: bool = False

    @property
    def has_news(self) -> bool:
        """Whether the reader must be notified."""
        generation = self.generation
        return generation.is_told or generation.is_cancelled or generation.told_rounds > self.notified_rounds


def _call_all(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()


class _Worker:
    """A thread that runs queued functions in order until the worker is garbage-collected.

    One thread for all, because the allocator keeps an arena per thread: decoding in turns in two threads would hold
    twice the memory.
    """

    def __init__(self) -> None:
        self._work = SimpleQueue[Callable[[], None] | None]()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._work.put, None).atexit = False

    def run(self, function: Callable[[], None]) -> None:
        """Queues a function."""
        if self._thread is None:
            self._thread = threading.Thread(target=_run_all, args=(self._work,), name="decoding", daemon=True)
            self._thread.start()
        self._work.put(function)


def _run_all(work: SimpleQueue[Callable[[], None] | None]) -> None:
    while (function := work.get()) is not None:
        function()
        del function  # its references must not survive while the thread waits


def _have_news(all_watched: Sequence[_Watched]) -> bool:
    return any(watched.has_news for watched in all_watched)


class Scheduler:
    """Decodes the requests of several threads together.

    A thread that waits for tokens runs rounds for all requests; the other waiting threads are notified of their tokens.
    A stream with a slow reader therefore goes on while others decode, and its tokens are kept for the reader. Where any
    answer is streamed, rounds read pieces of the waiting prompts. A round that fails fails only the request that
    caused it; the others are prefilled again and go on.

    Args:
        batch: used by this scheduler only, and so is its target while it has rows.
        in_round: context manager around rounds.
    """

    def __init__(self, batch: Batch, in_round: Callable[[], AbstractContextManager[None]]) -> None:
        self.batch = batch
        self._in_round = in_round
        self.on_end: Callable[[Generation], None] = lambda generation: None
        """Called with each answer that has ended, by the thread that ran its last round."""
        self._changed = threading.Condition()
        self._waiting = deque[Generation]()
        self._runner: int | None = None
        self._watching = threading.Lock()
        self._watched: list[_Watched] = []
        self._worker = _Worker()
        self._is_watching = False

    def stream(self, generation: Generation) -> Generator[None, None, None]:
        """Decodes one request; yields after each round with new tokens, last at its end. Closing early cancels it.

        Raises:
            ValueError: the answer failed, or this thread already runs a round.
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
                # Rounds and the end that came while the reader paused count too.
                is_over, seen = generation.is_told, generation.told_rounds
                yield
        finally:
            generation.is_cancelled = True

    def answer(self, generations: Sequence[Generation], *, most: int) -> Generator[Generation, None, None]:
        """Decodes requests, at most `most` together, and yields each when it ends. Closing early cancels the rest.

        Raises:
            ValueError: an answer failed, or this thread already runs a round.
        """
        queue = deque(generations)
        active: list[Generation] = []
        try:
            while queue or active:
                while queue and len(active) < most:
                    active.append(queue.popleft())
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
        """Decodes one request in the scheduler's worker thread, which all such requests share.

        `wake` is called in `loop` after each round with new tokens, and when the answer ends or fails. Setting
        `generation.is_cancelled` cancels the request.
        """
        generation.is_watched = True
        with self._watching:
            self._watched.append(_Watched(generation=generation, loop=loop, wake=wake))
            self._waiting.append(generation)
            if not self._is_watching:
                self._is_watching = True
                self._worker.run(self._watch)

    def _watch(self) -> None:
        """Runs rounds while requests wait.

        Holds no reference to the engine when idle, so it can be garbage-collected.
        """
        ran_last = False
        while True:
            with self._watching:
                self._watched = [watched for watched in self._watched if not watched.is_over]
                if not self._watched:
                    self._is_watching = False
                    return
                all_watched = self._watched  # which grows while this waits: who comes later has news sooner, perhaps
            try:
                ran_last = self._wait_until(partial(_have_news, all_watched), ran_last=ran_last)
            except BaseException as error:  # else the readers would wait for ever
                if not isinstance(error, Exception):
                    error = RuntimeError(f"{type(error).__name__} while decoding: {error}")
                for watched in list(all_watched):
                    watched.generation.fail(error)
                    watched.generation.is_told = True
            # One call per loop: each call wakes its thread, which then competes with this one.
            wakes: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = defaultdict(list)
            for watched in list(all_watched):
                if watched.has_news:
                    watched.is_over = watched.generation.is_told or watched.generation.is_cancelled
                    watched.notified_rounds = watched.generation.told_rounds
                    wakes[watched.loop].append(watched.wake)
            for loop, functions in wakes.items():
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(_call_all, functions)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Lends target and drafter to another batch; running requests go on afterwards."""
        with self._changed:
            while self._runner is not None:
                self._wait()
            self._runner = threading.get_ident()
        try:
            with self._in_round():
                self._start_over()
                yield
        finally:
            self._release()

    def _wait_until(self, is_ready: Callable[[], bool], *, ran_last: bool = False) -> bool:
        """Runs rounds until `is_ready`, or waits while another thread runs them; returns whether this thread ran any.

        With `ran_last` this thread ran the last round too, so the time since then counts as part of rounds.
        """
        with self._changed:
            while self._runner is not None and not is_ready():
                ran_last = False
                self._wait()
            if is_ready():
                return False
            self._runner = threading.get_ident()
        try:
            with self._in_round():
                while not is_ready():
                    if ran_last:
                        self.batch.clock.lap("other")
                    self._run_round()
                    ran_last = True
        finally:
            self._release()
        return True

    def _wait(self) -> None:
        if self._runner == threading.get_ident():
            raise ValueError("this engine is in the middle of another answer of the same thread: load a second engine")
        self._changed.wait()

    def _release(self) -> None:
        with self._changed:
            self._runner = None
            self._changed.notify_all()

    def _run_round(self) -> None:
        batch = self.batch
        if batch.members and not batch.is_current:
            self._start_over()
        rows = batch.members
        try:
            self._begin(rows)
            batch.leave([row for row in batch.members if row.is_cancelled])
            if batch.prefill.generations:
                batch.leave([row for row in batch.generations if row.is_finished])
                before, along = batch.prefill.budgets(batch.generations)
                batch.read(before)
                batch.leave([row for row in batch.generations if row.is_over])  # they stayed until others joined
                batch.read_along(along)
            if not all(row.is_over for row in batch.generations):
                batch.step()
        except BaseException as error:
            failed, cause = self._failed_by(error, rows)
            for generation in failed:
                generation.fail(cause)
            here = set(map(id, batch.members))
            self._waiting.extendleft(row for row in reversed(rows) if id(row) not in here and not row.is_over)
            self._start_over()
            if not failed:
                raise
        finally:
            self._notify(rows)

    def _begin(self, rows: list[Generation]) -> None:
        """Takes all waiting requests into prefill, and adds them to `rows`."""
        waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
        joining = [generation for generation in waiting if not generation.is_over]
        rows += joining
        for generation in joining:
            try:
                self.batch.begin([generation])
            except Exception as error:
                raise RequestError([generation.request.id], error) from error

    def _notify(self, rows: list[Generation]) -> None:
        ended = [row for row in rows if row.is_finished and not row.is_told and row.error is None]
        with self._changed:
            for generation in rows:
                if generation.is_finished and not generation.is_told:
                    generation.stats.append(self.batch.clock.end(generation.request.id))
                # Write the rounds before the end flag; readers check the flag first.
                generation.told_rounds = len(generation.round_ends)
                generation.is_told = generation.is_told or generation.is_finished
            self._changed.notify_all()
        for generation in ended:
            self.on_end(generation)

    def _failed_by(self, error: BaseException, rows: list[Generation]) -> tuple[list[Generation], Exception]:
        """Those of `rows` that made a round fail, and the cause; none if unknown."""
        if isinstance(error, RequestError):
            return [row for row in rows if row.request.id in error.requests], error.cause
        if isinstance(error, NotFiniteError):
            return [self.batch.members[error.row]], error
        return [], Exception()

    def _start_over(self) -> None:
        """Empties the batch; its requests join again with the tokens that they have."""
        unfinished = [generation for generation in self.batch.members if not generation.is_finished]
        for generation in unfinished:
            generation.stats.append(self.batch.clock.end(generation.request.id))
        self.batch.clear()
        self._waiting.extendleft(reversed(unfinished))
