"""What the sections of a report are made of."""

from __future__ import annotations

from typing import Any

from paradraft.bench.html import Element
from paradraft.bench.methods import AR
from paradraft.bench.peers import PEERS, is_vllm
from paradraft.bench.report import label
from paradraft.bench.speedups import mark

Figures = dict[str, Any]
FAMILIES = {
    "ours": "ours, with a drafter",
    "plain": "ours, without",
    "peer": "transformers",
    "vllm": "vLLM",
}
"""Classes of methods that have a colour."""


def family(method: str) -> str:
    """Which of `FAMILIES` a method belongs to."""
    if is_vllm(method):
        return "vllm"
    return "peer" if method in PEERS else "plain" if method == AR else "ours"


def number(value: float | None, form: str, unit: str = "") -> Element:
    """A number as a reader wants it, with its exact value for programs; a dash where there is none."""
    if value is None:
        return Element("–")
    shown = format(value, form).replace("%", " %")
    return Element.of("data", shown + unit, value=repr(value))


def name_of(spec: str, one: Figures) -> Element:
    """A method as readers know it, its settings small."""
    name, _, settings = label(spec, one).partition(", ")
    return joined([Element.of("span", name), *([Element.of("small", f" {settings}")] if settings else ())])


def marked_name(spec: str, methods: dict[str, Figures]) -> Element:
    """The same, with a word that says whether it is a baseline."""
    words = {"*": "baseline", "**": "fastest baseline"}.get(mark(spec, methods))
    badge = [Element(" "), Element.of("span", words, class_="badge")] if words else []
    return joined([name_of(spec, methods[spec]), *badge])


def tile(value: str, words: str) -> Element:
    """A main number with what it means."""
    return Element.of("li", Element.of("strong", value), Element.of("span", words))


def section(title: str, note: str | None, *children: Element) -> Element:
    """A part of the page, with a line that explains it."""
    told = [] if note is None else [Element.of("p", note, class_="note")]
    return Element.of("section", Element.of("h2", title), *told, *children)


def legend(names: list[str], words: dict[str, str]) -> Element:
    """What colours mean: classes and their words."""
    entries = [Element.of("li", Element.of("span", class_=f"key {name}"), words[name]) for name in names]
    return Element.of("ul", *entries, class_="legend")


def table(title: str, head: list[str], rows: list[list[Element]]) -> Element:
    """A table that scrolls by itself where it is wider than the page."""
    headings = Element.of("tr", *(Element.of("th", name, scope="col") for name in head))
    body = [
        Element.of("tr", Element.of("th", row[0], scope="row"), *(Element.of("td", cell) for cell in row[1:]))
        for row in rows
    ]
    table = Element.of("table", Element.of("thead", headings), Element.of("tbody", *body))
    return Element.of("div", table, class_="scroll", role="region", aria_label=title, tabindex=0)


def joined(elements: list[Element]) -> Element:
    """Elements, one behind the other."""
    return Element("".join(elements))
