"""Text in the cells of a terminal: how wide it is, and nothing that it could do there.

A name comes from another machine. It may be wide, and it may hold what a terminal
obeys: colours, a cleared screen, a direction of writing. Such characters are shown by
their numbers.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace

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


def shown(text: object) -> str:
    r"""Return text that can do nothing but be read, in one line.

    >>> print(shown("a\x1b[2Jb"), shown("two\nlines"))
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


def cells(text: str) -> int:
    """Return how many cells a terminal gives to a shown text.

    >>> cells("tokyo"), cells("東京")
    (5, 4)
    """
    return sum(map(_cells, text))


def cut(text: str, width: int) -> str:
    """Return as much of a shown text as fits, with a mark where it is cut.

    >>> cut("tokyo-1", 5), cut("東京一", 4)
    ('toky…', '東…')
    """
    if cells(text) <= width:
        return text
    kept, used = "", cells(CUT)
    for character in text:
        used += _cells(character)
        if used > width:
            break
        kept += character
    return kept + CUT if width > 0 else ""


def padded(text: str, width: int, *, is_right: bool = False) -> str:
    """Return a shown text filled up, or cut, to exactly `width` cells."""
    text = cut(text, width)
    space = " " * (width - cells(text))
    return space + text if is_right else text + space


def wrapped(text: str, width: int) -> list[str]:
    """Return a shown text in lines, broken between words where that can be.

    A number stays with its unit.
    """
    lines = [""]
    for word in re.findall(r"(?:\d\S* (?:s|h|d|min|%|B|[kMGT]B)(?!\w)|\S)+", text):
        for part in _pieces(word, width):
            if lines[-1] and cells(lines[-1]) + 1 + cells(part) <= width:
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
    rows: Sequence[Sequence[Cell]], *, left: int, least: int, width: int
) -> list[list[Cell]]:
    """Return the rows with their cells filled up, two apart in at most `width`.

    Args:
        rows: The first is the head.
        left: So many columns stand to the left, the others to the right.
        least: The first column is cut to fit, but not below this; then it is too wide.
        width: Of a line.
    """
    columns = zip(*rows, strict=True)
    widths = [max(cells(cell.text) for cell in column) for column in columns]
    over = max(0, sum(widths) + 2 * (len(widths) - 1) - width)
    widths[0] = max(min(least, widths[0]), widths[0] - over)
    return [
        [
            replace(cell, text=padded(cell.text, wide, is_right=at >= left))
            for at, (cell, wide) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]


def _pieces(word: str, width: int) -> list[str]:
    pieces = [""]
    for character in word:
        if pieces[-1] and cells(pieces[-1]) + _cells(character) > width:
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
