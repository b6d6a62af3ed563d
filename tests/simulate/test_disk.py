"""A disk that loses what a power cut may lose, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.disk import Disk
from atoll.errors import DiskFull, NoSuchFile, UsageError
from atoll.simulate import ProcessDead, SimDisk, SimWorld
from atoll.testing.disk_contract import DISK_CLAIMS, Claim

SEEDS = range(40)

Act = tuple[str, str, int]

acts = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "append", "sync", "write", "remove"]),
        st.sampled_from(["a", "b", "log/1"]),
        st.integers(0, 9),
    ),
    max_size=25,
)


def seeded(seed: int) -> SimDisk:
    return SimDisk(rng=random.Random(seed))


def reopened(disk: SimDisk) -> Callable[[], Disk]:
    """Return what gives the same disk to a new owner after a crash."""

    def reopen() -> Disk:
        disk.crash()
        return disk

    return reopen


@pytest.mark.parametrize("claim", DISK_CLAIMS, ids=lambda claim: claim.__name__)
def test_it_is_a_disk(claim: Claim) -> None:
    """The simulated disk passes the contract of all disks, whatever a crash draws."""
    for seed in SEEDS:
        disk = seeded(seed)
        claim(disk, reopened(disk))


class Model:
    """What each name may hold after a power cut, worked out from the calls alone."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.possible: dict[str, set[bytes | None]] = {}

    def perform(self, disk: SimDisk, act: Act) -> None:
        what, name, number = act
        data = bytes([65 + number]) * number
        if what == "append":
            disk.append(name, data)
            before = self.content.get(name)
            self.content[name] = (before or b"") + data
            possible = self.possible.setdefault(name, {None})
            ends = range(len(before or b""), len(self.content[name]) + 1)
            possible |= {self.content[name][:end] for end in ends}
        elif what == "sync" and name in self.content:
            disk.sync(name)
            self.possible[name] = {self.content[name]}
        elif what == "write" and name not in self.content:
            disk.write_new(name, [data, data])
            self.content[name] = data + data
            self.possible[name] = {data + data}
        elif what == "remove":
            disk.remove(name)
            self.content.pop(name, None)
            self.possible.setdefault(name, set()).add(None)


@settings(max_examples=200)
@given(acts, st.integers(0, 2**32))
def test_a_power_cut_keeps_what_was_synced_and_invents_nothing(
    calls: list[Act], seed: int
) -> None:
    """After a power cut each file is one of those that its own calls allow."""
    disk, model = seeded(seed), Model()
    for act in calls:
        model.perform(disk, act)
    assert files(disk) == model.content

    disk.crash(is_power_cut=True)

    left = disk.names("")
    for name, possible in model.possible.items():
        assert (disk.read(name) if name in left else None) in possible
    assert set(left) <= set(model.possible)


@given(acts, st.integers(0, 2**32))
def test_a_mere_crash_loses_nothing_and_makes_nothing_durable(
    calls: list[Act], seed: int
) -> None:
    """The cache outlives a process, and a later power cut may lose it still."""
    disk, model = seeded(seed), Model()
    for act in calls:
        model.perform(disk, act)

    disk.crash(is_power_cut=False)
    assert files(disk) == model.content

    disk.crash(is_power_cut=True)
    left = disk.names("")
    for name, possible in model.possible.items():
        assert (disk.read(name) if name in left else None) in possible


def test_every_kind_of_loss_occurs() -> None:
    """Unsynced appends are lost wholly, in part, torn or not at all: file by file."""
    ends: set[tuple[str, str]] = set()
    for seed in range(200):
        disk = seeded(seed)
        for name in ("a", "b"):
            disk.append(name, b"....")
            disk.sync(name)
            disk.append(name, b"1111")
            disk.append(name, b"2222")
        disk.crash(is_power_cut=True)
        ends.add((disk.read("a")[4:].decode(), disk.read("b")[4:].decode()))

    alone = {left for left, _ in ends}
    assert {"", "1111", "11112222"} <= alone
    assert any(len(left) % 4 for left in alone)  # torn within an append
    assert ("", "11112222") in ends  # the later file survives, the earlier does not


def test_a_removed_file_may_come_back() -> None:
    """A removal is not durable; an unsynced file that was removed never returns."""
    seen = set()
    for seed in SEEDS:
        disk = seeded(seed)
        disk.write_new("old", [b"durable"])
        disk.append("new", b"never synced")
        disk.remove("old")
        disk.remove("new")
        disk.crash(is_power_cut=True)
        seen.add(tuple(disk.names("")))

    assert seen == {(), ("old",)}


def test_a_name_made_anew_does_not_get_its_old_content_back() -> None:
    """What replaced a removed file and was made durable stands."""
    for seed in SEEDS:
        disk = seeded(seed)
        disk.write_new("a", [b"old"])
        disk.remove("a")
        disk.write_new("a", [b"new"])
        disk.crash(is_power_cut=True)

        assert disk.read("a") == b"new"


def test_a_full_disk_takes_nothing_more() -> None:
    """Appending and writing fail; a part may stand at the end, as on a real disk."""
    left = set()
    for seed in SEEDS:
        disk = seeded(seed)
        disk.append("a", b"1234")
        disk.sync("a")
        disk.is_full = True
        with pytest.raises(DiskFull, match=r"No room for a: .* Free some space"):
            disk.append("a", b"5678")
        with pytest.raises(DiskFull, match="No room for b"):
            disk.write_new("b", [b"x"])
        left.add(disk.read("a"))
        assert disk.names("") in (["a"], ["a", "b"])

    assert left == {b"1234", b"12345", b"123456", b"1234567", b"12345678"}


def test_a_failed_sync_leaves_its_bytes_in_doubt_for_good() -> None:
    """A later sync that succeeds does not save what an earlier one failed to."""
    seen = set()
    for seed in SEEDS:
        disk = seeded(seed)
        disk.append("a", b"12")
        disk.sync("a")
        disk.append("a", b"34")
        disk.is_full = True
        with pytest.raises(DiskFull):
            disk.sync("a")
        disk.is_full = False
        disk.append("a", b"56")
        disk.sync("a")
        disk.crash(is_power_cut=True)
        seen.add(disk.read("a"))

    assert seen == {b"123456", b"12\0\x0056"}


def test_a_full_disk_syncs_what_needs_no_room() -> None:
    """What is durable already can be synced again, also on a full disk."""
    disk = seeded(0)
    disk.write_new("a", [b"1"])
    disk.is_full = disk.is_read_only = True
    disk.sync("a")

    assert disk.read("a") == b"1"


def test_a_read_only_disk_changes_nothing() -> None:
    """Every change is a usage error that names the file; reading goes on."""
    disk = seeded(0)
    disk.write_new("a", [b"1"])
    disk.append("c", b"2")
    disk.is_read_only = True
    changes: tuple[Callable[[], None], ...] = (
        lambda: disk.append("a", b"x"),
        lambda: disk.write_new("b", [b"x"]),
        lambda: disk.remove("a"),
        lambda: disk.sync("c"),
    )
    for act in changes:
        with pytest.raises(UsageError, match=r"the disk is read-only. Give this user"):
            act()

    assert disk.names("") == ["a", "c"]
    assert disk.read("a") == b"1"


def test_a_file_is_no_directory() -> None:
    """Two names of which one would be the other's directory exclude each other."""
    disk = seeded(0)
    disk.append("a/b", b"1")
    for name in ("a", "a/b/c"):
        with pytest.raises(UsageError, match=f"{name} cannot be created: a/b is"):
            disk.write_new(name, [b"1"])


SCRIPT: tuple[Callable[[Disk], object], ...] = (
    lambda disk: disk.append("log", b"one"),
    lambda disk: disk.sync("log"),
    lambda disk: disk.append("log", b"two"),
    lambda disk: disk.write_new("whole", [b"three"]),
    lambda disk: disk.remove("log"),
    lambda disk: disk.read("whole"),
)


def play(disk: Disk, calls: int = len(SCRIPT)) -> None:
    """Make the first `calls` calls of the script."""
    for call in SCRIPT[:calls]:
        call(disk)


def files(disk: Disk) -> dict[str, bytes]:
    return {name: disk.read(name) for name in disk.names("")}


@pytest.mark.parametrize("call", range(1, len(SCRIPT) + 1))
@pytest.mark.parametrize("after", [False, True])
def test_a_crash_can_be_put_at_every_call(call: int, after: bool) -> None:
    """A crash before call n finds n-1 done, one after it n; then all is refused."""
    disk, untroubled = SimDisk(), SimDisk()
    disk.crash_at(call, after=after)
    play(untroubled, call if after else call - 1)

    with pytest.raises(ProcessDead, match=f"crashed at call {call}"):
        play(disk)
    with pytest.raises(ProcessDead, match="down after a crash"):
        disk.read("log")
    assert disk.calls == call
    disk.crash(is_power_cut=False)

    assert files(disk) == files(untroubled)


@pytest.mark.parametrize("call", range(1, len(SCRIPT) + 1))
@pytest.mark.parametrize("after", [False, True])
def test_a_crash_at_a_call_ends_the_process(call: int, after: bool) -> None:
    """The process that made the call is dead, its `finally` block without effect."""
    with SimWorld(0) as world:
        process, disk = world.add("a"), world.disks["a"]

        def program() -> None:
            try:
                play(disk)
            finally:
                disk.write_new("from-hell", [b"x"])

        disk.crash_at(call, after=after)
        process.start(program)
        world.scheduler.run()

        assert not process.is_alive
        assert disk.calls == call
        assert "from-hell" not in disk.names("")


def test_a_disk_outlives_its_process() -> None:
    """What was synced before a crash is there for the next life."""
    with SimWorld(0) as world:
        process, disk = world.add("a"), world.disks["a"]
        seen: list[bytes] = []

        def program() -> None:
            if process.incarnation_number == 1:
                disk.append("log", b"kept")
                disk.sync("log")
            else:
                seen.append(disk.read("log"))

        process.start(program)
        world.scheduler.at(1.0, process.crash)
        world.scheduler.at(2.0, process.restart)
        world.scheduler.run()

    assert seen == [b"kept"]


def test_what_is_absent_has_its_own_error() -> None:
    """Reading what does not exist names the file."""
    with pytest.raises(NoSuchFile, match="a does not exist"):
        SimDisk().read("a")
