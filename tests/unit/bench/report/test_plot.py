"""The picture of a benchmark: nothing covers anything, and its figures are those of the table."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from paradraft.bench.report.page import read_result
from paradraft.bench.report.plot import draw, plot
from paradraft.bench.result_file import selected
from tests.support.bench_result import ahead, figures, result

ROOT = Path(__file__).parents[4]
GREEDY = ROOT / "benchmarks" / "cpp-greedy_epyc-avx512-2cores_2026-11-22.json"


def drawn(given: dict[str, Any]) -> Figure:
    figure = draw(given)
    figure.draw_without_rendering()
    return figure


@pytest.mark.parametrize("number", [1, 16])
def test_nothing_covers_anything(number: int) -> None:
    """Guards against a legend that lies over the lines, and labels of bars that run out of the picture."""
    given = result()
    given["methods"] |= {f"pard:k={k}:dtype=bfloat16": copy.deepcopy(figures("pard")) for k in range(1, number + 1)}
    given["methods"]["pard:k=4"]["fastest_baseline"] = "another"
    figure = drawn(given)
    speed, acceptance = figure.axes
    legend = acceptance.get_legend()
    assert legend is not None
    area = legend.get_window_extent()
    assert not any(area.overlaps(axes.get_window_extent()) for axes in figure.axes)
    assert not any(area.overlaps(text.get_window_extent()) for text in speed.texts)
    for text in (*speed.texts, *speed.get_yticklabels()):
        box = text.get_window_extent()
        assert figure.bbox.x0 <= box.x0 and box.x1 <= speed.get_window_extent().x1 + 1
    assert area.x1 <= figure.bbox.x1 and area.y0 >= figure.bbox.y0


def test_a_long_title_fits(tmp_path: Path) -> None:
    """Guards against a title that is cut at both ends, and one that tells readers of somebody's folders."""
    given, name = result(), "qwen2.5-coder-1.5b-instruct-" * 8 + "Q4_K_M.gguf"
    given["arguments"]["target"] = f"/home/somebody/models/{name}"
    figure = drawn(given)
    assert figure._suptitle is not None  # type: ignore[attr-defined]  # matplotlib has no other name for it
    box = figure._suptitle.get_window_extent()  # type: ignore[attr-defined]
    assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1
    assert "somebody" not in figure._suptitle.get_text()  # type: ignore[attr-defined]


def test_the_figures_are_those_of_the_table() -> None:
    """Guards the README's picture, which said 1.32x where the table beside it said 1.44x."""
    specs = ["ar", "pard:k=6", "ar:dtype=bfloat16", "pard:k=8:dtype=bfloat16"]
    found = selected(read_result(GREEDY), specs)
    speed, acceptance = draw(found).axes
    assert [text.get_text() for text in speed.texts] == [
        "1661  1.00× (0.91×)", "2391  1.44× (1.32×)", "1815  1.00×", "2945  1.62×",
    ]  # fmt: skip
    names = [text.get_text() for text in speed.get_yticklabels()]
    assert names == ["AR+ (baseline)", "PARD, k=6", "AR+, bfloat16\n(fastest baseline)", "PARD, k=8, bfloat16"]
    (pard, _) = acceptance.lines
    shares = found["methods"]["pard:k=6"]["accepted_share_of_rounds"]
    assert list(pard.get_ydata()) == [100 * share for share in shares]
    assert pard.get_label() == "PARD, k=6: 4.65"


def test_both_sides_are_drawn() -> None:
    """Guards the picture of who waits, which covers nothing else and has all pieces of work."""
    figure = drawn(ahead())
    speed, acceptance, lanes = figure.axes
    legend = acceptance.get_legend()
    assert legend is not None
    areas = [axes.get_window_extent() for axes in (speed, acceptance, lanes)] + [legend.get_window_extent()]
    assert not any(a.overlaps(b) for place, a in enumerate(areas) for b in areas[:place])
    assert [text.get_text() for text in lanes.get_yticklabels()] == [
        "PEARL + PARD, gamma=4: target",
        "PEARL + PARD, gamma=4: draft",
    ]
    assert [len(pieces.get_paths()) for pieces in lanes.collections] == [2, 2]


def test_the_picture_is_small(tmp_path: Path) -> None:
    """Guards the repository against pictures of 200 KB."""
    plot(result(), tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size < 60_000
