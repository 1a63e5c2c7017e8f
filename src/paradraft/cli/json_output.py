"""JSON results: the whole to a file, a summary to programs that read the output."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from paradraft.cli.options import option
from paradraft.cli.sections import RESULTS


def json_option(content: str) -> Any:
    """Option `--json`; `content` names what the file holds."""
    return option(f"Write {content} to this file; - prints the summary, on a terminal too.", "--json", section=RESULTS)


class JsonOutput:
    """Writes a command's result by `--json`, a file; "-" prints the summary on a terminal too."""

    def __init__(self, option: Path | None) -> None:
        self._forces_summary = option == Path("-")
        self.file = None if self._forces_summary else option

    def write(self, whole: dict[str, Any]) -> None:
        """Writes the file, if any."""
        from paradraft.bench.report.summary import write_json

        if self.file is not None:
            write_json(self.file, whole)

    def end_with(self, summary: object) -> None:
        """Prints the summary as the last line, for programs or with `-`."""
        if self._forces_summary or not sys.stdout.isatty():
            print(json.dumps(summary))
