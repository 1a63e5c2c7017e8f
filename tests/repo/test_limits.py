"""The limits of CONTRIBUTING: lines of a file and of a function."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "paradraft"
MOST_OF_FUNCTION = 60
MOST = {".py": 350, ".cpp": 450, ".h": 450}
"""Lines of a file, by suffix."""
LONGER = {
    "models/forward/cpu/native/forward.cpp": 557,
}
"""Files, and functions as `file:name`, that are still to be split, with the most lines that they may have."""


def over(folder: Path) -> Iterator[tuple[str, int]]:
    """Files and functions of a folder that are over their limit, with their lines."""
    for file in sorted(folder.rglob("*")):
        if file.suffix not in MOST:
            continue
        name, text = file.relative_to(folder).as_posix(), file.read_text(encoding="utf-8")
        if (lines := len(text.splitlines())) > MOST[file.suffix]:
            yield name, lines
        for node in ast.walk(ast.parse(text)) if file.suffix == ".py" else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if (lines := node.end_lineno - node.lineno + 1) > MOST_OF_FUNCTION:
                    yield f"{name}:{node.name}", lines


def test_files_and_functions_keep_to_their_limits() -> None:
    """Guards readers: the limits were written down, and nine files and sixteen functions were longer."""
    assert {name: lines for name, lines in over(PACKAGE) if lines > LONGER.get(name, 0)} == {}


def test_exceptions_are_needed() -> None:
    """Guards the list of exceptions: what has been split may not grow again."""
    assert LONGER.keys() - dict(over(PACKAGE)).keys() == set(), "these keep to the limits now: take them from the list"


@pytest.mark.parametrize(
    ("file", "text", "name"),
    [
        ("a.py", "\n" * 351, "a.py"),
        ("a.h", "\n" * 451, "a.h"),
        ("a.py", "class A:\n    async def f(self):\n" + "        x = 1\n" * 60, "a.py:f"),
    ],
)
def test_what_is_too_long_is_seen(tmp_path: Path, file: str, text: str, name: str) -> None:
    """Control: one line more than the limit is named, and one line less is not."""
    (tmp_path / file).write_text(text)
    assert [each for each, _ in over(tmp_path)] == [name]
    (tmp_path / file).write_text(text.rpartition("\n")[0].rpartition("\n")[0] + "\n")
    assert not list(over(tmp_path))
