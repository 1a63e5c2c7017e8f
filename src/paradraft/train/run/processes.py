"""The processes of a run: they fail together, stop together after Ctrl-C or SIGTERM, and close their exchange.

A stopped run finishes its step and writes a checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from accelerate import Accelerator
from accelerate.utils import gather_object

from paradraft.environment import is_main_process

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StoppedError(KeyboardInterrupt):
    """A run was stopped by a signal after writing a checkpoint, from which it can resume.

    It is a KeyboardInterrupt, so that code that catches `Exception` lets it pass.
    """

    def __init__(self, number: int, *, step: int, steps: int) -> None:
        super().__init__(f"stopped after step {step} of {steps}")
        self.number = number
        self.step = step
        self.steps = steps


@dataclass(kw_only=True)
class StopRequest:
    """Pending request to stop this process: `number` is that of the first signal, or None."""

    number: int | None = None


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Records Ctrl-C and SIGTERM inside the `with` block, and restores the previous handlers.

    A second Ctrl-C exits at once. A second SIGTERM does not: a cluster sends it to torchrun and to its processes, and
    torchrun forwards it to them once more. Ignored signals stay ignored. Python delivers signals to the main thread
    only; in other threads nothing is recorded. A signal that came too late to stop the run is raised again at the end.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def ask(signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT and request.number is not None:
            raise KeyboardInterrupt
        if request.number is None:
            request.number = signum
            if signum == signal.SIGINT and is_main_process() and sys.stderr.isatty():
                # Not `print`: the signal may have come in the middle of one.
                os.write(2, b"\nstopping after this step; press Ctrl-C again to leave at once\n")

    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    handled = [signum for signum in STOP_SIGNALS if before[signum] is not signal.SIG_IGN]
    for signum in handled:
        signal.signal(signum, ask)
    try:
        yield request
    finally:
        for signum in handled:
            # None is a handler that was not set from Python, which cannot be restored.
            signal.signal(signum, before[signum] or signal.SIG_DFL)
    if request.number is not None:
        signal.raise_signal(request.number)


@contextmanager
def as_one(accelerator: Accelerator) -> Iterator[None]:
    """Raises a ValueError of any process in all processes.

    Otherwise the others would wait for it, and only the main process prints errors. Code inside the `with` block must
    not wait for other processes.

    Raises:
        ValueError: a process raised it inside; of several that of the first process.
    """
    if accelerator.num_processes == 1:
        yield
        return
    mistake: str | None = None
    try:
        yield
    except ValueError as error:
        mistake = str(error)
    mistakes = [message for message in gather_object([mistake]) if message is not None]
    if mistakes:
        raise ValueError(mistakes[0])


def close(accelerator: Accelerator) -> None:
    """Closes the trackers, and NCCL's process group, which warns if it is left open.

    Gloo's group stays open until the process ends. Its threads may still hold tensors of the last exchange; they need
    the interpreter lock to free them, while the thread that destroys the group holds the lock and waits for them.
    """
    if accelerator.device.type == "cuda":
        accelerator.end_training()
        return
    for tracker in accelerator.trackers:
        tracker.finish()
