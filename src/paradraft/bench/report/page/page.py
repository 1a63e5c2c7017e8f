"""Writes a benchmark's result as one self-contained HTML page: no script, no font, no picture from outside."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from paradraft.bench.labels import labels
from paradraft.bench.report.page import sections
from paradraft.bench.report.page.html import Element, joined, section
from paradraft.bench.report.summary import title_of
from paradraft.bench.result import Piece
from paradraft.bench.result_file import ADVICE, completed, read_result_file
from paradraft.files import check_outputs, write_output
from paradraft.wording import number_of

DEEPEST = 8
"""Positions of a draft with different colours; deeper ones share the last."""


def example(result: dict[str, Any]) -> Element | None:
    """The answers to the first prompt; the fastest one with a draft is open."""
    first = result.get("example")
    if not first or not first["answers"]:
        return None
    answers: dict[str, list[Piece]] = first["answers"]
    speed = {spec: result["methods"][spec]["tokens_per_s"]["median"] for spec in answers}
    drafting = [spec for spec, pieces in answers.items() if any(origin for _, origin in pieces)]
    shown = max(drafting or speed, key=lambda spec: speed[spec])
    names = labels(result["methods"])
    details = [_answer(names[spec], first["prompt"], pieces, is_open=spec == shown) for spec, pieces in answers.items()]
    deepest = max((origin for pieces in answers.values() for _, origin in pieces), default=0)
    return section("One answer", "The answer to the first prompt, token by token.", _legend(deepest), *details)


def _legend(deepest: int) -> Element:
    entries = [Element.of("li", "prompt", class_="prompt"), Element.of("li", "the target's own token")]
    if deepest:
        positions = range(1, min(deepest, DEEPEST) + 1)
        shown = [
            Element.of("span", f" {position}{'+' if position == DEEPEST < deepest else ''} ", class_=_tint(position))
            for position in positions
        ]
        entries.append(Element.of("li", "drafted and accepted, by position: ", *shown))
    return Element.of("ul", *entries, class_="legend")


def _answer(name: str, prompt: str, pieces: list[Piece], *, is_open: bool) -> Element:
    drafted = sum(origin > 0 for _, origin in pieces)
    # Each pass ends with the target's own token; the limit may have cut that of the last.
    passes = len(pieces) - drafted + bool(pieces and pieces[-1][1])
    words = f" {number_of(len(pieces), 'token')} in {passes} passes of the target, {drafted} of them drafted"
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


FILE = "index.html"


def write_page(folder: Path, result: dict[str, Any]) -> Path:
    """Writes the page of a result.

    Returns:
        The page's file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_output(folder / FILE, page(result).encode())
    return folder / FILE


def check_folder(folder: Path | None) -> None:
    """Raises ValueError if the page cannot be written into a folder."""
    if folder is None:
        return
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ValueError(f"{str(folder)!r} cannot hold a report: {str(existing)!r} is a file, name a folder")
    check_outputs(existing / FILE)


def read_result(file: Path) -> dict[str, Any]:
    """Reads a file of `paradraft bench --json`; figures that an older version did not write are computed.

    Raises:
        ValueError: it cannot be read or is no result of a benchmark.
    """
    result = read_result_file(file, ("machine", "arguments", "methods"))
    try:
        result = completed(result)
        page(result)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"{str(file)!r} is no whole result of a benchmark ({problem}): {ADVICE}") from None
    return result


def page(result: dict[str, Any]) -> str:
    """The page of a result, as text.

    Args:
        result: of one workload, from `run_benchmark` or `read_result`; missing parts are not shown.
    """
    title = title_of(result)
    style = resources.files("paradraft.bench.report.page").joinpath("page.css").read_text(encoding="utf-8")
    head = Element.of(
        "head",
        Element.of("meta", charset="utf-8"),
        Element.of("meta", name="viewport", content="width=device-width, initial-scale=1"),
        # Nothing in this page runs or is fetched, whatever the text of a model is.
        Element.of(
            "meta", http_equiv="Content-Security-Policy", content="default-src 'none'; style-src 'unsafe-inline'"
        ),
        Element.of("meta", name="color-scheme", content="light dark"),
        Element.of("title", f"paradraft bench: {title}"),
        Element("<style>" + style + "</style>"),
    )
    parts = [
        sections.heading(result, title),
        sections.speeds(result),
        sections.acceptance(result),
        sections.rounds(result),
        sections.latency(result),
        sections.timeline(result),
        sections.roofline(result),
        example(result),
        sections.figures(result),
        sections.machine(result),
    ]
    main = Element.of("main", *(section for section in parts if section is not None))
    return "<!doctype html>\n" + Element.of("html", head, Element.of("body", main), lang="en") + "\n"
