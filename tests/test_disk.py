"""The machine's own disk: the contract, the lock, and what a failing one says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from atoll.disk import (
    Disk,
    DiskSpace,
    SystemDisk,
)
from atoll.disk.space import RECORDS_BYTES
from atoll.disk.system import BEHIND_BYTES
from atoll.errors import DiskError, DiskFull, NoSuchFile, UsageError
from atoll.testing.disk_contract import DISK_CLAIMS, Claim

HOLD = """
import sys
from atoll.disk import SystemDisk
disk = SystemDisk(sys.argv[1])
disk.append("log/1", b"synced ")
disk.sync("log/1")
disk.append("log/1", b"written")
def parts():
    yield b"half"
    print("held", flush=True)
    sys.stdin.read()
disk.write_new("states/0/7", parts())
"""
REFUSED = """
import os, sys
from atoll.disk import SystemDisk
from atoll.errors import UsageError
if os.getuid() == 0:
    os.setuid(65534)
try:
    SystemDisk(sys.argv[1])
except UsageError as error:
    print(error)
"""
LIMITED = """
import resource, sys
from atoll.disk import SystemDisk
from atoll.errors import DiskFull
disk = SystemDisk(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
for write in (
    lambda: disk.append("log/1", bytes(1500)),
    lambda: disk.write_new("states/0/7", [bytes(600), bytes(600)]),
):
    try:
        write()
    except DiskFull as error:
        print(error)
print(disk.names(""), len(disk.read("log/1")))
"""


def python(code: str, *arguments: object) -> str:
    """Run code in a process of its own and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize("claim", DISK_CLAIMS, ids=lambda claim: claim.__name__)
def test_it_keeps_the_contract(claim: Claim, tmp_path: Path) -> None:
    """A directory does all that the journal asks of a disk."""
    disk = SystemDisk(tmp_path / "run")

    def reopen() -> Disk:
        nonlocal disk
        disk.close()
        disk = SystemDisk(tmp_path / "run")
        return disk

    claim(disk, reopen)
    disk.close()


def test_a_second_owner_is_refused_by_name(tmp_path: Path) -> None:
    """While one owner lives, another is told the number of its process."""
    disk = SystemDisk(tmp_path)

    with pytest.raises(UsageError, match=rf"belongs to process {os.getpid()}, which"):
        SystemDisk(tmp_path)

    disk.close()
    SystemDisk(tmp_path).close()


def test_the_lock_dies_with_its_holder(tmp_path: Path) -> None:
    """A killed owner holds nothing, and leaves no half file in sight."""
    root = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, root],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match=f"belongs to process {holder.pid},"):
            SystemDisk(root)
        assert len(list((root / "states" / "0").iterdir())) == 1

        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()

    disk = SystemDisk(root)
    assert disk.names("") == ["log/1"]
    # A killed process is no power cut: what the system was given is still there.
    assert disk.read("log/1") == b"synced written"
    assert list((root / "states" / "0").iterdir()) == []
    disk.close()


def test_a_closed_disk_does_nothing_more(tmp_path: Path) -> None:
    """Without the lock there is no writing, and closing twice is closing once."""
    disk = SystemDisk(tmp_path)
    disk.append("a", b"x")
    disk.close()
    disk.close()

    with pytest.raises(UsageError, match="is closed"):
        disk.append("a", b"x")
    with pytest.raises(UsageError, match="is closed"):
        disk.names("")


def test_the_lock_is_no_file_of_the_disk(tmp_path: Path) -> None:
    """Nobody reads, lists or overwrites the lock by the port."""
    disk = SystemDisk(tmp_path)

    assert disk.names("") == []
    with pytest.raises(UsageError, match="'lock' is the lock"):
        disk.append("lock", b"x")
    disk.close()


def test_a_disk_without_room_says_so(tmp_path: Path) -> None:
    """Where the system has no room, the error is DiskFull, with the path."""
    disk = SystemDisk(tmp_path)
    (tmp_path / "full").symlink_to("/dev/full")

    with pytest.raises(DiskFull, match=r"No room for .*/full: No space left"):
        disk.append("full", b"x")
    disk.close()


def test_a_limit_on_size_is_a_disk_without_room(tmp_path: Path) -> None:
    """An append that does not fit leaves a part, a whole file leaves nothing."""
    first, second, left = python(LIMITED, tmp_path / "run").splitlines()

    assert first.startswith(f"No room for {tmp_path}/run/log/1: File too large")
    assert second.startswith(f"No room for {tmp_path}/run/states/0/7: File too large")
    # Of 1500 bytes 1000 are allowed.
    assert left == "['log/1'] 1000"


def test_a_directory_that_cannot_be_written_is_the_users_matter(
    tmp_path: Path,
) -> None:
    """Without the right to write, the error names the path and the way out."""
    tmp_path.chmod(0o500)
    said = python(REFUSED, tmp_path / "run")
    tmp_path.chmod(0o700)

    assert f"{tmp_path}" in said
    assert "Permission denied. Give this user the right to write there" in said


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    """A root that is a file is refused as a usage error."""
    (tmp_path / "run").write_text("not a directory")

    with pytest.raises(UsageError, match="choose another directory"):
        SystemDisk(tmp_path / "run")


def test_what_a_disk_fails_at_otherwise_is_a_disk_error(tmp_path: Path) -> None:
    """A directory in a file's place is no file, and no bytes of one."""
    disk = SystemDisk(tmp_path)
    disk.append("a/b", b"x")

    with pytest.raises(DiskError, match=r"The disk failed at .*/a: Is a directory"):
        disk.read("a")
    with pytest.raises(NoSuchFile, match=r"/b/c does not exist"):
        disk.read("b/c")
    disk.close()


@pytest.mark.parametrize("sizes", [(1, 3 * BEHIND_BYTES, 5), (BEHIND_BYTES - 1,) * 4])
def test_a_large_file_is_the_sum_of_its_parts(
    sizes: tuple[int, ...], tmp_path: Path
) -> None:
    """Parts that are cut, and those that are gathered, come out whole and in order."""
    disk = SystemDisk(tmp_path)
    parts = [bytes([1 + n]) * size for n, size in enumerate(sizes)]

    disk.write_new("means/0/1", parts)

    assert disk.read("means/0/1") == b"".join(parts)
    disk.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the advice is one of Linux")
def test_a_large_file_leaves_its_memory_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last file of a directory stays in memory; the one before gives it up."""
    advised: list[int] = []
    advise = os.posix_fadvise

    def noted(handle: int, first: int, size: int, advice: int) -> None:
        advised.append(os.fstat(handle).st_ino)
        advise(handle, first, size, advice)

    monkeypatch.setattr(os, "posix_fadvise", noted)
    disk = SystemDisk(tmp_path)
    large = bytes(2**20)
    disk.write_new("means/0/1", [large])
    disk.write_new("means/1/1", [large])
    disk.write_new("means/0/2", [b"small"])
    disk.write_new("means/0/3", [large])
    disk.write_new("states/0/3", [large])
    assert advised == [(tmp_path / "means/0/1").stat().st_ino]
    disk.remove("means/0/3")
    disk.write_new("means/0/4", [large])

    assert len(advised) == 1  # what is removed has no memory to give
    assert disk.read("means/0/1") == large
    disk.close()


def test_threads_may_write_files_at_once(tmp_path: Path) -> None:
    """Eight threads that need the same new directory all find it, or make it."""
    disk = SystemDisk(tmp_path)

    def write(number: int) -> None:
        disk.write_new(f"departing/{number // 8}/{number}", [b"%d" % number])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(64)))

    for number in range(64):
        assert disk.read(f"departing/{number // 8}/{number}") == b"%d" % number
    disk.close()


def test_a_claim_that_is_not_written_counts_as_written() -> None:
    """Many who come at once do not take the same free bytes."""
    free = [RECORDS_BYTES + 100]
    room = DiskSpace(lambda: free[0])
    with room.claiming(60, purpose="one") as claim:
        with pytest.raises(DiskFull, match=r"no room for two: \d+ bytes are free, "):
            room.require(60, purpose="two")
        claim.wrote(20)
        free[0] -= 20
        room.require(40, purpose="three")
    room.require(80, purpose="four")

    assert room.free_bytes == RECORDS_BYTES + 80


def test_what_is_kept_without_need_gives_way() -> None:
    """It is asked back before anybody is refused, and only then."""
    free, asked = [RECORDS_BYTES], [0]
    room = DiskSpace(lambda: free[0])

    def reclaim() -> None:
        free[0], asked[0] = RECORDS_BYTES + 50, asked[0] + 1

    room.reclaimers.append(reclaim)
    room.require(0, purpose="nothing")
    assert asked == [0]
    room.require(50, purpose="some")
    room.require(50, purpose="some")
    assert asked == [1]
    with pytest.raises(DiskFull, match="51 more are needed"):
        room.require(51, purpose="more")


def test_a_disk_says_how_much_is_free(tmp_path: Path) -> None:
    """As the system does, for this user."""
    disk = SystemDisk(tmp_path / "disk")
    try:
        found = os.statvfs(tmp_path)
        assert 0 < disk.free_bytes() <= found.f_blocks * found.f_frsize
    finally:
        disk.close()
