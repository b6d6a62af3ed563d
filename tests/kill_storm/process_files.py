"""Files in which a process of a storm records its work, also if it is killed.

Its counters are in a mapped file: the kernel keeps the bytes written to it when the
process is killed between two instructions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

MARKS = np.dtype(
    [
        ("made", "i8"),  # inner steps, each marked before it is made
        ("dropped", "i8", (2,)),  # steps that it gave up, by fragment and own count
        ("refused", "i8"),  # updates
        ("round", "i8"),
        ("has_joined", "i8"),
    ]
)

Marks = np.ndarray[Any, Any]


def open_marks(folder: Path, process: int) -> Marks:
    """Return the counters of a process, all zero before its first."""
    file = folder / "lives" / f"{process}.marks"
    if not file.exists():
        file.write_bytes(bytes(MARKS.itemsize))
    return np.memmap(file, MARKS, mode="r+", shape=(1,))


def joined_file(folder: Path, process: int) -> Path:
    """Return the file in which a process writes its join reply."""
    return folder / "lives" / f"{process}.joined.json"


def report_file(folder: Path, process: int) -> Path:
    """Return the file in which a process writes its report, if it ends by itself."""
    return folder / "lives" / f"{process}.report.json"


def write(file: Path, value: object) -> None:
    """Write JSON so that a reader sees all of it or nothing."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.rename(file)


def read(file: Path) -> dict[str, Any] | None:
    """Return the JSON of a file, or None if it was never written."""
    if not file.exists():
        return None
    value: dict[str, Any] = json.loads(file.read_text())
    return value
