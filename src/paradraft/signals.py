"""What a signal does while something is half written."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


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
    signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


# A handler waits until Python runs, and Python forgets in a fork what came before it runs there. A fork that waits in C
# for a lock which another thread had would never end, and neither would who waits for it. So SIGTERM ends forks, and
# one that comes too early is kept back until it does.
_kept = threading.local()


def _keep_back() -> None:
    _kept.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _let_through() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _kept.mask)


def _end_at_once() -> None:
    if signal.getsignal(signal.SIGTERM) is _exit:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _let_through()


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(before=_keep_back, after_in_parent=_let_through, after_in_child=_end_at_once)
