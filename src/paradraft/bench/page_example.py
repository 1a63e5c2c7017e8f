"""One answer of a report, its tokens coloured by how they came."""

from __future__ import annotations

from typing import Any

from paradraft.bench.html import Element
from paradraft.bench.origins import Piece
from paradraft.bench.page_parts import joined, section
from paradraft.bench.report import label

DEEPEST = 8
"""Positions of a draft that have a colour of their own; deeper ones share the last."""


def example(result: dict[str, Any]) -> Element | None:
    """The answers to the first prompt; the fastest that was drafted is open."""
    found = result.get("example")
    if not found or not found["answers"]:
        return None
    answers: dict[str, list[Piece]] = found["answers"]
    speed = {spec: result["methods"][spec]["tokens_per_s"]["median"] for spec in answers}
    drafting = [spec for spec, pieces in answers.items() if any(origin for _, origin in pieces)]
    shown = max(drafting or speed, key=lambda spec: speed[spec])
    told = [
        _answer(label(spec, result["methods"][spec]), found["prompt"], pieces, is_open=spec == shown)
        for spec, pieces in answers.items()
    ]
    deepest = max((origin for pieces in answers.values() for _, origin in pieces), default=0)
    return section("One answer", "The answer to the first prompt, token by token.", _legend(deepest), *told)


def _legend(deepest: int) -> Element:
    entries = [Element.of("li", "prompt", class_="prompt"), Element.of("li", "the target's own token")]
    if deepest:
        places = range(1, min(deepest, DEEPEST) + 1)
        shown = [
            Element.of("span", f" {place}{'+' if place == DEEPEST < deepest else ''} ", class_=_tint(place))
            for place in places
        ]
        entries.append(Element.of("li", "drafted and accepted, by position: ", *shown))
    return Element.of("ul", *entries, class_="legend")


def _answer(name: str, prompt: str, pieces: list[Piece], *, is_open: bool) -> Element:
    drafted = sum(origin > 0 for _, origin in pieces)
    # Each pass ends with a token of the target's own; the limit may have cut the last one's.
    passes = len(pieces) - drafted + bool(pieces and pieces[-1][1])
    words = f" {len(pieces)} tokens in {passes} passes of the target, {drafted} of them drafted"
    return Element.of(
        "details",
        Element.of("summary", name, Element.of("small", words)),
        Element.of("pre", Element.of("span", prompt, class_="prompt"), *(_token(*piece) for piece in pieces)),
        open=is_open,
    )


def _token(text: str, origin: int) -> Element:
    if not origin:
        return Element.of("span", text)
    newline = joined([Element.of("span", class_="newline"), Element("\n")])
    shown = [part for line in text.split("\n") for part in (newline, line)][1:]
    return Element.of("span", *shown, class_=_tint(origin), title=f"drafted, position {origin}")


def _tint(origin: int) -> str:
    return f"token d{min(origin, DEEPEST)}"
