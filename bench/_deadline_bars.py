"""Grouped bars as a plain SVG: a row per scenario, a panel per measure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

LABEL_PX, PANEL_PX, GAP_PX = 190, 190, 40
BAR_PX, ROW_GAP_PX, TOP_PX = 11, 12, 58
COLOURS = ("#2f81f7", "#d29922", "#2ea5a0", "#a371f7")
TEXT = "#7d8590"
"""A grey that can be read on white and on black."""


@dataclass(frozen=True)
class Panel:
    """One measure: for each row, a value for each bar."""

    title: str
    values: Mapping[str, Sequence[float]]
    form: str

    @property
    def most(self) -> float:
        return max(max(bars) for bars in self.values.values()) or 1.0


def bars(panels: Sequence[Panel], names: Sequence[str]) -> str:
    """Return the picture; `names` are those of the bars of every row."""
    rows = list(panels[0].values)
    row_px = len(names) * BAR_PX + ROW_GAP_PX
    width = LABEL_PX + len(panels) * (PANEL_PX + GAP_PX)
    height = TOP_PX + len(rows) * row_px
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="12" fill="{TEXT}">',
        *_legend(names),
    ]
    for at, row in enumerate(rows):
        middle = TOP_PX + at * row_px + len(names) * BAR_PX / 2 + 4
        lines.append(_text(LABEL_PX - 10, middle, row, anchor="end"))
    for at, panel in enumerate(panels):
        lines += _panel(panel, LABEL_PX + at * (PANEL_PX + GAP_PX), row_px)
    return "\n".join([*lines, "</svg>", ""])


def _legend(names: Sequence[str]) -> Iterator[str]:
    for at, (name, colour) in enumerate(zip(names, COLOURS, strict=True)):
        left = LABEL_PX + 110 * at
        yield f'<rect x="{left}" y="8" width="12" height="12" fill="{colour}"/>'
        yield _text(left + 18, 18, name)


def _panel(panel: Panel, left: int, row_px: int) -> Iterator[str]:
    yield _text(left, TOP_PX - 14, panel.title, weight="bold")
    for at, values in enumerate(panel.values.values()):
        top = TOP_PX + at * row_px
        for index, (value, colour) in enumerate(zip(values, COLOURS, strict=True)):
            y = top + index * BAR_PX
            long = max(1.0, value / panel.most * (PANEL_PX - 30))
            yield (
                f'<rect x="{left}" y="{y}" width="{long:.1f}" '
                f'height="{BAR_PX - 1}" fill="{colour}"/>'
            )
            yield _text(left + long + 4, y + 8, format(value, panel.form), size=9)


def _text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str = "start",
    size: int = 12,
    weight: str = "normal",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'font-weight="{weight}">{escape(words)}</text>'
    )
