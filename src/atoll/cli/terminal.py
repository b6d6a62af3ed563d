"""What the terminal bears, if there is one: colours, a width, drawing over.

Colours are left out where nobody sees them, and where NO_COLOR is set to anything; a
terminal that calls itself dumb gets neither them nor anything drawn over.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any, TextIO

import typer

WIDTH = 100
"""Of a page that no terminal shows."""


def can_redraw(stream: TextIO) -> bool:
    """Say whether what was written there can be drawn over."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def has_colour() -> bool:
    """Say whether standard output is to be coloured."""
    return can_redraw(sys.stdout) and not os.environ.get("NO_COLOR")


def painted(text: str, **style: Any) -> str:
    """Return text in a style of typer's, if there is colour at all."""
    return typer.style(text, **style) if has_colour() else text


def width(usual: int = WIDTH) -> int:
    """Return how many columns there are; `usual` where there is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else usual
