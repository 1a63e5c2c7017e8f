"""Lazy imports of heavy libraries, without their output on the terminal.

A command's module imports at its top only what its options need, so that help and option errors are instant. Torch,
transformers and modules that need them are imported in the command itself, inside `importing`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from paradraft.cli import INTERRUPTED


@contextmanager
def importing() -> Iterator[None]:
    """Lets Ctrl-C end the process at once, because libraries turn an interrupted import into arbitrary errors.

    Afterwards the progress bars of `transformers` are off.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, lambda *_: _leave_at_once())
    try:
        yield
        hide_progress_bars()
    finally:
        signal.signal(signal.SIGINT, previous)


def _leave_at_once() -> None:
    os.write(2, b"paradraft: interrupted\n")
    os._exit(INTERRUPTED)


def hide_progress_bars() -> None:
    """Turns off the progress bars of `transformers`, if imported, except those of downloads."""
    if "transformers" not in sys.modules:
        return
    from huggingface_hub.utils.tqdm import enable_progress_bars
    from transformers.utils import logging

    logging.disable_progress_bar()
    enable_progress_bars()
