"""Only `sources/load_plan.py` writes the fields of a `Runtime` that a load plan settles."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "paradraft"
WRITER = "sources/load_plan.py"
SETTLED = {"device", "dtype", "width", "capacity"}
"""Fields of `Runtime` that a plan settles. One for a model without options may be built with all but `width`."""


def writes(text: str) -> Iterator[tuple[int, str]]:
    """Lines that write a settled field, and the field."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
        fields = {"replace": SETTLED, "Runtime": {"width"}}.get(str(called), set())
        for keyword in node.keywords:
            if keyword.arg in fields:
                yield node.lineno, keyword.arg
        named = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else None
        if called in ("setattr", "__setattr__") and named in {"width", "capacity"}:
            yield node.lineno, str(named)


def test_settled_fields_are_written_in_one_module() -> None:
    """Guards the question who sets the width: loading, three commands and a drafter did, each in another way."""
    others = {
        f"{name}:{line}: {field}"
        for file in sorted(PACKAGE.rglob("*.py"))
        if (name := file.relative_to(PACKAGE).as_posix()) != WRITER
        for line, field in writes(file.read_text(encoding="utf-8"))
    }
    assert others == set(), f"settle these in {WRITER}"
    assert {field for _, field in writes((PACKAGE / WRITER).read_text(encoding="utf-8"))} == SETTLED


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("runtime = replace(runtime, width=64)", "width"),
        ("runtime = dataclasses.replace(runtime, pad_to=1, dtype='int8')", "dtype"),
        ("runtime = Runtime(device='cpu', width=9)", "width"),
        ("object.__setattr__(runtime, 'capacity', 9)", "capacity"),
    ],
)
def test_a_write_is_seen(line: str, field: str) -> None:
    """Control: each way to write a field is seen."""
    assert list(writes(line)) == [(1, field)]
    assert not list(writes("runtime = replace(runtime, pad_to=1, tokenizer=name)"))
