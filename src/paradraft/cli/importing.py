"""How commands import the libraries that do their work: when they run, and with nothing of them on the terminal.

A module of a command imports at its top only what its options are made of, so that its help and its complaints about
options come at once. Torch, transformers and what needs them is imported in the command itself, inside `importing`.
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
    """Inside, Ctrl-C ends the process at once: what a library makes of an import that is cut off is anything.

    Afterwards the bars of `transformers` for loading and saving are off.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: _leave_at_once())
    try:
        yield
        hide_progress_bars()
    finally:
        signal.signal(signal.SIGINT, before)


def _leave_at_once() -> None:
    os.write(2, b"paradraft: interrupted\n")
    os._exit(INTERRUPTED)


def hide_progress_bars() -> None:
    """Turns off the bars of `transformers`, if it is imported; downloads keep theirs."""
    if "transformers" not in sys.modules:
        return
    from huggingface_hub.utils.tqdm import enable_progress_bars
    from transformers.utils import logging

    logging.disable_progress_bar()
    enable_progress_bars()
