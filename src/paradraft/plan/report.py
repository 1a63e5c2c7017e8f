"""A plan as a table and a plot."""

from __future__ import annotations

import io
import textwrap
from pathlib import Path
from typing import Any

from paradraft.bench.folding import Column, FoldingTable
from paradraft.files import write_output
from paradraft.plan.predict import PLAIN

TITLE_CHARACTERS = 72
"""Of a line of a picture's title, as many as there is room for."""

LEGEND = (
    "> the fastest of its batch size · plain: without a drafter (AR+) · k: tokens drafted per round · length: tokens "
    "per pass of the target · round: ms of draft + verify + rest · vs AR+: predicted, against plain decoding in "
    "batches of the same size"
)
CHECKED = " · checked: vs AR+ as measured · error: predicted / checked - 1"


def table(plan: dict[str, Any], title: str) -> FoldingTable:
    """For each batch size plain decoding, the fastest, and what was checked by a benchmark."""
    is_checked = any(one["measured"] is not None for one in plan["predictions"])
    result = FoldingTable(
        title,
        [
            Column(name="batch"),
            Column(name="draft", is_name=True),
            *(Column(name=name) for name in ("length", "round", "tok/s", "vs AR+", *["checked", "error"] * is_checked)),
        ],
        legend=[LEGEND + CHECKED * is_checked],
    )
    before = None
    for one in shown(plan):
        cost, measured = plan["costs_ms"][one["batch"]][one["way"]], one["measured"]
        if before not in (None, one["batch"]):
            result.add_section()
        before = one["batch"]
        way = ("> " if plan["chosen"][one["batch"]] == one["way"] else "  ") + one["way"]
        drafts = measured is not None and one["k"]
        checked = (f"{measured['speedup']:.2f}x", f"{one['error']:+.0%}") if drafts else ("-", "-")
        result.add_row(
            str(one["batch"]),
            way,
            f"{one['tokens_per_pass']:.2f}",
            "+".join(f"{cost[part]:.{int(cost[part] < 10)}f}" for part in ("draft", "verify", "rest")),
            f"{one['tokens_per_s']:.0f}",
            f"{one['speedup']:.2f}x",
            *(checked if is_checked else ()),
            name=way.strip(),
        )
    return result


def shown(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """The predictions that the table has, plain decoding first at each batch size."""
    found = [
        one
        for one in plan["predictions"]
        if one["way"] in (PLAIN.name, plan["chosen"][one["batch"]]) or one["measured"] is not None
    ]
    return sorted(found, key=lambda one: (one["batch"], one["tree"] or 0, one["k"]))


def plot(plan: dict[str, Any], title: str, file: Path) -> None:
    """Writes a PNG: predicted speedup by K, a line for each batch size; trees as crosses, measurements as rings."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    batches = list(dict.fromkeys(one["batch"] for one in plan["predictions"]))
    for number, batch in enumerate(batches):
        of_batch, colour = [one for one in plan["predictions"] if one["batch"] == batch], f"C{number}"
        chains = sorted((one for one in of_batch if one["tree"] is None), key=lambda one: one["k"])
        trees = [one for one in of_batch if one["tree"] is not None]
        checked = [one for one in of_batch if one["measured"] is not None]
        axes.plot(
            [o["k"] for o in chains], [o["speedup"] for o in chains], color=colour, marker=".", label=f"batch {batch}"
        )
        axes.scatter([o["tree"] for o in trees], [o["speedup"] for o in trees], color=colour, marker="x")
        axes.scatter(
            [o["tree"] or o["k"] for o in checked],
            [o["measured"]["speedup"] for o in checked],
            facecolors="none",
            edgecolors=colour,
            s=60,
        )
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set(
        title=textwrap.fill(title, TITLE_CHARACTERS),
        xlabel="tokens drafted per round (lines: chains; crosses: trees; rings: measured)",
        ylabel="speed against plain decoding",
    )  # fmt: skip
    axes.legend()
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    write_output(file, image.getvalue())
