"""The mean of several tasks, as the PARD paper's tables have it."""

from __future__ import annotations

import statistics
from typing import Any

from rich import box
from rich.table import Table

from paradraft.bench.report import Summary, label

CAPTION = (
    "tokens/s, and speedup against AR+ of the same dtype, of each task · mean: mean tokens/s, and its ratio to AR+'s"
)


def mean_of(tasks: dict[str, Summary]) -> Summary:
    """For each method the mean of its figures over tasks.

    As in the paper's column "Average" a speedup is the ratio of two mean speeds, not the mean of the ratios. The
    speed to compare with is taken from each task: that method's speed over its own speedup there.

    Args:
        tasks: the summary of each, with the same methods.
    """
    first = next(iter(tasks.values()))
    return {
        spec: {
            "method": one["method"],
            "tokens_per_s": statistics.mean(_speed(summary[spec]) for summary in tasks.values()),
            "speedup_vs_hf": _ratio([summary[spec] for summary in tasks.values()], "speedup_vs_hf"),
            "speedup_vs_ar": _ratio([summary[spec] for summary in tasks.values()], "speedup_vs_ar"),
            "speedup_vs_fastest_ar": _ratio([summary[spec] for summary in tasks.values()], "speedup_vs_fastest_ar"),
            "acceptance_length": _mean([summary[spec]["acceptance_length"] for summary in tasks.values()]),
            "acceptance_length_first_32": _mean(
                [summary[spec]["acceptance_length_first_32"] for summary in tasks.values()]
            ),
            "identical_to_ar": _all([summary[spec]["identical_to_ar"] for summary in tasks.values()]),
        }
        for spec, one in first.items()
    }


def mean_table(tasks: dict[str, Summary], mean: Summary, title: str) -> Table:
    """One line per method: its speed and speedup in each task, and the mean."""
    result = Table(title=title, caption=CAPTION, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    result.add_column("method", overflow="fold")
    for name in (*tasks, "mean"):
        result.add_column(name, justify="right", overflow="fold")
    for spec, one in mean.items():
        cells = [_cell(_speed(summary[spec]), summary[spec]["speedup_vs_ar"]) for summary in tasks.values()]
        result.add_row(label(spec, one), *cells, _cell(one["tokens_per_s"], one["speedup_vs_ar"]))
    return result


def _cell(speed: float, speedup: float | None) -> str:
    return f"{speed:.1f}" + ("" if speedup is None else f" {speedup:.2f}x")


def _speed(figures: dict[str, Any]) -> float:
    return float(figures["tokens_per_s"]["median"])


def _ratio(tasks: list[dict[str, Any]], key: str) -> float | None:
    if any(one[key] is None for one in tasks):
        return None
    return sum(map(_speed, tasks)) / sum(_speed(one) / one[key] for one in tasks)


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if len(known) == len(values) else None


def _all(values: list[bool | None]) -> bool | None:
    return None if any(value is None for value in values) else all(values)
