"""Ctrl-C and SIGTERM ask a run to stop; it does so after its step, with a checkpoint."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from paradraft.environment import is_main_process

ASKED_BY = (signal.SIGINT, signal.SIGTERM)


class StoppedError(KeyboardInterrupt):
    """A run was asked to stop, has written a checkpoint, and goes on from there the next time.

    It is a KeyboardInterrupt, so that whoever catches errors goes on to stop.

    Args:
        number: the signal that asked.
        step: steps done.
        steps: steps of the whole run.
    """

    def __init__(self, number: int, *, step: int, steps: int) -> None:
        super().__init__(f"stopped after step {step} of {steps}")
        self.number = number
        self.step = step
        self.steps = steps


@dataclass(kw_only=True)
class StopRequest:
    """Whether this process was asked to stop.

    Args:
        number: the signal that asked first; None if none did.
    """

    number: int | None = None


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Notes Ctrl-C and SIGTERM while it is entered, and puts the handlers back that were there before.

    A second Ctrl-C leaves at once. A second SIGTERM does not: a cluster sends it to torchrun and to its processes, and
    torchrun sends it to them once more. Signals that are ignored stay ignored. Only the main thread hears signals;
    elsewhere nothing is noted. A request that came too late to be heeded is sent again at the end.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and request.number is not None:
            raise KeyboardInterrupt
        if request.number is None:
            request.number = number
            if number == signal.SIGINT and is_main_process() and sys.stderr.isatty():
                # Not `print`: the signal may have come in the middle of one.
                os.write(2, b"\nstopping after this step; press Ctrl-C again to leave at once\n")

    before = {number: signal.getsignal(number) for number in ASKED_BY}
    heard = [number for number in ASKED_BY if before[number] is not signal.SIG_IGN]
    for number in heard:
        signal.signal(number, ask)
    try:
        yield request
    finally:
        for number in heard:
            # None stands for a handler that was not set from Python, which cannot be put back.
            signal.signal(number, before[number] or signal.SIG_DFL)
    if request.number is not None:
        signal.raise_signal(request.number)
