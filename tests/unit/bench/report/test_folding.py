"""Tables on narrow terminals: whole numbers, no dots in their place, and words that are explained."""

from __future__ import annotations

import re
import textwrap
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from paradraft.bench.report.folding import FoldingTable, columns
from paradraft.bench.report.summary import legend, table
from tests.support.bench_result import PLAIN, figures


def shown(one: object, width: int) -> list[str]:
    out = StringIO()
    Console(file=out, width=width, markup=False, color_system=None).print(one)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def summary(*specs: str, **given: Any) -> dict[str, dict[str, Any]]:
    return {spec: figures(spec.partition(":")[0], share_of_floor=0.625, **given) for spec in specs}


def numbers(lines: list[str]) -> set[str]:
    return set(re.findall(r"\d[\d.]*[x%]?", "\n".join(lines)))


@pytest.mark.parametrize("width", [200, 100, 80, 60, 40, 24])
def test_no_width_cuts_a_number(width: int) -> None:
    """Guards every figure on every terminal: columns that do not fit become blocks."""
    found = summary("autoregressive:k=3:dtype=bfloat16:batch=16", "pard:draft=build/a-draft-of-some-length:k=12")
    lines = shown(table(found, "a title that is as long as titles are"), width)
    assert max(map(len, lines)) <= width and "…" not in "".join(lines)
    assert {"123", "2.00x", "1.50x", "2.35", "1.88", "25%", "50%", "62%"} <= numbers(lines)


def test_a_wide_terminal_has_a_table_and_a_narrow_one_blocks() -> None:
    """Guards both forms, and the names of figures that stand in blocks."""
    found = FoldingTable("title", columns("method", "tok/s", "len"))
    found.add_row("a method", "1234", "-")
    found.add_row("b", "5", "3.37")
    assert shown(found, 30) == [
        "title", "method    tok/s   len", "─" * 21, "a method   1234     -", "b             5  3.37",
    ]  # fmt: skip
    assert shown(found, 20)[1] == "method   tok/s  len", "closer together, before it is no table"
    assert shown(found, 17) == ["title", "a method", "  tok/s 1234", "b", "  tok/s 5", "  len 3.37"]


def test_brackets_are_no_markup() -> None:
    """Guards folders such as [red]: they are part of the name."""
    found = FoldingTable("[bold]title", columns("method", "len"), legend=["[x]: y"])
    found.add_row("PARD, [red]", "1.0")
    assert "PARD, [red]" in "\n".join(shown(found, 40)) and shown(found, 40)[0] == "[bold]title"


def test_the_legend_explains_what_occurs_in_four_lines() -> None:
    """Guards against a legend longer than the table, and against terms of methods that did not run."""
    specs = ["hf", "hf-assisted:k=4", "hf-prompt-lookup:k=4", "ar", "autoregressive:k=3", "pard:gamma=4"]
    everything = summary(*specs, gamma=4) | summary("ar:dtype=bfloat16", fastest_baseline="ar:dtype=bfloat16")
    assert len(textwrap.wrap(legend(everything), 80)) <= 4
    for word in ("AR, assisted, lookup:", "AR+:", "VSD:", "PEARL:", "k:", "len:", "floor:", "same:", "** fastest"):
        assert word in legend(everything)
    alone = legend({"hf": figures("hf", **PLAIN, baseline=None, identical_to_ar=None)})
    assert alone == "AR: generate of transformers"
