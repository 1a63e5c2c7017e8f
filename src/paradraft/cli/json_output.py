"""Results as JSON: to files, and to programs that read a command's output."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import typer

from paradraft.cli.sections import RESULTS


def json_option(content: str) -> Any:
    """The option `--json` of a command, by what the file holds."""
    return typer.Option(
        "--json",
        rich_help_panel=RESULTS,
        help=f"Write {content} to this file; - prints the summary, on a terminal too.",
    )


class JsonOutput:
    """Where the result of a command goes as JSON: all of it to a file, and a summary to programs that read the output.

    Args:
        option: the value of `--json`; "-" asks for the summary on a terminal too.
    """

    def __init__(self, option: Path | None) -> None:
        self._is_asked = option == Path("-")
        self.file = None if self._is_asked else option

    def write(self, whole: dict[str, Any]) -> None:
        """Writes the file, if there is to be one."""
        from paradraft.bench.summary import write_json

        if self.file is not None:
            write_json(self.file, whole)

    def end_with(self, summary: object) -> None:
        """Prints the summary as the last line."""
        if self._is_asked or not sys.stdout.isatty():
            print(json.dumps(summary))
