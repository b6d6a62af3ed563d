"""Text for a terminal: amounts in three digits and a unit, and cells of a table.

A name comes from another machine. It may be wide, and it may hold characters that a
terminal interprets: colours, a cleared screen, a direction of writing. Such characters
are escaped.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace

NO_VALUE = "-"

_SMALL_S = 60


def format_size(value_bytes: float | None) -> str:
    """Return a number of bytes.

    >>> format_size(999), format_size(12_345), format_size(1_200_000_000)
    ('999 B', '12.3 kB', '1.20 GB')
    """
    if value_bytes is None:
        return NO_VALUE
    if abs(value_bytes) < 1000:
        return f"{value_bytes:.0f} B"
    scaled, prefix = _scaled(value_bytes)
    return f"{_three(scaled)} {prefix}B"


def format_count(value: float | None) -> str:
    """Return how many, whole below ten thousand.

    >>> format_count(9_999), format_count(123_456), format_count(20_000_000_000)
    ('9999', '123k', '20.0G')
    """
    if value is None:
        return NO_VALUE
    if abs(value) < 10_000:
        return f"{value:.0f}"
    scaled, prefix = _scaled(value)
    return f"{_three(scaled)}{prefix}"


def format_span(value_s: float | None) -> str:
    """Return a span of time.

    >>> format_span(0.25), format_span(12.4), format_span(75), format_span(10_925)
    ('0.25 s', '12.4 s', '1 min 15 s', '3 h 2 min')
    """
    if value_s is None or not math.isfinite(value_s):
        return NO_VALUE
    if abs(value_s) < _SMALL_S - 0.05:
        return f"{value_s:.1f} s" if abs(value_s) >= 1 else f"{value_s:.2f} s"
    minutes, seconds = divmod(round(value_s), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s")]
    while parts and not parts[0][0]:
        parts.pop(0)
    return " ".join(f"{amount} {unit}" for amount, unit in parts[:2])


def format_brief(value_s: float | None) -> str:
    """Return a span of time in its largest unit.

    >>> format_brief(12.4), format_brief(75), format_brief(7300)
    ('12 s', '75 s', '2 h')
    """
    if value_s is None or not math.isfinite(value_s):
        return NO_VALUE
    for unit_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if abs(value_s) >= 2 * unit_s:
            return f"{value_s / unit_s:.0f} {unit}"
    return f"{value_s:.0f} s"


def format_share(value: float | None) -> str:
    """Return a share in percent.

    >>> format_share(0.0), format_share(0.004), format_share(0.123)
    ('0 %', '<1 %', '12 %')
    """
    if value is None or not math.isfinite(value):
        return NO_VALUE
    return "<1 %" if 0 < value < 0.005 else f"{value:.0%}".replace("%", " %")


def format_bar(share: float, width: int, *, is_ascii: bool = False) -> str:
    """Return a bar of progress without blanks.

    >>> format_bar(0.62, 8), format_bar(0.62, 8, is_ascii=True)
    ('━━━━━───', '#####---')
    """
    full, empty = "#-" if is_ascii else "━─"
    done = math.floor(min(1.0, max(0.0, share)) * width + 0.5)
    # Only a run that is over has a full bar.
    done = min(done, width if share >= 1.0 else width - 1)
    return full * done + empty * (width - done)


def format_trend(values: Sequence[float | None], *, low: float, high: float) -> str:
    """Return a character for each value, by its height between two bounds.

    >>> format_trend([3.0, 2.0, None, 1.0], low=1.0, high=3.0)
    '█▅ ▁'
    """
    height = (high - low) or 1.0
    levels = [
        None if value is None else min(7, max(0, int(8 * (value - low) / height)))
        for value in values
    ]
    return "".join(" " if level is None else "▁▂▃▄▅▆▇█"[level] for level in levels)


def format_loss(value: float | None) -> str:
    """Return a loss with four digits.

    >>> format_loss(1.93), format_loss(12.3456), format_loss(float("nan"))
    ('1.930', '12.35', 'nan')
    """
    if value is None:
        return NO_VALUE
    if not math.isfinite(value):
        return str(value)
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.4g}"


def _scaled(value: float) -> tuple[float, str]:
    for prefix in ("k", "M", "G"):
        value /= 1000
        if abs(value) < 999.5:
            return value, prefix
    return value / 1000, "T"


def _three(value: float) -> str:
    if abs(value) >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


CUT = "…"
MAX_MARKS = 2
"""Marks on one character, such as accents; more are a tower, and left out."""

_UNSAFE = {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"}
_COLOURS = {"red": 31, "green": 32, "yellow": 33, "cyan": 36, "dim": 2, "bold": 1}


@dataclass(frozen=True)
class Cell:
    """One value of a table, and its colour."""

    text: str
    colour: str = ""


def printable(text: object) -> str:
    r"""Return text that can do nothing but be read, in one line.

    >>> print(printable("a\x1b[2Jb"), printable("two\nlines"))
    a\x1b[2Jb two\x0alines
    """
    parts, marks = [], 0
    for character in str(text):
        category = unicodedata.category(character)
        marks = marks + 1 if category in ("Mn", "Me") else 0
        if category in _UNSAFE or (category == "Zs" and character != " "):
            parts.append(_escape(character))
        elif marks <= MAX_MARKS:
            parts.append(character)
    return "".join(parts)


def width_of(text: str) -> int:
    """Return how many cells a terminal gives to a shown text.

    >>> width_of("tokyo"), width_of("東京")
    (5, 4)
    """
    return sum(map(_cells, text))


def cut(text: str, width: int) -> str:
    """Return a printable text cut to `width` cells, with a mark where it is cut.

    >>> cut("tokyo-1", 5), cut("東京一", 4)
    ('toky…', '東…')
    """
    if width_of(text) <= width:
        return text
    prefix, used = "", width_of(CUT)
    for character in text:
        used += _cells(character)
        if used > width:
            break
        prefix += character
    return prefix + CUT if width > 0 else ""


def padded(text: str, width: int, *, is_right: bool = False) -> str:
    """Return a shown text filled up, or cut, to exactly `width` cells."""
    text = cut(text, width)
    space = " " * (width - width_of(text))
    return space + text if is_right else text + space


def wrapped(text: str, width: int) -> list[str]:
    """Return a shown text in lines, broken between words where that can be.

    A number stays with its unit.
    """
    lines = [""]
    for token in re.findall(r"(?:\d\S* (?:s|h|d|min|%|B|[kMGT]B)(?!\w)|\S)+", text):
        for part in _pieces(token, width):
            if lines[-1] and width_of(lines[-1]) + 1 + width_of(part) <= width:
                lines[-1] += " " + part
            elif lines[-1]:
                lines.append(part)
            else:
                lines[-1] = part
    return lines


def painted(text: str, colour: str, *, is_colour: bool) -> str:
    """Return text in a colour, if colours are wanted."""
    if not (is_colour and colour):
        return text
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"


def table(
    rows: Sequence[Sequence[Cell]], *, left_columns: int, min_width: int, width: int
) -> list[list[Cell]]:
    """Return the rows with their cells filled up, two apart in at most `width`.

    Args:
        rows: The first is the head.
        left_columns: The first columns are aligned left, the others right.
        min_width: Of the first column, which is cut to fit; then the line is too wide.
        width: Cells of a line.
    """
    columns = zip(*rows, strict=True)
    widths = [max(width_of(cell.text) for cell in column) for column in columns]
    over = max(0, sum(widths) + 2 * (len(widths) - 1) - width)
    widths[0] = max(min(min_width, widths[0]), widths[0] - over)
    return [
        [
            replace(cell, text=padded(cell.text, wide, is_right=index >= left_columns))
            for index, (cell, wide) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]


def _pieces(token: str, width: int) -> list[str]:
    pieces = [""]
    for character in token:
        if pieces[-1] and width_of(pieces[-1]) + _cells(character) > width:
            pieces.append("")
        pieces[-1] += character
    return pieces


def _cells(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me"):
        return 0
    # The middle and the end of a Korean syllable are drawn into its beginning.
    if "\u1160" <= character <= "\u11ff":
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _escape(character: str) -> str:
    number = ord(character)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
