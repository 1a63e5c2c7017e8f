"""A benchmark's result as one HTML page that needs nothing else: no script, no font, no picture from outside."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from paradraft.bench import page_sections as sections
from paradraft.bench.html import Element
from paradraft.bench.page_example import example
from paradraft.bench.report import title_of
from paradraft.bench.result_file import ADVICE, completed, read_result_file
from paradraft.output import check_outputs, write_output

FILE = "index.html"


def write_page(folder: Path, result: dict[str, Any]) -> Path:
    """Writes the page of a result.

    Args:
        folder: where it goes; made if it does not exist.
        result: what `run_benchmark` returns for one work.

    Returns:
        The page's file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_output(folder / FILE, page(result).encode())
    return folder / FILE


def check_folder(folder: Path | None) -> None:
    """Raises ValueError if the page could not be written into a folder in the end."""
    if folder is None:
        return
    above = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not above.is_dir():
        raise ValueError(f"{str(folder)!r} cannot hold a report: {str(above)!r} is a file, name a folder")
    check_outputs(above / FILE)


def read_result(file: Path) -> dict[str, Any]:
    """Reads what `paradraft bench --json` wrote; what an older version did not write yet is computed from the rest.

    Raises:
        ValueError: it cannot be read or is no result of a benchmark.
    """
    found = read_result_file(file, ("machine", "arguments", "methods"))
    try:
        found = completed(found)
        page(found)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"{str(file)!r} is no whole result of a benchmark ({problem}): {ADVICE}") from None
    return found


def page(result: dict[str, Any]) -> str:
    """The page of a result, as text.

    Args:
        result: what `run_benchmark` returns for one work, or what `read_result` read: what it lacks is not shown.
    """
    title = title_of(result)
    style = resources.files("paradraft.bench").joinpath("page.css").read_text(encoding="utf-8")
    head = Element.of(
        "head",
        Element.of("meta", charset="utf-8"),
        Element.of("meta", name="viewport", content="width=device-width, initial-scale=1"),
        # Whatever a model says, nothing in this page runs or is fetched.
        Element.of(
            "meta", http_equiv="Content-Security-Policy", content="default-src 'none'; style-src 'unsafe-inline'"
        ),
        Element.of("meta", name="color-scheme", content="light dark"),
        Element.of("title", f"paradraft bench: {title}"),
        Element("<style>" + style + "</style>"),
    )
    found = [
        sections.heading(result, title),
        sections.speeds(result),
        sections.acceptance(result),
        sections.rounds(result),
        sections.roofline(result),
        example(result),
        sections.figures(result),
        sections.machine(result),
    ]
    main = Element.of("main", *(section for section in found if section is not None))
    return "<!doctype html>\n" + Element.of("html", head, Element.of("body", main), lang="en") + "\n"
