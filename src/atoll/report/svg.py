"""Charts as SVG: curves, bars, lanes and the matrix of marks.

Rule 1: colours are left to the page: a shape has a class, and no colour.
Rule 2: text from elsewhere, such as an island's name, is escaped.
Rule 3: a chart is drawn twice, for wide and for narrow screens; the page shows one of
them, so that text is never scaled down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise

Coordinates = tuple[float, float]

Block = tuple[float, float, float, str, str]
"""Part of a lane: start, end, share of the height, class and tip."""

WIDE, NARROW = 820, 380
TOP_MARGIN, BOTTOM_MARGIN, AXIS_MARGIN = 14, 34, 48
LABEL_GAP = 17
"""Lines of text closer than this would touch."""

MAX_LABELS = 12
"""Curves with a name at the end, at most."""


@dataclass(frozen=True)
class Curve:
    """A line with a name at its end."""

    label: str
    points: Sequence[Coordinates]
    style: str
    """The class that gives it its colour."""


@dataclass(frozen=True)
class Band:
    """An area between two curves over the same positions."""

    low: Sequence[Coordinates]
    high: Sequence[Coordinates]
    style: str


@dataclass(frozen=True)
class Bar:
    """One amount of a bar chart."""

    label: str
    amount: float
    text: str
    style: str


@dataclass(frozen=True)
class Lane:
    """One row of a chart over time: shares of its height, with a tip each."""

    label: str
    blocks: Sequence[Block]

    text: str = ""
    """At the end of the row."""


@dataclass(frozen=True)
class Scale:
    """Where a value lies on the page."""

    low: float
    high: float
    first: float
    last: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return self.first + share * (self.last - self.first)


def twice(draw: Callable[[int], str]) -> str:
    """Return a chart as drawn for wide and for narrow screens."""
    wide, narrow = draw(WIDE), draw(NARROW)
    return f'<div class="wide">{wide}</div>\n<div class="narrow">{narrow}</div>'


def curve_chart(
    curves: Sequence[Curve],
    width: int,
    *,
    title: str,
    height: int = 330,
    x_text: Callable[[float], str],
    x_name: str,
    band: Band | None = None,
    lines: Sequence[tuple[float, str]] = (),
) -> str:
    """Return curves over one another, with a name at the end of each.

    Args:
        band: An area below the curves.
        lines: Positions and tips of vertical lines.
    """
    labels = [curve.label for curve in curves[-MAX_LABELS:]]
    line_end = width - 14 - max([80, *(8 * len(text) for text in labels)])
    points = [point for curve in curves for point in curve.points]
    points += [*band.low, *band.high] if band else []
    across = Scale(0.0, max(x for x, _ in points), AXIS_MARGIN, line_end)
    low, high = min(y for _, y in points), max(y for _, y in points)
    margin = 0.06 * (high - low) or 0.1
    up = Scale(low - margin, high + margin, height - BOTTOM_MARGIN, TOP_MARGIN)
    parts = [_grid(up, line_end), _x_axis(across, height, x_text, x_name)]
    if band:
        parts.append(_band(band, across, up))
    parts += [_line(across(value), up, tip) for value, tip in lines]
    parts += [_curve(curve, across, up) for curve in curves]
    parts += _end_labels(curves[-MAX_LABELS:], across, up)
    return picture("".join(parts), width, height, title)


def bar_chart(bars: Sequence[Bar], width: int, *, title: str) -> str:
    """Return amounts as bars of one measure."""
    height, gap = 30, 18
    left, right = (150, width - 90) if width == WIDE else (118, width - 78)
    across = Scale(0.0, max(bar.amount for bar in bars), left, right)
    parts = []
    for number, bar in enumerate(bars):
        y, wide = number * (height + gap), max(2.0, across(bar.amount) - left)
        tip = f"{bar.label}: {bar.text}"
        parts.append(text(left - 12, y + 20, bar.label, anchor="end", style="name"))
        parts.append(box(left, y, wide, height, f"bar {bar.style}", tip))
        parts.append(text(left + wide + 10, y + 20, bar.text, style="figure"))
    return picture("".join(parts), width, len(bars) * (height + gap) - gap, title)


def lane_chart(
    lanes: Sequence[Lane],
    width: int,
    *,
    title: str,
    end: float,
    x_text: Callable[[float], str],
    lines: Sequence[tuple[float, str]] = (),
) -> str:
    """Return a row for each lane over the same time, from 0 to `end`."""
    tall, gap = (22, 8) if len(lanes) <= MAX_LABELS else (9, 3)
    left, right = _lane_margins(lanes, width)
    across = Scale(0.0, end, left, right)
    parts = []
    for number, lane in enumerate(lanes):
        y = number * (tall + gap)
        parts.append(_lane_name(lane.label, left - 10, y + tall / 2 + 4))
        parts.append(
            f'<rect class="ground" x="{left}" y="{y}" width="{right - left:.0f}" '
            f'height="{tall}"/>'
        )
        for first, last, share, style, tip in lane.blocks:
            x, wide, high = across(first), across(last) - across(first), share * tall
            parts.append(box(x, y + tall - high, max(wide, 0.8), high, style, tip))
        parts.append(text(right + 8, y + tall / 2 + 4, lane.text, style="figure"))
    bottom = len(lanes) * (tall + gap)
    parts += [
        f'<path class="mark-line" d="M{across(value):.1f} 0V{bottom}">'
        f"<title>{escape(tip)}</title></path>"
        for value, tip in lines
    ]
    for value in ticks(0.0, end, max_ticks=7 if width == WIDE else 4):
        label = text(across(value), bottom + 14, x_text(value), anchor="middle")
        parts.append(label)
    return picture("".join(parts), width, bottom + 22, title)


def mark_chart(
    names: Sequence[str],
    columns: Sequence[str],
    width: int,
    *,
    title: str,
    styles: dict[str, str],
    first: str,
    last: str,
) -> str:
    """Return the matrix of marks: a row for each name, a column for each text.

    Args:
        styles: The class of each mark; a mark without one is left empty.
        first: The text below the first column.
        last: The text below the last column.
    """
    tall, gap = (18, 5) if len(names) <= MAX_LABELS else (8, 1)
    left, right = _name_margin(names, width), width - 8
    step = (right - left) / max(1, len(columns))
    parts = []
    for row, name in enumerate(names):
        y = row * (tall + gap)
        parts.append(_lane_name(name, left - 10, y + tall / 2 + 4))
        marks = "".join(column[row : row + 1] or " " for column in columns)
        for style, path in _runs(marks, styles, left, y + tall / 2, step):
            parts.append(f'<path class="{style}" stroke-width="{tall}" d="{path}"/>')
    bottom = len(names) * (tall + gap) + 14
    parts.append(text(left, bottom, first))
    parts.append(text(right, bottom, last, anchor="end"))
    return picture("".join(parts), width, bottom + 8, title)


def _runs(
    marks: str, styles: dict[str, str], first_x: float, y: float, step: float
) -> Iterator[tuple[str, str]]:
    """Yield a class and one path for all its runs of equal marks in a row."""
    paths: dict[str, list[str]] = {}
    begin = 0
    for mark, run in groupby(marks):
        size = len(list(run))
        if mark in styles:
            x, wide = first_x + begin * step, max(size * step - 0.3, 0.3)
            paths.setdefault(styles[mark], []).append(f"M{x:.1f} {y:g}h{wide:.1f}")
        begin += size
    for style, parts in paths.items():
        yield style, "".join(parts)


def picture(inside: str, width: int, height: float, title: str) -> str:
    """Return an image that scales with the page, with an accessible title."""
    return (
        f'<svg viewBox="0 0 {width} {height:.0f}" role="img" '
        f'aria-label="{escape(title)}">{inside}</svg>'
    )


def text(x: float, y: float, shown: str, *, style: str = "", anchor: str = "") -> str:
    """Return text at a position; `anchor` is start, middle or end."""
    attributes = f' class="{escape(style)}"' if style else ""
    attributes += f' text-anchor="{escape(anchor)}"' if anchor else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(shown)}</text>'


def box(x: float, y: float, width: float, height: float, style: str, tip: str) -> str:
    """Return a rectangle with a tooltip."""
    return (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.0):.2f}" '
        f'height="{height:.1f}" class="{escape(style)}">'
        f"<title>{escape(tip)}</title></rect>"
    )


def ticks(low: float, high: float, *, max_ticks: int = 6) -> list[float]:
    """Return at most `max_ticks` round numbers between two values."""
    if high <= low:
        return [low]
    rough = (high - low) / max_ticks
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough)
    first = math.ceil(low / step - 1e-9)
    return [step * n for n in range(first, math.floor(high / step + 1e-9) + 1)]


def apart(positions: Sequence[float], *, gap: float = LABEL_GAP) -> list[float]:
    """Return positions in the same order that are at least `gap` from each other."""
    order = sorted(range(len(positions)), key=lambda index: positions[index])
    moved = list(positions)
    for before, after in pairwise(order):
        moved[after] = max(moved[after], moved[before] + gap)
    excess = (moved[order[-1]] - positions[order[-1]]) / 2 if order else 0.0
    return [position - excess for position in moved]


def _name_margin(names: Sequence[str], width: int) -> int:
    longest = max((min(len(name), MAX_NAME) for name in names), default=0)
    return min(24 + 7 * longest, width // 3)


def _lane_margins(lanes: Sequence[Lane], width: int) -> tuple[int, int]:
    tail = max((len(lane.text) for lane in lanes), default=0)
    return _name_margin([lane.label for lane in lanes], width), width - 14 - 7 * tail


MAX_NAME = 24


def _lane_name(name: str, x: float, y: float) -> str:
    shown = name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…"
    return text(x, y, shown, anchor="end", style="name")


def _grid(up: Scale, end: float) -> str:
    values = ticks(up.low, up.high)
    digits = 2 if len(values) > 1 and values[1] - values[0] < 0.1 else 1
    return "".join(
        f'<path class="grid" d="M{AXIS_MARGIN} {up(value):.1f}H{end:.0f}"/>'
        + text(AXIS_MARGIN - 8, up(value) + 4, f"{value:.{digits}f}", anchor="end")
        for value in values
    )


def _x_axis(
    across: Scale, height: int, x_text: Callable[[float], str], name: str
) -> str:
    max_ticks = 6 if across.last - across.first > 400 else 3
    marks = [
        text(across(value), height - 14, x_text(value), anchor="middle")
        for value in ticks(0.0, across.high, max_ticks=max_ticks)
        if value < 0.97 * across.high
    ]
    return "".join(marks) + text(across.last + 12, height - 14, name)


def _path(points: Sequence[Coordinates], across: Scale, up: Scale) -> str:
    return " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)


def _band(band: Band, across: Scale, up: Scale) -> str:
    outline = _path([*band.high, *reversed(band.low)], across, up)
    return f'<polygon class="{escape(band.style)}" points="{outline}"/>'


def _line(x: float, up: Scale, tip: str) -> str:
    return (
        f'<path class="mark-line" d="M{x:.1f} {up.first:.0f}V{up.last:.0f}">'
        f"<title>{escape(tip)}</title></path>"
    )


def _curve(curve: Curve, across: Scale, up: Scale) -> str:
    points = _path(curve.points, across, up)
    x, y = curve.points[-1]
    return (
        f'<polyline class="curve {escape(curve.style)}" points="{points}"/>'
        f'<circle class="end {escape(curve.style)}" cx="{across(x):.1f}" '
        f'cy="{up(y):.1f}" r="3.5"/>'
    )


def _end_labels(curves: Sequence[Curve], across: Scale, up: Scale) -> list[str]:
    heights = apart([up(curve.points[-1][1]) for curve in curves])
    # The lowest keeps clear of the axis's name, and takes the others along.
    excess = max(0.0, max(heights, default=0.0) + LABEL_GAP / 2 - up.first)
    return [
        text(
            across.last + 12,
            y - excess + 4,
            curve.label,
            style=curve.style,
        )
        for curve, y in zip(curves, heights, strict=True)
    ]
