"""What a signal does while something is half written."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass(frozen=True)
class _Raise:
    """A handler of signals.

    Args:
        owner: the process in which it raises.
    """

    owner: int

    def __call__(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self.owner:
            os._exit(128 + number)  # a fork that has not come to `_end_at_once` yet
        raise SystemExit(128 + number)


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Lets SIGTERM raise `SystemExit` while it is entered, so that other processes end and what is unfinished goes.

    Forks that are made meanwhile end at SIGTERM, as ever. Where SIGTERM does something else already, or in a thread
    that hears no signals, nothing changes.
    """
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _Raise(os.getpid()))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end_at_once() -> None:
    """Lets SIGTERM end a fork again. A handler waits until Python runs: a fork that waits in C for a lock which another
    thread had would never end, and neither would who waits for it."""
    if isinstance(signal.getsignal(signal.SIGTERM), _Raise):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_end_at_once)
