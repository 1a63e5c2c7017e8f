"""Who may use an engine: requests of any number of threads, one after the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_S = 1.0
"""How long others wait for a stream whose reader takes nothing from it."""


class Turn:
    """One request's use of an engine, which may consist of several rounds with pauses in between."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.is_running = False
        self.paused_s = 0.0


class Turns:
    """Lets one request at a time use an engine.

    A request that has begun keeps the engine until it ends. If it pauses between two rounds, as a stream does, another
    request of the same thread may come between, or one that has waited for `PATIENCE_S`; `round` says so afterwards.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: Turn | None = None

    @contextmanager
    def round(self, turn: Turn) -> Iterator[bool]:
        """Runs one round of a request, alone.

        Yields:
            Whether nobody else has used the engine since this request's last round.

        Raises:
            ValueError: this thread is in the middle of a round already; it would wait for itself.
        """
        with self._changed:
            while (wait_s := self._wait_s(turn)) > 0.0:
                self._changed.wait(wait_s)
            is_unchanged, self._holder = self._holder is turn, turn
            turn.thread, turn.is_running = threading.get_ident(), True
        try:
            yield is_unchanged
        finally:
            with self._changed:
                turn.is_running, turn.paused_s = False, time.monotonic()
                self._changed.notify_all()

    def end(self, turn: Turn) -> None:
        """Says that a request needs no more rounds."""
        with self._changed:
            if self._holder is turn:
                self._holder = None
                self._changed.notify_all()

    def _wait_s(self, turn: Turn) -> float:
        """How long a request has to wait before it is worth asking again; 0 if it may begin."""
        holder = self._holder
        if holder is None or holder is turn:
            return 0.0
        is_own = holder.thread == threading.get_ident()
        if holder.is_running:
            if is_own:
                raise ValueError(
                    "this engine is in the middle of another answer of the same thread: load a second engine"
                )
            return PATIENCE_S
        return 0.0 if is_own else max(holder.paused_s + PATIENCE_S - time.monotonic(), 0.0)
