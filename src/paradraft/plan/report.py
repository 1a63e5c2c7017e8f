"""A plan as a table and a plot."""

from __future__ import annotations

import io
import textwrap
from pathlib import Path
from typing import Any

from paradraft.bench.report.folding import Column, FoldingTable
from paradraft.files import write_output
from paradraft.plan.predict import PLAIN

TITLE_CHARACTERS = 72
"""Characters per line of a plot's title."""

LEGEND = (
    "> the fastest of its batch size · plain: without a drafter (AR+) · k: tokens drafted per round · length: tokens "
    "per pass of the target · round: ms of draft + verify + rest · vs AR+: predicted, against plain decoding in "
    "batches of the same size"
)
CHECKED = " · checked: vs AR+ as measured · error: predicted / checked - 1"


def table(plan: dict[str, Any], title: str) -> FoldingTable:
    """For each batch size: plain decoding, the fastest way, and the ways checked by a benchmark."""
    is_checked = any(prediction["measured"] is not None for prediction in plan["predictions"])
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
    for prediction in shown(plan):
        cost, measured = plan["costs_ms"][prediction["batch"]][prediction["way"]], prediction["measured"]
        if before not in (None, prediction["batch"]):
            result.add_section()
        before = prediction["batch"]
        way = ("> " if plan["chosen"][prediction["batch"]] == prediction["way"] else "  ") + prediction["way"]
        drafts = measured is not None and prediction["k"]
        checked = (f"{measured['speedup']:.2f}x", f"{prediction['error']:+.0%}") if drafts else ("-", "-")
        result.add_row(
            str(prediction["batch"]),
            way,
            f"{prediction['tokens_per_pass']:.2f}",
            "+".join(f"{cost[part]:.{int(cost[part] < 10)}f}" for part in ("draft", "verify", "rest")),
            f"{prediction['tokens_per_s']:.0f}",
            f"{prediction['speedup']:.2f}x",
            *(checked if is_checked else ()),
            name=way.strip(),
        )
    return result


def break_even(plan: dict[str, Any]) -> list[str]:
    """For each batch size, the acceptance length from which each way is faster than plain decoding.

    That is the time of its rounds over that of a plain round. Of this the target's pass is what remains with a drafter
    that takes no time.

    >>> round_ms = {"draft": 0.0, "verify": 9.0, "rest": 1.0}
    >>> drafted_ms = {"draft": 4.0, "verify": 11.0, "rest": 1.0}
    >>> break_even({"costs_ms": {1: {"plain": round_ms, "k=4": drafted_ms}}})
    ["pays from this acceptance length (without the drafter's time), batch 1: k=4 1.60 (1.20)"]
    """
    found = []
    for batch, of_way in plan["costs_ms"].items():
        plain = _round_ms(of_way[PLAIN.name])
        ways = [
            f"{way} {_round_ms(cost) / plain:.2f} ({(_round_ms(cost) - cost['draft']) / plain:.2f})"
            for way, cost in of_way.items()
            if way != PLAIN.name
        ]
        found.append(f"pays from this acceptance length (without the drafter's time), batch {batch}: {', '.join(ways)}")
    return found


def _round_ms(cost: dict[str, float]) -> float:
    return cost["draft"] + cost["verify"] + cost["rest"]


def shown(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """The predictions in the table, plain decoding first at each batch size."""
    rows = [
        prediction
        for prediction in plan["predictions"]
        if prediction["way"] in (PLAIN.name, plan["chosen"][prediction["batch"]]) or prediction["measured"] is not None
    ]
    return sorted(rows, key=lambda prediction: (prediction["batch"], prediction["tree"] or 0, prediction["k"]))


def plot(plan: dict[str, Any], title: str, file: Path) -> None:
    """Writes a PNG: predicted speedup by K, a line for each batch size; trees as crosses, measurements as rings."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    batches = list(dict.fromkeys(prediction["batch"] for prediction in plan["predictions"]))
    for index, batch in enumerate(batches):
        of_batch, colour = (
            [prediction for prediction in plan["predictions"] if prediction["batch"] == batch],
            f"C{index}",
        )
        chains = sorted(
            (prediction for prediction in of_batch if prediction["tree"] is None),
            key=lambda prediction: prediction["k"],
        )
        trees = [prediction for prediction in of_batch if prediction["tree"] is not None]
        checked = [prediction for prediction in of_batch if prediction["measured"] is not None]
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
