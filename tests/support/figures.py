"""Figures in files of `benchmarks/`, and tables that print them: each is named by its heading row."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from paradraft.bench.report.page import read_result

ROOT = Path(__file__).parents[2]

Figures = dict[str, Any]


@cache
def methods(name: str) -> dict[str, Figures]:
    """The figures of a file, with the definitions of today."""
    found: dict[str, Figures] = read_result(ROOT / "benchmarks" / f"{name}.json")["methods"]
    return found


def raw(name: str) -> dict[str, Any]:
    """A file of a benchmark script."""
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))
    return found


def cells(line: str) -> list[str]:
    return [cell.strip().replace("**", "") for cell in line.strip().strip("|").split("|")]


def table(document: str, *head: str) -> list[list[str]]:
    """The rows below a heading row, bold type taken off."""
    lines = (ROOT / document).read_text(encoding="utf-8").splitlines()
    (place,) = (number for number, line in enumerate(lines) if line.startswith("|") and cells(line) == list(head))
    rows = []
    for line in lines[place + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(cells(line))
    return rows
