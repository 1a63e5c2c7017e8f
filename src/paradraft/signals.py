"""What a signal does while something is half written."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Lets SIGTERM raise `SystemExit` while it is entered, so that other processes end and what is unfinished goes.

    Where SIGTERM does something else already, or in a thread that hears no signals, nothing changes.
    """
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before is not signal.SIG_DFL:
        yield
        return
    owner = os.getpid()

    def end(number: int, _: object) -> None:
        if os.getpid() != owner:
            # A process that is being started swallows exceptions in places, and would then never end.
            os._exit(128 + number)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
