"""A terminal's screen, as far as `paradraft chat` writes to one: what a person sees of the bytes that come."""

from __future__ import annotations

import re
from collections.abc import Callable
from unicodedata import combining, east_asian_width

SEQUENCE = re.compile(r"\x1b(?:\[\??([0-9;]*)([A-Za-z])|([78]))")


class Screen:
    """Characters in rows.

    Args:
        columns: of each row.
        rows: how many.
        forgets_wrap: whether the cursor that is restored is not to wrap any more, as in tmux 3.3a; xterm restores
            that too.
        emoji: cells that one takes.
    """

    def __init__(self, columns: int, rows: int, *, forgets_wrap: bool = True, emoji: int = 2) -> None:
        self.columns, self.rows, self.forgets_wrap, self.emoji = columns, rows, forgets_wrap, emoji
        self.gone: list[str] = []
        """Rows that have scrolled out of the screen."""
        self._cells = [[" "] * columns for _ in range(rows)]
        self._row = self._column = 0
        """At `columns` the cursor is at the last column, and wraps before the next character."""
        self._saved, self._last = (0, 0), rows - 1
        """What was saved; the last row that scrolls."""

    @property
    def lines(self) -> list[str]:
        """All rows that were ever seen, without what is empty at their ends."""
        found = [*self.gone, *("".join(cells).rstrip() for cells in self._cells)]
        while found and not found[-1]:
            found.pop()
        return found

    def feed(self, text: str) -> None:
        """Shows what comes."""
        at = 0
        while at < len(text):
            sequence = SEQUENCE.match(text, at)
            if sequence is not None:
                self._obey(sequence[1], sequence[2] or sequence[3])
                at = sequence.end()
            else:
                self._put(text[at])
                at += 1

    def _obey(self, numbers: str | None, name: str) -> None:
        given = [int(number or 1) for number in (numbers or "").split(";")]
        does: dict[str, Callable[[], None]] = {
            "7": self._save,
            "8": self._restore,
            **dict.fromkeys("mhl", lambda: None),
            "A": lambda: self._go(self._row - given[0], self._column),
            "H": lambda: self._go(given[0] - 1, given[1] - 1 if len(given) > 1 else 0),
            "K": self._clear,
            "r": lambda: self._scroll_to(given[1] if len(given) > 1 else self.rows),
        }
        does[name]()

    def _save(self) -> None:
        self._saved = self._row, self._column

    def _restore(self) -> None:
        row, column = self._saved
        self._row, self._column = row, min(column, self.columns - 1) if self.forgets_wrap else column

    def _go(self, row: int, column: int) -> None:
        self._row, self._column = row, min(column, self.columns - 1)

    def _clear(self) -> None:
        self._cells[self._row] = [" "] * self.columns

    def _scroll_to(self, rows: int) -> None:
        self._last = rows - 1
        self._go(0, 0)

    def _put(self, char: str) -> None:
        if char == "\r":
            self._column = 0
        elif char == "\n":
            self._down()
        elif char == "\t":
            self._column = max(self._column, min(self._column // 8 * 8 + 8, self.columns - 1))
        elif char >= " ":
            self._show(char, self._width(char))

    def _width(self, char: str) -> int:
        if combining(char) or char in "\ufe0f\u200d":
            return 0
        if ord(char) > 0x2600 and east_asian_width(char) == "W" and not char.isalpha() and char not in "、。":
            return self.emoji
        return 2 if east_asian_width(char) in "WF" else 1

    def _show(self, char: str, width: int) -> None:
        if self._column + width > self.columns and width:
            self._column = 0
            self._down()
        if width:
            self._cells[self._row][self._column : self._column + width] = [char, ""][:width]
            self._column += width
        else:
            self._cells[self._row][self._column - 1] += char

    def _down(self) -> None:
        if self._row == self._last:
            gone = self._cells.pop(0)
            self.gone.append("".join(gone).rstrip())
            self._cells.insert(self._last, [" "] * self.columns)
        else:
            self._row = min(self._row + 1, self.rows - 1)
