"""Terminal output: streamed answers coloured by the origin of their tokens, progress, and a status line."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.text import Text

from paradraft.cli.cursor import Cursor
from paradraft.sampling_params import Sampling
from paradraft.wording import number_of

if TYPE_CHECKING:
    from paradraft.engine.answers import Chunk
    from paradraft.engine.engine import Engine

DIM, GREEN, PLAIN = "\x1b[2m", "\x1b[32m", "\x1b[0m"
LEAST_LINES = 4
"""Fewest terminal lines for a status line."""
REFRESH_S = 0.1
LINE_S = 5.0
"""Seconds between two lines of loading progress without a terminal."""
EMPTY = {
    "eos": "the model ended it at once",
    "stop": "it began with a text that ends it",
    "length": "its tokens have no text, allow more of them",
    None: "it was interrupted",
}
"""Reason of an empty answer, by finish reason."""


def stream_answer(
    engine: Engine,
    prompt: str | list[int],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    stop: Sequence[str] = (),
) -> None:
    """Prints a text prompt dim, accepted draft tokens green, the target's own tokens plain.

    A line with tokens per second and acceptance length goes to stderr.
    """
    chunks = engine.stream(prompt, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop)
    # Written as it is: a formatter would expand tabs and drop control characters.
    write(prompt if isinstance(prompt, str) else "", DIM)
    answer = ""
    try:
        for chunk in chunks:
            write(chunk.drafted_text, GREEN)
            write(chunk.own_text)
            answer += chunk.text
    finally:
        write("\n")
    explain_empty(answer, chunk)
    stats = engine.clock.stats
    console(stderr=True).print(
        f"{number_of(stats.tokens, 'token')} in {stats.total_s:.2f} s, {stats.tokens / stats.total_s:.0f} tokens/s, "
        f"acceptance length {stats.acceptance_length:.2f}"
    )


def explain_empty(answer: str, last: Chunk) -> None:
    """Prints the reason on stderr if an answer has no text; `last` is its last chunk."""
    if not answer.strip():
        print(f"paradraft: the answer is empty: {EMPTY[last.finish_reason]}", file=sys.stderr)


def tell_advice(engine: Engine) -> None:
    """Prints `Engine.advice` on stderr, if any."""
    if (advice := engine.advice) is not None:
        print(f"note: {advice}", file=sys.stderr)


def write(text: str, style: str = "") -> None:
    """Writes text unchanged and flushes; styled on a terminal with colours."""
    is_styled = bool(text and style) and has_styles(sys.stdout)
    sys.stdout.write(f"{style}{text}{PLAIN}" if is_styled else text)
    sys.stdout.flush()


def has_styles(stream: TextIO) -> bool:
    """Whether to use colours: on a terminal, unless TERM=dumb or NO_COLOR is set (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def console(*, stderr: bool = False) -> Console:
    """Console without markup and highlighting; plain unless `has_styles`."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(
        stderr=stderr, highlight=False, markup=False, emoji=False, color_system="auto" if has_styles(stream) else None
    )  # fmt: skip


@contextmanager
def news(console: Console, first: str) -> Iterator[Callable[[str], None]]:
    """Yields a progress callback: a line that is replaced, or one line per report without a terminal.

    Log messages of model loading are reported too, less often without a terminal. `first` is the first message.
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
    logger, handler = logging.getLogger("paradraft"), _ThrottledHandler(show, every_s)
    previous = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(previous)
        logger.removeHandler(handler)


class _ThrottledHandler(logging.Handler):
    def __init__(self, show: Callable[[str], None], every_s: float) -> None:
        super().__init__(logging.INFO)
        self._show, self._every_s, self._shown_s = show, every_s, time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        if (now_s := time.monotonic()) - self._shown_s >= self._every_s:
            self._shown_s = now_s
            self._show(record.getMessage())


class StatusLine:
    """Status line at the bottom of the terminal below a streamed answer; does nothing without a terminal.

    It is drawn only where saving and restoring the cursor is safe: not at the last column, nor at an uncertain column
    (see `Cursor`), nor after a resize.
    """

    def __init__(self) -> None:
        self._size = terminal_size()
        is_shown = self._size.lines >= LEAST_LINES and os.environ.get("TERM") != "dumb"
        self._cursor = Cursor(self._size.columns) if is_shown else None

    def __enter__(self) -> StatusLine:
        if self._cursor is not None:
            # Make room below the text, and let all but the last line scroll.
            write(f"\n\x1b[A\x1b7\x1b[1;{self._size.lines - 1}r\x1b8")
            self._shown_s = 0.0
        return self

    def write(self, text: str, style: str = "") -> None:
        """Writes text of the answer, see `write`."""
        write(text, style)
        if self._cursor is not None:
            self._cursor.follow(text)

    def show(self, text: str) -> None:
        """Replaces the line, at most every `REFRESH_S`."""
        if self._cursor is None or not self._cursor.is_before_edge or terminal_size() != self._size:
            return
        if (now_s := time.perf_counter()) - self._shown_s > REFRESH_S:
            self._shown_s = now_s
            cut = text[: self._size.columns]
            styled = f"{DIM}{cut}{PLAIN}" if has_styles(sys.stdout) else cut
            write(f"\x1b7\x1b[{self._size.lines};1H\x1b[2K{styled}\x1b8")

    def __exit__(self, *error: object) -> None:
        """Ends the answer's line and erases the status line."""
        write("\n")
        if self._cursor is not None:
            erase = f"\x1b[{self._size.lines};1H\x1b[2K" if terminal_size() == self._size else ""
            write(f"\x1b7\x1b[r{erase}\x1b8")


def terminal_size() -> os.terminal_size:
    """Size of the terminal on stdout in columns and lines; (0, 0) if stdout is no terminal."""
    if not sys.stdout.isatty():
        return os.terminal_size((0, 0))
    return os.get_terminal_size(sys.stdout.fileno())
