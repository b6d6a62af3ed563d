"""Files without names, which are lent again when nobody looks at them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import numpy as np

from atoll.coordinator.spool import (
    KEPT_FILES,
    SMALL_BYTES,
    SpareFiles,
    nameless,
    write_all,
)

SIZE = 2 * SMALL_BYTES


def lent(files: SpareFiles, letter: int, size: int = SIZE) -> np.ndarray:
    """Return a body whose every byte is `letter`."""
    file = files.file(size)
    write_all(file.handle, memoryview(bytes([letter]) * size))
    return np.frombuffer(files.mapped(file, size), np.uint8)


def made(directory: Path) -> tuple[SpareFiles, list[int]]:
    """Return spare files, and the handles of all that were ever made."""
    handles: list[int] = []

    def make() -> int:
        handles.append(nameless(directory))
        return handles[-1]

    return SpareFiles(make), handles


def test_a_file_that_nobody_reads_is_lent_again(tmp_path: Path) -> None:
    """Ten bodies, one after the other, are written to one file."""
    files, handles = made(tmp_path)
    for letter in range(10):
        body = lent(files, letter)
        assert body.min() == body.max() == letter
        del body

    assert len(handles) == 1


def test_any_view_keeps_a_file(tmp_path: Path) -> None:
    """What somebody still looks at is never written over."""
    files, handles = made(tmp_path)
    view = lent(files, 1)[SIZE // 2 :]
    other = lent(files, 2)

    assert len(handles) == 2
    assert view.min() == view.max() == 1
    del view
    third = lent(files, 3)
    assert len(handles) == 2
    assert (other.max(), third.max()) == (2, 3)


def test_a_shorter_body_is_its_own(tmp_path: Path) -> None:
    """Of a file that was longer, the body has its own bytes and no others."""
    files, handles = made(tmp_path)
    lent(files, 1)
    body = lent(files, 2, SIZE - 5)

    assert len(handles) == 1
    assert len(body) == SIZE - 5
    assert body.min() == 2


def test_what_does_not_fit_is_not_lent(tmp_path: Path) -> None:
    """A file that is too small, or more than twice as large, waits for another body."""
    files, handles = made(tmp_path)
    lent(files, 1)
    lent(files, 2, SIZE + 1)
    lent(files, 3, SMALL_BYTES - 1)

    assert len(handles) == 3


def test_only_so_many_files_are_kept(tmp_path: Path) -> None:
    """Beyond that, and with whoever keeps them, they are closed: nothing leaks."""
    files, handles = made(tmp_path)
    bodies = [lent(files, letter) for letter in range(KEPT_FILES + 3)]
    ours = {os.fstat(handle).st_ino for handle in handles}
    bodies.clear()

    assert len(open_files() & ours) == KEPT_FILES
    del files
    assert open_files() & ours == set()


def open_files() -> set[int]:
    """Return the numbers of all files that this process has open."""
    found = set()
    for handle in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # such as the one that lists them
            found.add(os.fstat(int(handle)).st_ino)
    return found
