"""Properties of the terminal: colours, width, and whether output can be redrawn.

There are no colours without a terminal, nor if NO_COLOR is set to any value; a terminal
of type `dumb` has no colours and is not redrawn.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any, TextIO

import typer

WIDTH = 100
"""Width of a page without a terminal."""


def can_redraw(stream: TextIO) -> bool:
    """Return whether output of this stream can be redrawn."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def has_colour() -> bool:
    """Return whether standard output is coloured."""
    return can_redraw(sys.stdout) and not os.environ.get("NO_COLOR")


def painted(text: str, **style: Any) -> str:
    """Return text in a style of typer, if standard output is coloured."""
    return typer.style(text, **style) if has_colour() else text


def width(default: int = WIDTH) -> int:
    """Return the columns of the terminal; `default` without a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else default
