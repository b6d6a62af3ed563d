"""Contract of every `Disk`, as claims that any adapter's tests can run.

A claim takes an empty disk and `reopen`, which returns a disk over the same files for a
new owner, after the old one has crashed. Run each one on a new disk:

    @pytest.mark.parametrize("claim", DISK_CLAIMS, ids=lambda claim: claim.__name__)
    def test_it_is_a_disk(claim, tmp_path):
        claim(*disk_and_reopen(tmp_path))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from atoll.disk import Disk, check_name
from atoll.errors import NoSuchFile, UsageError
from atoll.testing.fixtures import raises

Reopen = Callable[[], Disk]
Claim = Callable[[Disk, Reopen], None]

WRONG_NAMES = (
    "",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "a/../b",
    "A",
    "a b",
    "a~",
    "é",
    "a\n",
    "a" * 201,
    "/".join(["a" * 99] * 6),
)


def appends_join_end_to_end(disk: Disk, reopen: Reopen) -> None:
    """Appended bytes can be read immediately, in order, with or without syncs."""
    disk.append("log/1", b"one ")
    disk.append("log/1", bytearray(b"two "))
    disk.sync("log/1")
    disk.append("log/1", memoryview(b"three"))

    assert disk.read("log/1") == b"one two three"


def what_was_synced_survives(disk: Disk, reopen: Reopen) -> None:
    """A crash loses no synced bytes, and leaves a prefix of the file."""
    disk.append("log/1", b"kept ")
    disk.sync("log/1")
    disk.append("log/1", b"perhaps")
    disk.append("log/2", b"perhaps not even the file")

    after = reopen()

    assert after.read("log/1").startswith(b"kept ")
    assert set(after.names("log/")) <= {"log/1", "log/2"}


def a_sync_reaches_a_file_that_another_owner_left(disk: Disk, reopen: Reopen) -> None:
    """A new owner can sync the files of the old one, and append to them."""
    disk.append("log/1", b"found ")
    disk.sync("log/1")
    second = reopen()
    second.sync("log/1")
    second.append("log/1", b"more")
    second.sync("log/1")

    assert reopen().read("log/1") == b"found more"


def a_new_file_is_complete_and_durable(disk: Disk, reopen: Reopen) -> None:
    """A file of `write_new` survives a crash without a sync, also with empty parts."""
    disk.write_new("states/0/7", [b"ab", memoryview(b""), bytearray(b"cd")])
    disk.write_new("states/0/8", [])

    after = reopen()

    assert after.read("states/0/7") == b"abcd"
    assert after.read("states/0/8") == b""
    assert after.names("states/") == ["states/0/7", "states/0/8"]


def a_name_is_written_once(disk: Disk, reopen: Reopen) -> None:
    """Neither a file of `write_new` nor an appended one is ever overwritten."""
    disk.write_new("a", [b"first"])
    disk.append("b", b"first")

    for name in ("a", "b"):
        with raises(UsageError):
            disk.write_new(name, [b"second"])
        assert disk.read(name) == b"first"


def a_file_whose_parts_fail_is_absent(disk: Disk, reopen: Reopen) -> None:
    """An error of the parts passes through, and the name is free again."""
    with raises(_PartsFailed):
        disk.write_new("states/0/7", _failing_parts())

    assert disk.names("") == []
    disk.write_new("states/0/7", [b"second try"])
    assert disk.read("states/0/7") == b"second try"


def a_whole_file_can_be_appended_to(disk: Disk, reopen: Reopen) -> None:
    """Appends follow the content of `write_new`, and become durable by a sync."""
    disk.write_new("log/1", [b"head "])
    disk.append("log/1", b"tail")
    disk.sync("log/1")

    assert reopen().read("log/1") == b"head tail"


def ranges_end_where_the_file_ends(disk: Disk, reopen: Reopen) -> None:
    """A read returns the bytes up to the end of the file, and none beyond."""
    disk.write_new("a", [b"0123456789"])

    assert disk.read("a", 3, 4) == b"3456"
    assert disk.read("a", 8, 4) == b"89"
    assert disk.read("a", 10, 4) == b""
    assert disk.read("a", 99, 4) == b""
    assert disk.read("a", 4) == b"456789"
    assert disk.read("a", 4, 0) == b""


def what_is_absent_cannot_be_read(disk: Disk, reopen: Reopen) -> None:
    """Reading or syncing a file that does not exist raises `NoSuchFile`."""
    with raises(NoSuchFile):
        disk.read("a")
    with raises(NoSuchFile):
        disk.read("deep/er/a", 0, 1)
    with raises(NoSuchFile):
        disk.sync("a")

    assert disk.names("") == []


def names_are_found_by_prefix(disk: Disk, reopen: Reopen) -> None:
    """A prefix is a prefix of the path, and need not end at a slash."""
    for name in ("means/1/10", "means/1/9", "means/10/1", "log", "means-too"):
        disk.append(name, b"x")

    assert disk.names("means/1/") == ["means/1/10", "means/1/9"]
    assert disk.names("means/1") == ["means/1/10", "means/1/9", "means/10/1"]
    assert disk.names("means") == [
        "means-too",
        "means/1/10",
        "means/1/9",
        "means/10/1",
    ]
    assert disk.names("absent/") == []
    assert len(disk.names("")) == 5


def removing_frees_the_name(disk: Disk, reopen: Reopen) -> None:
    """A removed file does not exist for its owner; removing it again is no error."""
    disk.append("a", b"old")
    disk.remove("a")
    disk.remove("a")
    disk.remove("never/there")

    assert disk.names("") == []
    with raises(NoSuchFile):
        disk.read("a")
    disk.append("a", b"new")
    disk.sync("a")
    assert reopen().read("a") == b"new"


def wrong_names_are_refused(disk: Disk, reopen: Reopen) -> None:
    """No name leads outside of the disk, or looks like an unfinished file."""
    for name in WRONG_NAMES:
        with raises(UsageError):
            check_name(name)
        for act in (
            lambda name: disk.append(name, b"x"),
            lambda name: disk.write_new(name, [b"x"]),
            disk.sync,
            disk.read,
            disk.remove,
        ):
            with raises(UsageError):
                act(name)

    assert disk.names("") == []
    disk.append(check_name("a_b-c.d/" + "e" * 200), b"x")


DISK_CLAIMS: tuple[Claim, ...] = (
    appends_join_end_to_end,
    what_was_synced_survives,
    a_sync_reaches_a_file_that_another_owner_left,
    a_new_file_is_complete_and_durable,
    a_name_is_written_once,
    a_file_whose_parts_fail_is_absent,
    a_whole_file_can_be_appended_to,
    ranges_end_where_the_file_ends,
    what_is_absent_cannot_be_read,
    names_are_found_by_prefix,
    removing_frees_the_name,
    wrong_names_are_refused,
)


class _PartsFailed(Exception):
    pass


def _failing_parts() -> Iterator[bytes]:
    yield b"half a file"
    raise _PartsFailed
