"""Pictures as inline SVG: no script, no font and no file from elsewhere.

Colours are left to the page: a shape carries a class, never a colour of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

Point = tuple[float, float]

WIDTH = 820
LEFT, RIGHT, TOP, BOTTOM = 48, 166, 14, 34
LABEL_GAP = 17
"""Lines of text closer than this would touch."""


@dataclass(frozen=True)
class Curve:
    """A line with a name at its end."""

    label: str
    points: Sequence[Point]
    style: str
    """The class that gives it its colour."""


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


def chart(
    curves: Sequence[Curve],
    *,
    title: str,
    height: int = 330,
    x_text: Callable[[float], str],
    x_name: str,
) -> str:
    """Return curves over one another, with a name at the end of each."""
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    across = Scale(0.0, max(xs), LEFT, WIDTH - RIGHT)
    margin = 0.06 * (max(ys) - min(ys)) or 0.1
    up = Scale(min(ys) - margin, max(ys) + margin, height - BOTTOM, TOP)
    parts = [_grid(up), _x_axis(across, height, x_text, x_name)]
    parts += [_curve(each, across, up) for each in curves]
    parts += _end_labels(curves, across, up)
    return picture("".join(parts), height=height, title=title)


def picture(inside: str, *, height: float, title: str) -> str:
    """Return an image that scales with the page and tells its title to all readers."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-label="{escape(title)}">{inside}</svg>'
    )


def text(x: float, y: float, words: str, *, style: str = "", anchor: str = "") -> str:
    """Return words at a place; `anchor` is start, middle or end."""
    attributes = f' class="{escape(style)}"' if style else ""
    attributes += f' text-anchor="{escape(anchor)}"' if anchor else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, style: str, tip: str) -> str:
    """Return a rectangle that says more under the pointer."""
    return (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.0):.2f}" '
        f'height="{height:.1f}" class="{escape(style)}">'
        f"<title>{escape(tip)}</title></rect>"
    )


def ticks(low: float, high: float, *, most: int = 6) -> list[float]:
    """Return round numbers between two values, at most so many."""
    if high <= low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough)
    first = math.ceil(low / step - 1e-9)
    return [step * n for n in range(first, math.floor(high / step + 1e-9) + 1)]


def apart(places: Sequence[float], *, gap: float = LABEL_GAP) -> list[float]:
    """Return places in the same order that are at least `gap` from each other."""
    order = sorted(range(len(places)), key=lambda index: places[index])
    moved = list(places)
    for before, after in pairwise(order):
        moved[after] = max(moved[after], moved[before] + gap)
    excess = (moved[order[-1]] - places[order[-1]]) / 2 if order else 0.0
    return [place - excess for place in moved]


def _grid(up: Scale) -> str:
    values = ticks(up.low, up.high)
    digits = 2 if len(values) > 1 and values[1] - values[0] < 0.1 else 1
    return "".join(
        f'<path class="grid" d="M{LEFT} {up(value):.1f}H{WIDTH - RIGHT}"/>'
        + text(LEFT - 8, up(value) + 4, f"{value:.{digits}f}", anchor="end")
        for value in values
    )


def _x_axis(
    across: Scale, height: int, x_text: Callable[[float], str], name: str
) -> str:
    values = ticks(0.0, across.high)
    marks = [
        text(across(value), height - 14, x_text(value), anchor="middle")
        for value in values
    ]
    return "".join(marks) + text(WIDTH - RIGHT + 12, height - 14, name)


def _curve(curve: Curve, across: Scale, up: Scale) -> str:
    places = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in curve.points)
    x, y = curve.points[-1]
    return (
        f'<polyline class="curve {escape(curve.style)}" points="{places}"/>'
        f'<circle class="end {escape(curve.style)}" cx="{across(x):.1f}" '
        f'cy="{up(y):.1f}" r="3.5"/>'
    )


def _end_labels(curves: Sequence[Curve], across: Scale, up: Scale) -> list[str]:
    heights = apart([up(curve.points[-1][1]) for curve in curves])
    # The lowest keeps clear of the axis's name, and takes the others along.
    excess = max(0.0, max(heights) + LABEL_GAP / 2 - up.first)
    heights = [height - excess for height in heights]
    return [
        text(across(curve.points[-1][0]) + 10, y + 4, curve.label, style=curve.style)
        for curve, y in zip(curves, heights, strict=True)
    ]
