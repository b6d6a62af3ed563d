"""A disk in memory that loses unsynced bytes when the power is cut.

Rule 1: every file has content, of which a first part is durable.
Rule 2: a power cut keeps the durable part, and of the rest of each file, independently
    of the others, nothing, all, some whole appends, or a torn part.
Rule 3: a removal is not durable: the file may come back.
Rule 4: a mere crash of the process loses nothing, and makes nothing durable either.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from atoll.disk import LOCK, Data, check_name
from atoll.errors import DiskDenied, DiskFull, NoSuchFile, UsageError
from atoll.simulate.process import SimProcess
from atoll.simulate.scheduler import ProcessDead

_COMPLETE_BUT_FAILED = 0.125
"""Probability that a file exists although `write_new` failed for lack of room."""


class SimDisk:
    """The disk of a process, or a disk by itself. Implements `atoll.disk.Disk`.

    It outlasts its process, and crashes whenever the process does. Calls are counted,
    and `crash_at` crashes before or after one of them; without a process, the disk
    then refuses every call until `crash` decides which bytes survive.
    """

    def __init__(
        self, process: SimProcess | None = None, *, rng: random.Random | None = None
    ) -> None:
        self.calls = 0
        self.is_full = False
        self.is_read_only = False
        self.room_bytes = 2**62
        """The result of `free_bytes`; it does not limit writes."""

        self.was_put_back = False
        """Whether it has lost durable bytes, which no invariant covers."""

        self._process = process
        self._rng = self._fate = rng or random.Random(0)
        if process is not None:
            # The survivors of a crash must not depend on earlier draws of a full disk.
            self._rng = process.scheduler.random(f"disk {process.name}")
            self._fate = process.scheduler.random(f"power {process.name}")
            process.on_crash(self.crash)
        self._files: dict[str, SimFile] = {}
        self._removed: dict[str, bytes] = {}
        """Removed files, which a power cut may bring back."""

        self._right_names: set[str] = set()
        """Names checked so far: most calls name the same few files."""

        self._crash_at: tuple[int, bool] | None = None
        self._is_down = False

    def crash_at(self, call: int, *, after: bool = False) -> None:
        """Crash just before or just after call number `call`, counted from 1."""
        self._crash_at = (call, after)

    def crash(
        self, rng: random.Random | None = None, *, is_power_cut: bool | None = None
    ) -> None:
        """Lose bytes that are not durable, if the power was cut; None draws that."""
        rng = rng or self._fate
        self._is_down = False
        if is_power_cut is None:
            is_power_cut = rng.random() < 0.75
        if not is_power_cut:
            return
        survivors = {}
        for name in sorted(self._files.keys() | self._removed.keys()):
            content = self._survivor(name, rng)
            if content is not None:
                survivors[name] = SimFile(content, is_durable=True)
        self._emit("power cut", f"{len(self._files)} files, {len(survivors)} survive")
        self._files, self._removed = survivors, {}

    def copy(self) -> Callable[[], None]:
        """Return a function that restores the disk to its present durable content."""
        files = {
            name: file.durable for name, file in self._files.items() if file.survives
        }

        def put_back() -> None:
            self._emit("put back", f"{len(files)} files, and {len(self._files)} gone")
            self._removed, self.was_put_back = {}, True
            self._files = {
                name: SimFile(content, is_durable=True)
                for name, content in files.items()
            }

        return put_back

    def append(self, name: str, data: Data) -> None:
        with self._call("append", name):
            self._check_writable(name)
            file, content = self._files.get(name) or self._make(name), bytes(data)
            if self.is_full:
                # A write that fails for lack of room may have written a part.
                file.append(content[: self._rng.randint(0, len(content))])
                raise _full(name)
            file.append(content)

    def sync(self, name: str) -> None:
        with self._call("sync", name):
            file = self._file(name)
            if not file.is_durable and (self.is_full or self.is_read_only):
                file.doubt()
                self._check_writable(name)
                raise _full(name)
            file.sync()
            self._removed.pop(name, None)

    def write_new(self, name: str, parts: Iterable[Data]) -> None:
        with self._call("write_new", name):
            self._check_writable(name)
            if name in self._files:
                raise UsageError(
                    f"{name} exists, and is never written twice. Remove it first."
                )
            content = b"".join(bytes(part) for part in parts)
            if self.is_full:
                if self._rng.random() < _COMPLETE_BUT_FAILED:
                    # Its content was synced before the rename: complete or absent.
                    self._make(name).append(content)
                    self._files[name].sync()
                    self._files[name].survives = False
                raise _full(name)
            self._make(name).append(content)
            self._files[name].sync()
            self._removed.pop(name, None)

    def read(self, name: str, first: int = 0, size: int | None = None) -> bytes:
        with self._call("read", name):
            last = None if size is None else first + size
            return bytes(self._file(name).content[first:last])

    def names(self, prefix: str) -> list[str]:
        folder = prefix.rpartition("/")[0]
        with self._call("names", folder or "all"):
            return sorted(name for name in self._files if name.startswith(prefix))

    def remove(self, name: str) -> None:
        with self._call("remove", name):
            self._check_writable(name)
            file = self._files.pop(name, None)
            if file is not None and file.survives:
                self._removed[name] = file.durable

    def free_bytes(self) -> int:
        return self.room_bytes

    def _call(self, action: str, name: str) -> _DiskCall:
        if self._is_down:
            raise ProcessDead("The disk is down after a crash: call crash() to reopen.")
        if self._process is not None:
            self._process.scheduler.check()
        if name not in self._right_names:
            self._check_name(name)
        self.calls += 1
        self._emit(action, name)
        if self._crash_at == (self.calls, False):
            self._die()
        return _DiskCall(self, self.calls)

    def _check_name(self, name: str) -> None:
        if check_name(name) == LOCK:
            raise UsageError(f"{name!r} is the lock of the disk. Use another name.")
        self._right_names.add(name)

    def _die(self) -> None:
        self._crash_at = None
        if self._process is None:
            self._is_down = True
        else:
            self._process.crash()
        raise ProcessDead(f"The disk's process crashed at call {self.calls}.")

    def _survivor(self, name: str, rng: random.Random) -> bytes | None:
        file = self._files.get(name)
        content = None if file is None else file.after_power_cut(rng)
        if content is None and name in self._removed and rng.random() < 0.5:
            return self._removed[name]
        return content

    def _file(self, name: str) -> SimFile:
        if name not in self._files:
            raise NoSuchFile(f"{name} does not exist.")
        return self._files[name]

    def _make(self, name: str) -> SimFile:
        parents = {name[:end] for end, character in enumerate(name) if character == "/"}
        folder = f"{name}/"
        for other in self._files:
            if other in parents or other.startswith(folder):
                raise UsageError(
                    f"{name} cannot be created: {other} is a file or directory of the "
                    "same name. Choose another name."
                )
        self._files[name] = SimFile()
        return self._files[name]

    def _check_writable(self, name: str) -> None:
        if self.is_read_only:
            raise DiskDenied(
                f"{name} cannot be written: the disk is read-only. Give this user the "
                "right to write there, or choose another directory."
            )

    def _emit(self, action: str, detail: str) -> None:
        if self._process is not None and self._process.scheduler.trace is not None:
            self._process.scheduler.emit(self._process.name, action, detail)


class _DiskCall:
    """Context of a call of a disk, after which it may crash."""

    __slots__ = ("_disk", "_number")

    def __init__(self, disk: SimDisk, number: int) -> None:
        self._disk, self._number = disk, number

    def __enter__(self) -> None:
        pass

    def __exit__(self, *raised: object) -> None:
        if self._disk._crash_at == (self._number, True):
            self._disk._die()


def _full(name: str) -> DiskFull:
    return DiskFull(
        f"No room for {name}: the disk is full. Free some space there; nothing that "
        "was durable is lost."
    )


class SimFile:
    """Bytes that are durable up to a position.

    A failed sync leaves bytes in doubt: no later sync makes them durable, and after a
    power cut they may be zeros.
    """

    __slots__ = ("_doubts", "_ends", "_synced", "content", "survives")

    def __init__(self, content: bytes = b"", *, is_durable: bool = False) -> None:
        self.content = bytearray(content)
        self.survives = is_durable
        """Whether the file itself is durable, even if empty."""

        self._synced = len(content) if is_durable else 0
        self._ends: list[int] = []
        """End position of each append since the last sync."""

        self._doubts: list[tuple[int, int]] = []

    @property
    def is_durable(self) -> bool:
        return self.survives and self._synced == len(self.content)

    @property
    def durable(self) -> bytes:
        return bytes(self.content[: self._synced])

    def append(self, data: bytes) -> None:
        self.content += data
        self._ends.append(len(self.content))

    def sync(self) -> None:
        self._synced, self.survives = len(self.content), True
        self._ends.clear()

    def doubt(self) -> None:
        """Note that a sync has failed."""
        if self._synced < len(self.content):
            self._doubts.append((self._synced, len(self.content)))

    def after_power_cut(self, rng: random.Random) -> bytes | None:
        """Return the surviving content, or None if the file is lost."""
        if not self.survives and rng.random() < 0.25:
            return None
        content = self.content[: self._surviving_bytes(rng)]
        for first, last in self._doubts:
            if rng.random() < 0.5:
                content[first:last] = bytes(
                    min(last, len(content)) - min(first, len(content))
                )
        return bytes(content)

    def _surviving_bytes(self, rng: random.Random) -> int:
        match rng.choice(("nothing", "all", "appends", "torn")):
            case "nothing":
                return self._synced
            case "all":
                return len(self.content)
            case "appends":
                return rng.choice([self._synced, *self._ends])
            case _:
                return rng.randint(self._synced, len(self.content))
