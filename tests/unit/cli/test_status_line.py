"""The status line of `chat`: it costs no letter of an answer, however wide a terminal shows its characters."""

from __future__ import annotations

import os
import pty
import random
import termios
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress

import pytest

from paradraft.cli import terminal
from paradraft.cli.terminal import StatusLine
from tests.support.screen import Screen

COLUMNS, ROWS = 60, 12
STATUS = "12 tokens, 34 tokens/s"
ALPHABETS = {
    "letters": "abcdefghij klmnop",
    "accents": "aé ñß Жя",
    "ideographs": "a漢字かなー、。한글 ",
    "emoji": "a ⚡😀👍字—“”…",
    "sequences": ["👩\u200d👧", "❤\ufe0f", "e\u0301", "x", " "],
    "controls": "abcdef\tgh\ri\n",
}


class Terminal:
    """A pseudo-terminal of 60 columns that is the standard output of what is tested, and what it has shown."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._reader, writer = pty.openpty()
        termios.tcsetwinsize(writer, (ROWS, COLUMNS))
        self.file = open(writer, "w", encoding="utf-8", newline="")  # noqa: SIM115  # closed by the fixture
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(terminal, "REFRESH_S", -1.0)  # it is drawn wherever it may be

    def read(self) -> str:
        """What has come since the last time; the terminal has made \\r\\n of \\n."""
        os.write(self.file.fileno(), b"\0")
        found = b""
        while not found.endswith(b"\0"):
            found += os.read(self._reader, 65536)
        return found[:-1].decode()

    def resize(self, columns: int) -> None:
        termios.tcsetwinsize(self.file.fileno(), (ROWS, columns))

    def close(self) -> None:
        self.file.close()
        os.close(self._reader)


@pytest.fixture
def tty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    found = Terminal(monkeypatch)
    yield found
    found.close()


def answer(tty: Terminal, pieces: list[str]) -> tuple[str, int]:
    """What a terminal is sent for an answer whose status is shown after each piece, and how often it is."""
    sent, drawn = "", 0
    with redirect_stdout(tty.file), StatusLine() as status:
        sent += tty.read()
        for piece in pieces:
            status.write(piece)
            status.show(STATUS)
            sent += (new := tty.read())
            drawn += STATUS in new
    return sent + tty.read(), drawn


def seen(sent: str, **kind: object) -> list[str]:
    screen = Screen(COLUMNS, ROWS, **kind)
    screen.feed(sent)
    return screen.lines


def test_a_line_is_filled_letter_by_letter(tty: Terminal) -> None:
    """Guards the recipe that showed it: 59 letters, "Z", save, status, restore, go on, at 60 columns."""
    text = "x" * 59 + "Z" + "y" * 70
    sent, drawn = answer(tty, list(text))
    assert seen(sent) == ["x" * 59 + "Z", "y" * 60, "y" * 10]
    assert drawn == len(text) - 4, "it is drawn at all columns but the last"


@pytest.mark.parametrize("forgets_wrap", [True, False])
@pytest.mark.parametrize("emoji", [1, 2])
@pytest.mark.parametrize("kind", ALPHABETS)
def test_the_screen_has_the_text(tty: Terminal, kind: str, emoji: int, forgets_wrap: bool) -> None:
    """Guards texts of all lengths, in pieces of all lengths, that wrap and scroll."""
    chance = random.Random(kind)
    for _ in range(40):
        pieces = [
            "".join(chance.choices(ALPHABETS[kind], k=chance.randint(1, 25))) for _ in range(chance.randint(1, 50))
        ]
        sent, _ = answer(tty, pieces)
        settings = {"forgets_wrap": forgets_wrap, "emoji": emoji}
        assert seen(sent, **settings) == seen("".join(pieces).replace("\n", "\r\n") + "\r\n", **settings)


@pytest.mark.parametrize("kind", ["letters", "accents", "ideographs"])
def test_it_goes_on_in_long_paragraphs(tty: Terminal, kind: str) -> None:
    """Guards against a line that is drawn at the beginning of each paragraph only: these have certain columns."""
    pieces = random.Random(3).choices([char for char in ALPHABETS[kind] if char not in "、。"], k=600)
    assert answer(tty, pieces)[1] > 500


@pytest.mark.parametrize("text", ["\t", "\b", "\x1b[5C", "\x9b5C", "\x1b]0;title"])
def test_where_the_column_is_not_certain(tty: Terminal, text: str) -> None:
    """Guards tabs, whose stops are anywhere, and escape sequences of a model, which may change more than the column."""
    pieces = [text, "a", "\n", "b"]
    assert answer(tty, pieces)[1] == (2 if text in "\t\b" else 0)


def test_a_terminal_that_is_resized(tty: Terminal) -> None:
    """Guards text that is wrapped anew, so that columns are others, and a line of it where the status was."""
    with redirect_stdout(tty.file), StatusLine() as status:
        status.write("a" * 40)
        tty.resize(40)
        tty.read()
        status.show(STATUS)
        status.write("a\nb")
        status.show(STATUS)
    assert (sent := tty.read()).startswith("a\r\nb\r\n") and STATUS not in sent
    assert "\x1b[r" in sent and "\x1b[2K" not in sent


def test_an_error_is_told_on_a_new_line(tty: Terminal) -> None:
    """Guards the last letter of a full line against what is written after an answer that failed."""
    with redirect_stdout(tty.file):
        with suppress(ValueError), StatusLine() as status:
            status.write("x" * 60)
            raise ValueError
        print("paradraft: failed", flush=True)
    assert seen(tty.read()) == ["x" * 60, "paradraft: failed"]
