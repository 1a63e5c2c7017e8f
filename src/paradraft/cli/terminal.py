"""The terminal: a streamed answer, coloured by where its tokens came from, and progress bars."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.text import Text

from paradraft.sampling_params import Sampling
from paradraft.wording import number_of

if TYPE_CHECKING:
    from paradraft.engine import Engine

DIM, GREEN, PLAIN = "\x1b[2m", "\x1b[32m", "\x1b[0m"
LEAST_LINES = 4
"""Of a terminal, to spare one of them."""
REFRESH_S = 0.1
LINE_S = 5.0
"""Seconds between two lines about a loading where lines stay."""


def stream_answer(
    engine: Engine,
    prompt: str | list[int],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    stop: Sequence[str] = (),
) -> None:
    """Prints a prompt that is a text dim, drafted and accepted text green, the target's own tokens plain.

    A line with tokens per second and acceptance length goes to the standard error.

    Raises:
        ValueError: see `Engine.stream`.
    """
    chunks = engine.stream(prompt, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop)
    # Written as it is: a formatter would expand tabs and drop control characters.
    write(prompt if isinstance(prompt, str) else "", DIM)
    try:
        for chunk in chunks:
            write(chunk.drafted_text, GREEN)
            write(chunk.own_text)
    finally:
        write("\n")
    stats = engine.clock.stats
    console(stderr=True).print(
        f"{number_of(stats.tokens, 'token')} in {stats.total_s:.2f} s, {stats.tokens / stats.total_s:.0f} tokens/s, "
        f"acceptance length {stats.acceptance_length:.2f}"
    )


def write(text: str, style: str = "") -> None:
    """Writes text as it is, at once; styled on a terminal that shows colours."""
    is_styled = bool(text and style) and has_styles(sys.stdout)
    sys.stdout.write(f"{style}{text}{PLAIN}" if is_styled else text)
    sys.stdout.flush()


def has_styles(stream: TextIO) -> bool:
    """Whether to colour: on a terminal, unless it or the user says no (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def console(*, stderr: bool = False) -> Console:
    """Where tables and news are printed: plain where `has_styles` says so, and texts as they are."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(
        stderr=stderr, highlight=False, markup=False, emoji=False, color_system="auto" if has_styles(stream) else None
    )  # fmt: skip


@contextmanager
def news(console: Console, first: str) -> Iterator[Callable[[str], None]]:
    """Reports what is going on: in a line that is replaced, or line by line where a terminal cannot do that.

    What the loading of models logs is reported too; where lines stay, only now and then.

    Args:
        console: where.
        first: what is going on first.
    """
    if console.is_terminal and not console.is_dumb_terminal:
        with console.status(first) as status:

            def show(text: str) -> None:
                status.update(Text(text))

            with _loading_shown(show, every_s=REFRESH_S):
                yield show
    else:
        with _loading_shown(console.print, every_s=LINE_S):
            yield console.print


@contextmanager
def _loading_shown(show: Callable[[str], None], *, every_s: float) -> Iterator[None]:
    """Inside, what the loading of models logs is shown, at most every so many seconds."""
    logger, handler = logging.getLogger("paradraft.models"), _Progress(show, every_s)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


class _Progress(logging.Handler):
    def __init__(self, show: Callable[[str], None], every_s: float) -> None:
        super().__init__(logging.INFO)
        self._show, self._every_s, self._shown_s = show, every_s, time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        if (now_s := time.monotonic()) - self._shown_s >= self._every_s:
            self._shown_s = now_s
            self._show(record.getMessage())


class StatusLine:
    """A line at the bottom of the terminal while text is written above it; nothing where there is no such terminal."""

    def __init__(self) -> None:
        self._rows = 0

    def __enter__(self) -> StatusLine:
        size = shutil.get_terminal_size()
        if sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and size.lines >= LEAST_LINES:
            self._rows, self._columns = size.lines, size.columns
            # Make room below the text, and let all but the last line scroll.
            write(f"\n\x1b[A\x1b7\x1b[1;{self._rows - 1}r\x1b8")
            self._shown_s = 0.0
        return self

    def show(self, text: str) -> None:
        """Replaces the line, a few times a second."""
        if self._rows and (now_s := time.perf_counter()) - self._shown_s > REFRESH_S:
            self._shown_s = now_s
            styled = f"{DIM}{text[: self._columns]}{PLAIN}" if has_styles(sys.stdout) else text[: self._columns]
            write(f"\x1b7\x1b[{self._rows};1H\x1b[2K{styled}\x1b8")

    def __exit__(self, *error: object) -> None:
        if self._rows:
            write(f"\x1b7\x1b[r\x1b[{self._rows};1H\x1b[2K\x1b8")
