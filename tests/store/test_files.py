"""Files as objects: on a shared file system, without a lock, through crashes."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atoll.errors import NoSuchObject, Unreachable, UsageError
from atoll.store import FileStore, Item, MemoryStore, open_store
from atoll.store.files import STALE_S, TEMPORARY

PROCESSES, RACES = 4, 25


def race(root: str, number: int, turn: int) -> bool:
    return FileStore(Path(root)).put_new(f"race/{turn}", [b"%d" % number])


def test_one_process_of_many_is_first(tmp_path: Path) -> None:
    """Processes that share nothing but a directory agree who was first."""
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        for turn in range(RACES):
            turns = [(str(tmp_path), number, turn) for number in range(PROCESSES)]
            won = pool.starmap(race, turns)
            assert sum(won) == 1
            found = bytes(FileStore(tmp_path).get(f"race/{turn}"))
            assert int(found) == won.index(True)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """Neither by the first nor by who came too late, nor by an overwriting."""
    store = FileStore(tmp_path)
    store.put_new("key", [b"1"])
    store.put_new("key", [b"2"])
    store.put("key", [b"3"])
    assert list((tmp_path / TEMPORARY).iterdir()) == []


def come_and_go(root: str, number: int) -> int:
    store = FileStore(Path(root))
    key, put = f"rounds/7/up/{number}", 0
    for turn in range(50):
        put += store.put_new(key, [b"%d" % turn])
        store.put(key, [b"own"])
        store.remove([key])
    return put


def test_directories_go_with_their_last_object(tmp_path: Path) -> None:
    """While others put theirs there: nothing fails, and nothing is left."""
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        words = [(str(tmp_path), number) for number in range(PROCESSES)]
        assert pool.starmap(come_and_go, words) == [50] * PROCESSES
    assert [each.name for each in tmp_path.iterdir()] == [TEMPORARY]


WRITER = """
import sys
from pathlib import Path
from atoll.store import FileStore

class Parts(list):
    is_counted = False

    def __iter__(self):
        if self.is_counted:
            yield b"x" * 1_000_000
            print("half", flush=True)
            sys.stdin.readline()
        self.is_counted = True

FileStore(Path(sys.argv[1])).put_new("key", Parts())
"""


def test_a_writer_that_is_killed_leaves_no_object(tmp_path: Path) -> None:
    """Its half-written file has no name, and is swept up when it is old."""
    words = [sys.executable, "-c", WRITER, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, **pipes) as writer:  # type: ignore[call-overload]
        assert writer.stdout.readline() == b"half\n"
        writer.send_signal(signal.SIGKILL)
    store = FileStore(tmp_path)
    with pytest.raises(NoSuchObject):
        store.get("key")
    assert store.items("") == []

    left = list((tmp_path / TEMPORARY).iterdir())
    assert len(left) == 1
    old_s = time.time() - STALE_S - 1
    os.utime(left[0], (old_s, old_s))
    FileStore(tmp_path)
    assert list((tmp_path / TEMPORARY).iterdir()) == []


def test_files_of_others_are_no_objects(tmp_path: Path) -> None:
    """A list leaves out what no key of ours can name."""
    store = FileStore(tmp_path)
    store.put_new("ours", [b"1"])
    (tmp_path / "Notes.TXT").write_text("theirs")
    (tmp_path / "~lock").write_text("theirs")
    assert store.items("") == [Item("ours", 1)]


def test_a_directory_that_vanishes_is_told(tmp_path: Path) -> None:
    """It is not the same as an object that is not there."""
    root = tmp_path / "store"
    store = FileStore(root)
    (root / TEMPORARY).rmdir()
    root.rmdir()
    with pytest.raises(Unreachable, match="store"):
        store.get("key")
    with pytest.raises(Unreachable, match="store"):
        store.put_new("key", [b"1"])


def test_a_plain_path_is_a_directory(tmp_path: Path) -> None:
    """A path and its URL are one store; spaces may be escaped."""
    place = tmp_path / "a run"
    open_store(str(place)).put_new("key", [b"1"])
    url = f"file://{tmp_path}/a%20run"
    assert bytes(open_store(url).get("key")) == b"1"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("file://elsewhere/path", "three slashes"),
        ("nowhere://bucket/path", "nowhere"),
        ("s3://", "cannot be opened"),
    ],
)
def test_a_wrong_url_says_what_is_wrong(url: str, said: str) -> None:
    """And nothing is asked of anybody."""
    with pytest.raises(UsageError, match=said):
        open_store(url)


def test_memory_is_not_shared() -> None:
    """Each has its own objects: a store in memory is no rendezvous."""
    MemoryStore().put_new("key", [b"1"])
    assert MemoryStore().items("") == []


def test_a_key_below_which_others_are_is_told_in_our_words(tmp_path: Path) -> None:
    """A bucket could have both; a directory cannot, and nothing raw comes through."""
    store = FileStore(tmp_path)
    store.put_new("a/b", [b"1"])
    with pytest.raises(Unreachable):
        store.put("a", [b"2"])
    store.remove(["a"])

    assert store.items("") == [Item("a/b", 1)]


def test_a_list_that_fails_is_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever finds nothing must be able to trust that nothing is there."""
    store = FileStore(tmp_path)

    def fails(*words: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "scandir", fails)
    with pytest.raises(Unreachable, match="Input/output error"):
        store.items("")
