"""Draws bars and lines of a report with HTML and SVG: text stays text, at any width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paradraft.bench.report.page.html import Element

_WIDTH, _HEIGHT = 420, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 42, 8, 10, 38
_COLORS = 8


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One line of a chart.

    Args:
        name: text before the bar.
        value: text after the bar.
        parts: class and length of each part, as shares of the track.
        spread: range of its value, as shares of the track.
    """

    name: Element
    value: Element
    family: str
    parts: Mapping[str, float]
    spread: tuple[float, float] | None = None


def bars(lines: Sequence[Bar]) -> Element:
    """A list of bars. Each has its name and value as text, so the bars themselves are hidden from screen readers."""
    return Element.of("ol", *map(_bar, lines), class_="bars")


def _bar(line: Bar) -> Element:
    fills = [
        Element.of("span", class_=f"fill {name}".strip(), style=f"width:{_percent(length)}")
        for name, length in line.parts.items()
    ]
    if line.spread is not None:
        low, high = line.spread
        style = f"left:{_percent(low)};width:{_percent(high - low)}"
        fills.append(Element.of("span", class_="spread", style=style))
    return Element.of(
        "li",
        Element.of("span", line.name, class_="name"),
        Element.of("span", line.value, class_="value"),
        Element.of("span", *fills, class_="track", aria_hidden="true"),
        class_=line.family,
    )


def _percent(share: float) -> str:
    return f"{100 * min(max(share, 0.0), 1.0):.2f}%"


def lines(series: Mapping[str, Sequence[float]], *, title: str, description: str, across: str, up: str) -> Element:
    """Shares between 0 and 1 by position, one line for each name.

    Args:
        series: values at positions 1, 2, …
        title: of the chart, for screen readers.
    """
    longest = max(map(len, series.values()))
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def x(position: int) -> float:
        return _LEFT + (right - _LEFT) * (position - 0.5) / longest

    def y(value: float) -> float:
        return bottom - (bottom - _TOP) * value

    drawn = []
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        drawn.append(Element.of("line", x1=_LEFT, x2=right, y1=y(value), y2=y(value), class_="grid"))
        drawn.append(Element.of("text", f"{value:.0%}", x=_LEFT - 6, y=y(value) + 4, text_anchor="end"))
    for position in range(1, longest + 1, 1 + longest // 20):
        drawn.append(Element.of("text", str(position), x=f"{x(position):.1f}", y=bottom + 17, text_anchor="middle"))
    drawn.append(Element.of("text", across, x=(_LEFT + right) / 2, y=_HEIGHT - 4, text_anchor="middle"))
    for index, (name, values) in enumerate(series.items()):
        points = [(x(position), y(value)) for position, value in enumerate(values, start=1)]
        drawn.append(
            Element.of(
                "g",
                Element.of("title", name),
                Element.of("polyline", points=" ".join(f"{a:.1f},{b:.1f}" for a, b in points), **_dash(index)),
                *(_mark(index, a, b) for a, b in points),
                class_=_class(index),
            )
        )
    return Element.of(
        "svg",
        Element.of("title", title, id="chart-title"),
        Element.of("desc", f"{description} Across: {across}. Upwards: {up}.", id="chart-desc"),
        *drawn,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_labelledby="chart-title chart-desc",
        class_="chart",
    )


LANES = {"target": "verify", "draft": "draft"}
"""The class that colours each side."""


def lanes(pieces: Sequence[tuple[str, float, float]], *, title: str, unit: str) -> Element:
    """A timeline of two sides, one above the other: gaps are waits.

    Args:
        pieces: side, begin and end of each piece of work.
        title: for screen readers.
    """
    last = max(end for _, _, end in pieces)
    scale, height = (_WIDTH - _LEFT - _RIGHT) / last, 18
    drawn = []
    for index, (side, color) in enumerate(LANES.items()):
        top = index * (height + 4)
        drawn.append(Element.of("text", side, x=_LEFT - 4, y=top + height - 5, text_anchor="end"))
        drawn += [
            Element.of(
                "rect",
                Element.of("title", f"{side}: {begin:.2f} to {end:.2f} {unit}"),
                x=f"{_LEFT + begin * scale:.1f}",
                y=top,
                width=f"{max((end - begin) * scale, 0.5):.1f}",
                height=height,
                class_=f"piece {color}",
            )
            for which, begin, end in pieces
            if which == side
        ]
    bottom = 2 * height + 4
    drawn.append(Element.of("text", f"0 {unit}", x=_LEFT, y=bottom + 14))
    drawn.append(Element.of("text", f"{last:.1f} {unit}", x=_WIDTH - _RIGHT, y=bottom + 14, text_anchor="end"))
    return Element.of(
        "svg", *drawn, viewBox=f"0 0 {_WIDTH} {bottom + 18}", role="img", aria_label=title, class_="chart lanes"
    )


def key(index: int) -> Element:
    """The line and mark of the series with this index, for a legend."""
    return Element.of(
        "svg",
        Element.of("polyline", points="0,6 30,6", **_dash(index)),
        _mark(index, 15, 6),
        viewBox="0 0 30 12",
        class_=_class(index),
        aria_hidden="true",
    )


def _class(index: int) -> str:
    return f"series s{index % _COLORS}"


def _dash(index: int) -> dict[str, str]:
    """Lines differ without colour too: by their marks, and from the ninth on by dashes."""
    return {} if index < _COLORS else {"stroke_dasharray": "5 4"}


def _mark(index: int, x: float, y: float) -> Element:
    r = 3.6
    corners = {
        1: [(-r, -r), (r, -r), (r, r), (-r, r)],
        2: [(0, -1.4 * r), (1.4 * r, 0), (0, 1.4 * r), (-1.4 * r, 0)],
        3: [(0, -1.25 * r), (1.2 * r, r), (-1.2 * r, r)],
    }.get(index % 4)
    if corners is None:
        return Element.of("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=r, class_="mark")
    points = " ".join(f"{x + a:.1f},{y + b:.1f}" for a, b in corners)
    return Element.of("polygon", points=points, class_="mark")
