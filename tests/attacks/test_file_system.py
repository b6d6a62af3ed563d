"""A run on a file system that lacks something goes on without it, or does not begin.

Network and user-space file systems have no O_TMPFILE, FAT has no links. Where none of
those can be mounted, the system call answers as they do.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.disk import SystemDisk, open_nameless, require_able, sweep_nameless
from atoll.errors import DiskError
from atoll.exchange import CoordinatorExchange, Outcome
from atoll.exchange.calls import OutcomeCall, PublishCall
from atoll.security import Role, run_tokens
from atoll.testing.fixtures import plain_settings
from tests.coordinator.large import found, update
from tests.coordinator.serving import line_to, serving

ELEMENTS = 2**19
NO_TMPFILE = [errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL]


def failing(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def without_tmpfile(patch: pytest.MonkeyPatch, number: int) -> None:
    """Let the system answer O_TMPFILE as a file system does that does not have it."""
    inner = os.open

    def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise failing(number)
        return inner(path, flags, *rest, **named)

    patch.setattr(os, "open", refuse)


def without(patch: pytest.MonkeyPatch, module: Any, name: str, number: int) -> None:
    """Let a system call answer as a file system does that does not have it."""

    def refuse(*args: Any, **named: Any) -> None:
        raise failing(number)

    patch.setattr(module, name, refuse)


@pytest.mark.parametrize("number", NO_TMPFILE, ids=errno.errorcode.__getitem__)
def test_a_run_takes_updates_without_tmpfile(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round is committed, and nothing is left in the spool."""
    without_tmpfile(monkeypatch, number)
    with ExitStack() as stack:
        settings = plain_settings(start_islands=1)
        coordinator = stack.enter_context(serving(tmp_path / "run", settings))
        line = stack.enter_context(line_to(coordinator))
        a = CoordinatorExchange(line, key=b"a", nonce=b"1")
        joined, base = found(a, "a", np.zeros(ELEMENTS, np.float32))
        line.call(PublishCall(update(joined, np.ones(ELEMENTS, np.float32), base=base)))
        while not isinstance(line.call(OutcomeCall(0, 1, 2.0)), Outcome):
            continue

        assert list((tmp_path / "run" / "spool").iterdir()) == []


@pytest.mark.parametrize("number", NO_TMPFILE, ids=errno.errorcode.__getitem__)
def test_a_file_without_a_name_needs_no_tmpfile(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be read and written, and its name is gone at once."""
    without_tmpfile(monkeypatch, number)
    handle = open_nameless(tmp_path)
    os.write(handle, b"kept")

    assert os.pread(handle, 9, 0) == b"kept"
    assert list(tmp_path.iterdir()) == []
    assert not require_able(tmp_path).has_tmpfile
    os.close(handle)


def test_a_full_disk_is_not_taken_for_a_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the answers of file systems without O_TMPFILE lead to the other way."""
    without_tmpfile(monkeypatch, errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        open_nameless(tmp_path)


def test_names_that_a_crash_left_are_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash may come between the making of a file and the removal of its name."""
    without_tmpfile(monkeypatch, errno.EOPNOTSUPP)
    with monkeypatch.context() as patch:
        without(patch, os, "unlink", errno.EIO)
        with pytest.raises(OSError, match="Input/output"):
            open_nameless(tmp_path)
    (tmp_path / "mine").touch()
    assert len(list(tmp_path.iterdir())) == 2
    sweep_nameless(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_tokens_are_made_without_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a lock, and the second who asks gets the same."""
    without(monkeypatch, os, "link", errno.EPERM)
    first = run_tokens(tmp_path / "run")

    assert run_tokens(tmp_path / "run") == first
    assert set(first) == set(Role)
    assert not require_able(tmp_path).has_links


@pytest.mark.parametrize(
    ("module", "name", "number", "what"),
    [
        (fcntl, "flock", errno.ENOLCK, "lock files"),
        (fcntl, "flock", errno.EOPNOTSUPP, "lock files"),
        (os, "fsync", errno.EINVAL, "make files durable"),
        (os, "replace", errno.EOPNOTSUPP, "replace files"),
    ],
)
def test_a_run_that_would_not_be_safe_does_not_begin(
    module: Any,
    name: str,
    number: int,
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error says what the file system cannot do, and where it can be had."""
    without(monkeypatch, module, name, number)

    with pytest.raises(DiskError, match=rf"cannot {what} .*Choose a directory on a"):
        SystemDisk(tmp_path)


def test_a_lock_that_is_given_twice_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some user-space file systems let everybody have the lock."""
    monkeypatch.setattr(fcntl, "flock", lambda handle, how: None)

    with pytest.raises(DiskError, match="cannot lock files"):
        SystemDisk(tmp_path)
