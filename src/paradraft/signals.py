"""Turns SIGTERM into `SystemExit` while files are written, so that unfinished ones are deleted."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Makes SIGTERM raise `SystemExit` inside the block, so that child processes end and unfinished files are deleted.

    Forks made meanwhile end at SIGTERM as usual. Changes nothing if SIGTERM has another handler, or outside the main
    thread.
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


def may_be_of_signal(error: BaseException) -> bool:
    """Whether Ctrl-C or SIGTERM may have raised it; they reach only the main thread."""
    is_of_signal = isinstance(error, (KeyboardInterrupt, SystemExit))
    return is_of_signal and threading.current_thread() is threading.main_thread()


def _exit(signum: int, _: FrameType | None) -> None:
    raise SystemExit(128 + signum)


# A Python handler runs only when the interpreter does, and a fork forgets the signals that came before. A fork that
# waits in C for a lock that another thread held would never end, and neither would the process that waits for it. So
# SIGTERM ends forks by its default action, and is blocked until that is restored.
_saved = threading.local()


def _block() -> None:
    _saved.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _restore_mask() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _saved.mask)


def _reset_in_child() -> None:
    if signal.getsignal(signal.SIGTERM) is _exit:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _restore_mask()


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(before=_block, after_in_parent=_restore_mask, after_in_child=_reset_in_child)
