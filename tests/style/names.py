"""Assigned names without content."""

from __future__ import annotations

from pathlib import Path

from tests.style.prose import Hit
from tests.style.tree import assigned_names
from tests.style.words import hint_of


def name_hits(file: Path) -> list[Hit]:
    """Return the assigned names of a Python file that have no content."""
    return [
        Hit(file, assigned.line, f"name `{assigned.name}`", hint)
        for assigned in assigned_names(file)
        if (hint := hint_of(assigned.name, is_pair=assigned.is_pair))
    ]
