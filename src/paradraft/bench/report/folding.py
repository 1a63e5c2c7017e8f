"""Tables that stay readable on narrow terminals: no number is cut; rows that are too wide become blocks.

Where the columns do not fit, a row looks like this, with as many figures in a line as fit, aligned:

    PARD, k=4
      tok/s 1002  vs AR+ 1.19x  len 3.37
      draft 38%   verify 31%    rest 31%
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

NARROWEST = 9
"""Least width of the column of names, in which longer names fold; below it, rows become blocks."""
UNKNOWN = "-"
"""An empty cell; blocks leave it out."""
GAP = 2
"""Spaces between two columns, or figures of a block; where columns do not fit so, one less."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column.

    Args:
        long: the label of a figure in a block, if it differs from `name`.
        is_name: whether its cells name the row; they are aligned left and may fold.
    """

    name: str
    long: str = ""
    is_name: bool = False


def columns(name: str, *figures: str) -> list[Column]:
    """A first column that names rows, and columns of figures."""
    return [Column(name=name, is_name=True), *(Column(name=figure) for figure in figures)]


class FoldingTable:
    """A table for any width of terminal, printed by rich; `legend` are paragraphs below it."""

    def __init__(self, title: str, columns: Sequence[Column], *, legend: Sequence[str] = ()) -> None:
        self.title = title
        self._columns = columns
        self._legend = legend
        self._rows: list[tuple[tuple[str, ...], str]] = []
        self._sections: set[int] = set()

    def add_row(self, *cells: str, name: str | None = None) -> None:
        """Adds a row; `name` is its label in a block, by default its first cell."""
        assert len(cells) == len(self._columns)
        self._rows.append((cells, cells[0] if name is None else name))

    def add_section(self) -> None:
        """Ends a group of rows."""
        self._sections.add(len(self._rows) - 1)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Called by rich."""
        yield Text(self.title, style="bold")
        names = max((cell_len(cells[0]) for cells, _ in self._rows), default=0)
        widths = {gap: options.max_width - self._figures_width() - gap * (len(self._columns) - 1) for gap in (GAP, 1)}
        fitting = [gap for gap, width in widths.items() if width >= min(NARROWEST, names)]
        yield from [self._table(widths[fitting[0]], fitting[0])] if fitting else self._blocks()
        for paragraph in self._legend:
            yield Text(paragraph, style="dim")

    def _figures_width(self) -> int:
        """Width of the columns of figures, without gaps."""
        width = 0
        for index, column in enumerate(self._columns):
            if not column.is_name:
                width += max(cell_len(column.name), *(cell_len(cells[index]) for cells, _ in self._rows))
        return width

    def _table(self, width: int, gap: int) -> Table:
        # The box itself has a space between columns.
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0))
        for column in self._columns:
            table.add_column(
                Text(column.name),
                justify="left" if column.is_name else "right",
                overflow="fold",
                no_wrap=not column.is_name,
                max_width=width if column.is_name else None,
            )
        for index, (cells, _) in enumerate(self._rows):
            table.add_row(*map(Text, cells), end_section=index in self._sections)
        return table

    def _blocks(self) -> Iterator[Text | Padding]:
        for cells, name in self._rows:
            yield Text(name, overflow="fold")
            figures = [
                Text(f"{column.long or column.name} {cell}", overflow="fold")
                for column, cell in zip(self._columns, cells, strict=True)
                if not column.is_name and cell != UNKNOWN
            ]
            yield Padding(Columns(figures, padding=(0, GAP)), (0, 0, 0, GAP))
