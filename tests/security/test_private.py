"""Files that only their user may read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from atoll.errors import CorruptError, NoSuchFile, UsageError
from atoll.security.private_files import (
    make_private,
    private_directory,
    read_private,
    remove_private,
    replace_private,
)


def mode(path: Path) -> int:
    """Return the permission bits of a file."""
    return stat.S_IMODE(path.stat().st_mode)


def read(path: Path) -> bytes:
    """Read a file as a token would be."""
    return read_private(path, content="token", max_bytes=8)


def test_a_file_is_private_whatever_the_umask(tmp_path: Path) -> None:
    """Neither a new file, a replaced one nor a new directory is open to others."""
    before = os.umask(0)
    try:
        directory = private_directory(tmp_path / "a" / "b")
        make_private(directory / "made", b"1")
        replace_private(directory / "put", b"2")
        replace_private(directory / "put", b"3")
    finally:
        os.umask(before)

    assert mode(directory) == mode(tmp_path / "a") == 0o700
    assert mode(directory / "made") == mode(directory / "put") == 0o600
    assert sorted(os.listdir(directory)) == ["made", "put"]
    assert read(directory / "put") == b"3"


def test_the_first_to_make_a_file_wins(tmp_path: Path) -> None:
    """What is there stays, and who came later is told."""
    path = tmp_path / "key"

    assert make_private(path, b"first")
    assert not make_private(path, b"second")
    assert read(path) == b"first"
    assert os.listdir(tmp_path) == ["key"]


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o620, 0o602, 0o610, 0o666])
def test_a_file_that_others_may_touch_is_refused(tmp_path: Path, bits: int) -> None:
    """The message says how to mend it."""
    path = tmp_path / "key"
    make_private(path, b"1")
    path.chmod(bits)

    with pytest.raises(UsageError, match=rf"mode {bits:03o}.*token.*chmod 600 .*key"):
        read(path)


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    """The message says how to mend it."""
    tmp_path.chmod(0o755)

    with pytest.raises(UsageError, match=r"mode 755.*chmod 700"):
        private_directory(tmp_path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """A pipe is not waited for, a directory not read, an absent file named."""
    os.mkfifo(tmp_path / "pipe", 0o600)

    with pytest.raises(UsageError, match="Give a file"):
        read(tmp_path / "pipe")
    with pytest.raises(UsageError):
        read(tmp_path)
    with pytest.raises(NoSuchFile, match="absent does not exist"):
        read(tmp_path / "absent")


def test_a_file_of_any_length_is_not_read_whole(tmp_path: Path) -> None:
    """What is longer than the thing can be is not the thing."""
    make_private(tmp_path / "key", b"123456789")

    with pytest.raises(CorruptError, match="more than 8 bytes"):
        read(tmp_path / "key")


def test_a_removed_file_is_gone(tmp_path: Path) -> None:
    """Removing again says that nothing was there."""
    make_private(tmp_path / "key", b"1")

    assert remove_private(tmp_path / "key")
    assert not remove_private(tmp_path / "key")
    assert os.listdir(tmp_path) == []


def test_a_failed_writing_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    """A directory in the way stops the renaming, after all was written."""
    (tmp_path / "key" / "inside").mkdir(parents=True)

    with pytest.raises(UsageError, match="Choose a place"):
        replace_private(tmp_path / "key", b"1")
    assert os.listdir(tmp_path) == ["key"]
