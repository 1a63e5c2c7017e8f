"""Writes a benchmark's result as one self-contained HTML page: no script, no font, no picture from outside.

The text of the page is in `page.html.jinja`; this module computes what it shows.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template, TemplateError

from paradraft.bench.baselines import HF, PEERS, is_llama_cpp, is_vllm
from paradraft.bench.labels import LABELS, full_paths, labels
from paradraft.bench.latency import LATENCIES, TERMS, have_latencies
from paradraft.bench.report.summary import title_of
from paradraft.bench.result import FIRST
from paradraft.bench.result_file import (
    ADVICE,
    completed,
    has_faster_baselines,
    mark,
    read_result_file,
    without_baseline,
)
from paradraft.bench.spec import AR
from paradraft.bench.steadiness import unsteady_runs
from paradraft.data.prompt_source import DEFAULT
from paradraft.files import check_outputs, write_output
from paradraft.wording import number_of

FILE = "index.html"
PARTS = {"draft": "drafting", "verify": "the target's pass and the verdict", "other": "the rest"}
"""Parts of a round, each with a colour."""
FAMILIES = {
    "ours": "ours, with a drafter", "plain": "ours, without", "peer": "transformers", "vllm": "vLLM",
    "llama-cpp": "llama.cpp",
}  # fmt: skip
"""Families of methods, each with a colour."""
CHART = {"left": 42, "right": 412, "top": 10, "bottom": 202, "width": 420}
"""Edges of the plots in SVG, in its units."""
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
"""Characters that a browser drops, that cannot be encoded, or that change the direction of the text around them."""


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
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, TemplateError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"{str(file)!r} is no whole result of a benchmark ({problem}): {ADVICE}") from None
    return result


def page(result: dict[str, Any]) -> str:
    """The page of a result, as text.

    Args:
        result: of one workload, from `run_benchmark` or `read_result`; missing parts are not shown.
    """
    methods, names = result["methods"], labels(result["methods"])
    rows = {spec: _row(spec, methods, names[spec]) for spec in methods}
    unsteady = unsteady_runs(methods)
    return _template().render(
        title=title_of(result),
        result=result,
        rows=rows,
        names=names,
        fastest=max(rows.values(), key=lambda row: row["tokens_per_s"]["median"]),
        most=max(max(entry["tokens_per_s"]["runs"]) for entry in methods.values()),
        compared=[
            entry["identical_to_ar"]
            for entry in methods.values()
            if entry["method"] not in (AR, *PEERS) and entry["identical_to_ar"] is not None
        ],
        lacking={missing: [names[spec] for spec in specs] for missing, specs in without_baseline(methods).items()},
        full_paths=full_paths(methods),
        unsteady=unsteady and unsteady[0].upper() + unsteady[1:],
        has_faster_baselines=has_faster_baselines(methods),
        curves=_curves(rows),
        split=_split(rows),
        has_latencies=have_latencies(methods),
        floored=[row for row in rows.values() if row.get("share_of_floor") is not None],
        differing={row["label"]: len(row["differing_prompts"]) for row in rows.values() if row["differing_prompts"]},
        timeline={spec: pieces for spec, pieces in (result.get("timeline") or {}).items() if pieces and spec in rows},
        answers=_answers(result.get("example") or {}, rows),
        machine=_facts(result["machine"]),
        command=shlex.join(map(str, result["machine"].get("command", ()))),
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, finalize=visible,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters |= {"form": lambda value, form: format(value, form).replace("%", " %"), "repr": repr}
    environment.globals |= {
        "AR": AR, "CHART": CHART, "DEFAULT": DEFAULT, "FAMILIES": FAMILIES, "FIRST": FIRST, "HF": HF, "LABELS": LABELS,
        "LATENCIES": LATENCIES, "PARTS": PARTS, "TERMS": TERMS, "number_of": number_of,
    }  # fmt: skip
    return environment.get_template("page.html.jinja")


def visible(value: Any) -> Any:
    """A text with names for characters that cannot be seen. The template applies it to every value before escaping.

    >>> visible("a\\x1b[2m"), visible("a\\u202eb")
    ('a␛[2m', 'a⟨U+202E⟩b')
    """
    return _UNSEEN.sub(_named, value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _named(match: re.Match[str]) -> str:
    code = ord(match[0])
    # Unicode has a picture for each of the first 32 characters and for DEL.
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else f"⟨U+{code:04X}⟩"


def _row(spec: str, methods: Mapping[str, Any], label: str) -> dict[str, Any]:
    """The figures of a method, and how it is named."""
    name, _, settings = label.partition(", ")
    badge = {"*": "baseline", "**": "fastest baseline"}.get(mark(spec, methods))
    method = methods[spec]["method"]
    if is_vllm(method):
        family = "vllm"
    elif is_llama_cpp(method):
        family = "llama-cpp"
    else:
        family = "peer" if method in PEERS else "plain" if method == AR else "ours"
    return {**methods[spec], "label": label, "name": name, "options": settings, "badge": badge, "family": family}


def _curves(rows: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The line in the chart of each method whose accepted tokens are known."""
    drawn = [row for row in rows.values() if row["accepted_share_of_rounds"]]
    longest = max((len(row["accepted_share_of_rounds"]) for row in drawn), default=0)
    left, right, top, bottom = (CHART[edge] for edge in ("left", "right", "top", "bottom"))

    def points(shares: Sequence[float]) -> list[tuple[float, float]]:
        x = [left + (right - left) * (index + 0.5) / longest for index in range(len(shares))]
        return [(x[index], bottom - (bottom - top) * share) for index, share in enumerate(shares)]

    return [{"row": row, "points": points(row["accepted_share_of_rounds"])} for row in drawn]


def _split(rows: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Milliseconds of the parts of a round, for each method where they are known."""
    split = []
    for row in rows.values():
        if row["draft_s"] is not None and row["tokens"]:
            per_round_ms = 1000 * row["acceptance_length"] / row["tokens"]
            times_ms = {part: row[f"{part}_s"] * per_round_ms for part in PARTS}
            split.append({"row": row, "times_ms": times_ms, "total_ms": sum(times_ms.values())})
    return split


def _answers(example: Mapping[str, Any], rows: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The answers to the first prompt; the fastest one with a draft is open."""
    answers: Mapping[str, Sequence[tuple[str, int]]] = example.get("answers") or {}
    drafting = [spec for spec, pieces in answers.items() if any(origin for _, origin in pieces)]
    shown = max(drafting or answers, key=lambda spec: rows[spec]["tokens_per_s"]["median"], default=None)
    entries = []
    for spec, pieces in answers.items():
        drafted = sum(origin > 0 for _, origin in pieces)
        # Each pass ends with the target's own token; the limit may have cut that of the last.
        passes = len(pieces) - drafted + bool(pieces and pieces[-1][1])
        deepest = max((origin for _, origin in pieces), default=0)
        entries.append(
            {
                "label": rows[spec]["label"], "pieces": pieces, "drafted": drafted, "passes": passes,
                "deepest": deepest, "is_open": spec == shown,
            }
        )  # fmt: skip
    return entries


def _facts(machine: Mapping[str, Any]) -> dict[str, Any]:
    memory, load = machine.get("memory_bytes"), machine.get("load_average")
    versions = {"Python": machine.get("python"), **machine.get("versions", {})}
    return {
        "processor": f"{machine.get('cpu', '')} ({machine.get('cpu_capability', '')})",
        "cores, threads": f"{machine.get('cores')}, {machine.get('threads')}",
        "memory": None if memory is None else f"{memory / 2**30:.1f} GiB",
        "GPU": machine.get("gpu"),
        "system": machine.get("system"),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "load at the end": None if load is None else f"{load:.2f}",
        "date": machine.get("date"),
    }
