"""Bounds on a terminal's cursor position after some text.

A terminal keeps the cursor at the last column when a character fills it, and wraps at the next character. Some, such as
tmux, lose the pending wrap when the cursor is saved and restored: the next character overwrites the last.
"""

from __future__ import annotations

import re
from unicodedata import category, east_asian_width

ESCAPES = re.compile("[\x1b\x80-\x9f]")
"""They begin escape sequences, which may move the cursor anywhere."""
CONTROLS = re.compile("[\x00-\x1f\x7f]")


class Cursor:
    """Bounds of the cursor on its line, which begins at the first column.

    Terminals disagree on the width of some characters, hence two bounds. Positions count cells from the beginning of
    the line, across rows: on 60 columns, 60 is the last column with a pending wrap, and 61 is in the second row.

    Example:
        >>> cursor, is_safe = Cursor(60), []
        >>> for text in ("a" * 58, "é", "Z", "a", "字" * 29, "⚡", "\\n"):
        ...     cursor.follow(text)
        ...     is_safe.append(cursor.is_before_edge)
        >>> is_safe
        [True, False, False, True, False, False, True]
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._least = self._most = 0
        self._is_known, self._is_lost = True, False
        """Whether the bounds hold; whether they are lost for good."""

    def follow(self, text: str) -> None:
        """Updates the bounds for written text."""
        for char in text:
            if char in "\r\n":
                self._least = self._most = 0
                self._is_known = True
            elif ESCAPES.match(char):
                self._is_lost = True
            elif CONTROLS.match(char):  # a tab too: its stops may be anywhere
                self._is_known = False
            else:
                least, most = cells(char)
                self._least, self._most = self._after(self._least, least), self._after(self._most, most)

    def _after(self, position: int, width: int) -> int:
        """A wide character that does not fit into the row goes to the next row."""
        is_cut = width == 2 and position % self._columns == self._columns - 1
        return position + width + is_cut

    @property
    def is_before_edge(self) -> bool:
        """Whether the cursor is certainly not at the last column, so that it may be saved and restored."""
        (row, column), (last_row, last_column) = divmod(self._least, self._columns), divmod(self._most, self._columns)
        is_inside = row == last_row and last_column < self._columns - 1 and (column > 0 or self._least == 0)
        return is_inside and self._is_known and not self._is_lost


def cells(char: str) -> tuple[int, int]:
    """Least and greatest width in cells of a printable character.

    Terminals agree on letters and on East Asian ideographs, syllables and punctuation, but not on emoji, symbols, marks
    and joined letters.

    >>> cells("a"), cells("字"), cells("—"), cells("⚡")
    ((1, 1), (2, 2), (1, 2), (0, 2))
    """
    kind, is_wide = category(char), east_asian_width(char) in "WF"
    if " " <= char <= "~" or (kind in ("Lu", "Ll") and not is_wide):
        return 1, 1
    if is_wide and kind[0] in "LP":
        return 2, 2
    return (1, 2) if kind[0] == "P" else (0, 2)
