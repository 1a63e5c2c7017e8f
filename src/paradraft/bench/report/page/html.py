"""Elements of an HTML page, escaped, and building blocks of the sections of a report."""

from __future__ import annotations

import html
import re
from typing import Any, Self

from paradraft.bench.baselines import PEERS, is_llama_cpp, is_vllm
from paradraft.bench.labels import labels
from paradraft.bench.result_file import mark
from paradraft.bench.spec import AR

VOID = ("meta", "br", "link")
"""Elements without an end tag."""
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
"""Characters that a browser drops, that cannot be encoded, or that change the direction of the text around them."""


class Element(str):
    """HTML text that is escaped already."""

    __slots__ = ()

    @classmethod
    def of(cls, name: str, /, *children: str, **attributes: object) -> Self:
        """An element.

        Args:
            children: elements, or texts, which are escaped.
            attributes: their underscores become hyphens, but for those at the end (`class_`); None and False are
                left out, True becomes an attribute without a value.

        >>> Element.of("p", "a < b ", Element.of("b", "bold"), class_="note", aria_hidden=True, title=None)
        '<p class="note" aria-hidden>a &lt; b <b>bold</b></p>'
        """
        written = "".join(
            f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escaped(str(value))}"')
            for key, value in attributes.items()
            if value is not None and value is not False
        )
        inside = "".join(child if isinstance(child, Element) else escaped(child) for child in children)
        return cls(f"<{name}{written}>" + ("" if name in VOID else f"{inside}</{name}>"))


def escaped(text: str) -> str:
    """A text as HTML; characters that cannot be seen are named.

    >>> escaped("</script>\\x1b[2m"), escaped("a\\u202eb")
    ('&lt;/script&gt;␛[2m', 'a⟨U+202E⟩b')
    """
    return html.escape(_UNSEEN.sub(_named, text))


def _named(match: re.Match[str]) -> str:
    code = ord(match[0])
    # Unicode has a picture for each of the first 32 characters and for DEL.
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else f"⟨U+{code:04X}⟩"


Figures = dict[str, Any]
FAMILIES = {
    "ours": "ours, with a drafter",
    "plain": "ours, without",
    "peer": "transformers",
    "vllm": "vLLM",
    "llama-cpp": "llama.cpp",
}
"""Families of methods, each with a colour."""


def family(method: str) -> str:
    """The family of a method, one of `FAMILIES`."""
    if is_vllm(method):
        return "vllm"
    if is_llama_cpp(method):
        return "llama-cpp"
    return "peer" if method in PEERS else "plain" if method == AR else "ours"


def number(value: float | None, form: str, unit: str = "") -> Element:
    """A formatted number, with its exact value for programs; a dash for None."""
    if value is None:
        return Element("–")
    shown = format(value, form).replace("%", " %")
    return Element.of("data", shown + unit, value=repr(value))


def name_of(spec: str, methods: dict[str, Figures]) -> Element:
    """The label of a method, its settings small."""
    name, _, settings = labels(methods)[spec].partition(", ")
    return joined([Element.of("span", name), *([Element.of("small", f" {settings}")] if settings else ())])


def marked_name(spec: str, methods: dict[str, Figures]) -> Element:
    """The label of a method, with a badge if it is a baseline."""
    words = {"*": "baseline", "**": "fastest baseline"}.get(mark(spec, methods))
    badge = [Element(" "), Element.of("span", words, class_="badge")] if words else []
    return joined([name_of(spec, methods), *badge])


def tile(value: str, words: str) -> Element:
    """A main number with its explanation."""
    return Element.of("li", Element.of("strong", value), Element.of("span", words))


def section(title: str, note: str | None, *children: Element) -> Element:
    """A section of the page, with a line that explains it."""
    explanation = [] if note is None else [Element.of("p", note, class_="note")]
    return Element.of("section", Element.of("h2", title), *explanation, *children)


def legend(names: list[str], words: dict[str, str]) -> Element:
    """A legend of colours: classes and their words."""
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
    """Elements, one after the other."""
    return Element("".join(elements))
