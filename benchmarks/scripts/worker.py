"""A subprocess that runs the paradraft of a checkout and answers line by line, to measure in turns."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Worker:
    """A script that is run with `--worker`, prints a line when it is ready, and then one for each line of its input.

    Args:
        script: its file.
        source: the `src` folder of the paradraft that it imports.
        arguments: of the script, by name.
    """

    def __init__(self, script: str, source: Path, arguments: Mapping[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, script, "--worker", *(f"--{name}={value}" for name, value in arguments.items())],
            env=os.environ | {"PYTHONPATH": str(source.resolve())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def ask(self, line: str = "") -> str:
        """The answer to a line."""
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a worker has failed; its error is above")
        return line

    def end(self) -> None:
        """Ends the process."""
        self._process.communicate()
