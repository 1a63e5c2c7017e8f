"""What a terminal is sent: nothing but text where it or the user says so."""

from __future__ import annotations

import sys
from io import StringIO

import pytest
from rich.text import Text

from paradraft.cli.terminal import console, news
from paradraft.models.runtime import Runtime
from paradraft.sources.target_loading import load_target


class Tty(StringIO):
    """A terminal that remembers what it is sent."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("more", "is_styled"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({"NO_COLOR": ""}, True)],
)
def test_no_escapes_where_they_are_not_wanted(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, str], is_styled: bool
) -> None:
    """Guards https://no-color.org and terminals that show escapes as characters; bold is one, too."""
    for name, value in ({"TERM": "xterm-256color"} | more).items():
        monkeypatch.setenv(name, value)
    if "NO_COLOR" not in more:
        monkeypatch.delenv("NO_COLOR", raising=False)
    for stream in ("stdout", "stderr"):
        terminal = Tty()
        monkeypatch.setattr(sys, stream, terminal)
        console(stderr=stream == "stderr").print(Text("a table's title", style="bold"))
        assert ("\x1b[" in terminal.getvalue()) == is_styled and "a table's title" in terminal.getvalue()


def test_a_dumb_terminal_gets_its_news_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against minutes without a word: a line that is replaced is not drawn there."""
    monkeypatch.setenv("TERM", "dumb")
    terminal = Tty()
    monkeypatch.setattr(sys, "stderr", terminal)
    with news(console(stderr=True), "preparing") as tell:
        tell("loading [a] model")
        tell("run 1/3")
    assert terminal.getvalue() == "loading [a] model\nrun 1/3\n"


def test_loading_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against minutes of "loading" without a sign of how far it is, and against news after the end."""
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr("paradraft.cli.terminal.LINE_S", 0.0)
    terminal = Tty()
    monkeypatch.setattr(sys, "stderr", terminal)
    runtime = Runtime(device="cpu", dtype="float32", capacity=64)
    with news(console(stderr=True), "preparing"):
        load_target("shape:tiny-target", runtime)
    told = terminal.getvalue().splitlines()
    assert told[0] == "shape:tiny-target: reading"
    assert [line.partition(": ")[2] for line in told[1:3]] == ["packing layer 1 of 2", "packing layer 2 of 2"]
    load_target("shape:tiny-target", runtime)
    assert terminal.getvalue().splitlines() == told
