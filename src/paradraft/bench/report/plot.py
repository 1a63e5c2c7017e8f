"""Plots a benchmark: tokens per second, and accepted drafted tokens per round."""

from __future__ import annotations

import io
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paradraft.bench.labels import full_paths, labels
from paradraft.bench.report.summary import title_of
from paradraft.bench.result_file import has_faster_baselines, mark
from paradraft.drafters import traits_of
from paradraft.files import write_output

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Distinct with any colour vision (Okabe and Ito 2008), without the yellow, which is pale on white."""
MARKERS = "os^Dv<>"
TITLE_CHARACTERS = 80
"""Most characters of a line of the title."""
BASELINE, UNDRAFTED, SOFT = "#4d4d4d", "#b8b8b8", "#595959"
BASELINES = {"": "", "*": " (baseline)", "**": "\n(fastest baseline)"}
WORDS = {
    "hf": "AR: generate of transformers",
    "hf-assisted": "assisted: assisted generation of transformers",
    "hf-prompt-lookup": "lookup: prompt lookup of transformers",
    "ar": "AR+: ours without a drafter",
}
"""Explanations of the labels of methods that are no drafters."""


def plot(result: dict[str, Any], file: Path) -> None:
    """Writes a PNG of a result. Its text chunk "Description" has the names and figures of the bars.

    Args:
        result: of one workload, from `run_benchmark` or `read_result`; `selected` leaves methods out.
    """
    image = io.BytesIO()
    draw(result).savefig(image, format="png", dpi=150)
    write_output(file, _small(image, description(result["methods"])))


def description(methods: dict[str, dict[str, Any]]) -> str:
    """The names and figures of the bars, a line each."""
    names = labels(methods)
    return "\n".join(f"{names[spec]}: {_figures(entry)}" for spec, entry in methods.items())


def _small(image: io.BytesIO, text: str) -> bytes:
    """Adds a text, and reduces the picture to a palette, which takes a third of the bytes."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    info, png = PngInfo(), io.BytesIO()
    info.add_itxt("Description", text)
    small = Image.open(image).convert("RGB").quantize(64, dither=Image.Dither.NONE)
    small.save(png, format="png", optimize=True, pnginfo=info)
    return png.getvalue()


def draw(result: dict[str, Any]) -> Figure:
    """Draws bars on the left, lines on the right, and timelines of methods that draft ahead below."""
    from matplotlib.figure import Figure

    methods = result["methods"]
    colours = _colours(methods)
    lanes = {spec: pieces for spec, pieces in (result.get("timeline") or {}).items() if pieces and spec in methods}
    above, below = 2.5 + 0.3 * max(len(methods), 7), 0.6 + 0.55 * len(lanes)
    figure = Figure(figsize=(10, above + below * bool(lanes)), layout="constrained")
    figure.suptitle(textwrap.fill(title_of(result), TITLE_CHARACTERS), fontsize=13, fontweight="bold")
    names = {entry["method"] for entry in methods.values()}
    drafters = {name: traits_of(name) for name in sorted(names)}
    explained = [f"{traits.label or name}: {traits.words}" for name, traits in drafters.items() if traits.words]
    words = " · ".join([*(text for name, text in WORDS.items() if name in names), *explained])
    words += " · PEARL: drafts while the target verifies" * any(entry.get("gamma") for entry in methods.values())
    small = [line for text in (_conditions(result), words, *full_paths(methods)) for line in textwrap.wrap(text, 165)]
    figure.supxlabel("\n".join(small), fontsize=7.5, color=SOFT)
    rows = [["speed", "acceptance"], *[["lanes", "lanes"]] * bool(lanes)]
    ratios = (above, below) if lanes else (1,)
    parts: dict[str, Axes] = figure.subplot_mosaic(rows, width_ratios=(1.3, 1), height_ratios=ratios)
    speed, acceptance = parts["speed"], parts["acceptance"]
    _draw_speeds(speed, methods, colours)
    _draw_acceptance(acceptance, methods, colours)
    if lanes:
        _draw_lanes(parts["lanes"], lanes, methods)
    for axes in parts.values():
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    return figure


def _conditions(result: dict[str, Any]) -> str:
    """Machine, settings and date of the measurement."""
    machine, arguments = result["machine"], result["arguments"]
    batches = sorted({entry.get("batch") or 1 for entry in result["methods"].values()})
    dtypes = list(dict.fromkeys(entry["dtype"] for entry in result["methods"].values()))
    where = machine.get("gpu") or f"{machine['cpu']} ({machine['cpu_capability']}), {machine['threads']} threads"
    conditions = [
        where,
        f"batch {', '.join(map(str, batches))}",
        f"{dtypes[0]} unless said" if len(dtypes) > 1 else dtypes[0],
        f"{arguments['runs']} runs in turns" if arguments["runs"] > 1 else "one run",
        *(f"{name} {version}" for name, version in machine["versions"].items()),
        machine["date"][:10],
    ]
    return " · ".join(conditions)


def _colours(methods: dict[str, dict[str, Any]]) -> dict[str, str]:
    """A colour for each method with a line, the same for its bar; other bars are grey."""
    drawn = [spec for spec, entry in methods.items() if entry["accepted_share_of_rounds"]]
    return {
        spec: COLOURS[drawn.index(spec) % len(COLOURS)]
        if spec in drawn
        else BASELINE
        if mark(spec, methods)
        else UNDRAFTED
        for spec in methods
    }


def _draw_speeds(axes: Axes, methods: dict[str, dict[str, Any]], colours: dict[str, str]) -> None:
    """A bar for each method, labelled with the figures of the table."""
    marks = {spec: mark(spec, methods) for spec in methods}
    names = [textwrap.fill(name, 26) + BASELINES[marks[spec]] for spec, name in labels(methods).items()]
    values = [entry["tokens_per_s"]["median"] for entry in methods.values()]
    positions = range(len(methods))
    bars = axes.barh(positions, values, color=list(colours.values()), height=0.72)
    axes.bar_label(bars, [_figures(entry) for entry in methods.values()], padding=4, fontsize=9)
    axes.set_yticks(positions, names, fontsize=9)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e5e5e5")
    axes.set_xlim(0, 1.75 * max(values))
    axes.set_title("Speed", loc="left", fontsize=11)
    compared = "1.00× is AR+ of the same dtype" if any(marks.values()) else ""
    compared += "; in brackets: of the fastest AR+" * has_faster_baselines(methods)
    axes.set_xlabel(f"tokens per second\n{compared}".rstrip(), fontsize=9)


def _draw_lanes(
    axes: Axes, lanes: dict[str, list[tuple[str, float, float]]], methods: dict[str, dict[str, Any]]
) -> None:
    """A timeline of both sides, as in the PEARL paper's Figure 1: gaps are waits."""
    names: list[tuple[float, str]] = []
    for spec, pieces in lanes.items():
        for side, colour in (("target", COLOURS[2]), ("draft", COLOURS[0])):
            y = len(names) + 0.4 * (len(names) // 2)
            names.append((y, f"{textwrap.shorten(labels(methods)[spec], 40)}: {side}"))
            spans = [(begin, end - begin) for which, begin, end in pieces if which == side]
            axes.broken_barh(spans, (y - 0.4, 0.8), facecolors=colour)
    axes.set_yticks([y for y, _ in names], [name for _, name in names], fontsize=8)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e5e5e5")
    axes.set_title("Both sides at work in the first rounds; gaps are waits", loc="left", fontsize=11)
    axes.set_xlabel("milliseconds", fontsize=9)


def _figures(entry: dict[str, Any]) -> str:
    """Such as `2391  1.44× (1.32×)`."""
    text = f"{entry['tokens_per_s']['median']:.0f}"
    if entry["speedup_vs_ar"] is not None:
        text += f"  {entry['speedup_vs_ar']:.2f}×"
    if entry["fastest_baseline"] not in (None, entry["baseline"]):
        text += f" ({entry['speedup_vs_fastest_ar']:.2f}×)"
    return text


def _draw_acceptance(axes: Axes, methods: dict[str, dict[str, Any]], colours: dict[str, str]) -> None:
    """A line for each method that drafts; all rounds are in the denominator."""
    deepest = 1
    for index, (spec, entry) in enumerate(
        (s, entry) for s, entry in methods.items() if entry["accepted_share_of_rounds"]
    ):
        shares = entry["accepted_share_of_rounds"]
        deepest = max(deepest, len(shares))
        axes.plot(
            range(1, len(shares) + 1), [100 * share for share in shares], color=colours[spec], linewidth=1.8,
            linestyle="-" if index < len(COLOURS) else "--", marker=MARKERS[index % len(MARKERS)], markersize=5,
            label=f"{labels(methods)[spec]}: {entry['acceptance_length']:.2f}",
        )  # fmt: skip
    axes.set(ylim=(0, 100), xticks=range(1, deepest + 1, 1 + deepest // 16))
    axes.grid(axis="y", color="#e5e5e5")
    axes.set_title("Rounds that accept at least i drafted tokens", loc="left", fontsize=11)
    axes.set_xlabel("i", fontsize=9)
    axes.set_ylabel("% of all rounds", fontsize=9)
    if axes.lines:
        axes.legend(
            title="tokens per target pass", loc="upper left", bbox_to_anchor=(1.02, 1.0), borderaxespad=0, fontsize=8.5,
            title_fontsize=8.5, frameon=False, alignment="left",
        )  # fmt: skip
