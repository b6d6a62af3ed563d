"""The log: what is in it, in order, happened. Its sync is the commit point.

Rule 1: a record is appended behind the last good one, and counts once `sync` returned.
Rule 2: bytes that may be broken are never appended to. After a failed append or sync,
        and for a tail that a crash left, the next segment is written in one piece: it
        says how much of the one before counts, and repeats what was not yet durable.
Rule 3: what was promised and does not verify is an error; what was not promised and
        does not verify was never there.

The segments form a chain: each names the one before it. A segment that the chain leaves
out was given up, and `sweep` removes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from atoll.disk import Disk
from atoll.errors import CorruptError, NoSuchFile, UsageError
from atoll.journal.segments import (
    HEAD_BYTES,
    RESTORE,
    Head,
    entries,
    pack_head,
    pack_record,
    read_head,
    search,
)

FOLDER = "log/"


class Where(NamedTuple):
    """Where a record stands."""

    segment: int
    first: int
    last: int


class Log:
    """Payloads in order, on a disk. Get one by `create` or `open`."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._chain: list[Head] = []
        self._size = self._durable_bytes = 0
        self._durable = 0
        self._pending: list[bytes] = []
        """Payloads appended since the last that is durable."""

        self._is_torn = False
        self._numbers_used = 0
        self.cut_bytes = 0
        """What a crash had left unfinished at the end of the log when it was opened."""

    @classmethod
    def create(cls, disk: Disk, payload: bytes) -> Log:
        """Return a log of one record, which is durable.

        Raises:
            UsageError: there is a log.
        """
        if _numbers(disk):
            raise UsageError(
                "There is a journal on this disk already. Open it, or choose another "
                "directory for a new run."
            )
        log = cls(disk)
        log._begin([payload])
        return log

    @classmethod
    def open(cls, disk: Disk) -> Log:
        """Return the log on a disk; all that `read_back` will give is durable.

        Raises:
            UsageError: there is none.
            CorruptError: a segment is missing, or something promised is damaged.
        """
        log = cls(disk)
        log._chain = _chain(disk)
        log._numbers_used = log._chain[-1].number
        log._take_tail()
        return log

    @property
    def sequence(self) -> int:
        """The number of the last record."""
        return self._durable + len(self._pending)

    def append(self, payload: bytes) -> Where:
        """Put a record at the end; it is durable after `sync`.

        On an error the record is not there, as far as this log is concerned. A crash
        may still bring it back, until the next append or sync has succeeded.
        """
        self.heal()
        record = pack_record(self.sequence + 1, payload, durable=self._durable)
        where = Where(self._number, self._size, self._size + len(record))
        try:
            self._disk.append(_name(self._number), record)
        except BaseException:
            self._is_torn = True
            raise
        self._pending.append(payload)
        self._size = where.last
        return where

    def sync(self) -> None:
        """Return when every record is durable. Safe to repeat after an error."""
        self.heal()
        if not self._pending:
            return
        try:
            self._disk.sync(_name(self._number))
        except BaseException:
            self._is_torn = True
            raise
        self._durable = self.sequence
        self._durable_bytes = self._size
        self._pending.clear()

    def withdraw(self, sequence: int) -> None:
        """Forget the records after `sequence`, none of which is known to be durable."""
        assert sequence >= self._durable
        del self._pending[sequence - self._durable :]
        self._is_torn = True

    def heal(self) -> None:
        """Return with an end that can be appended to, and nothing withdrawn behind it.

        On an error nothing has changed; safe to repeat.
        """
        if self._is_torn:
            self._begin(self._pending)

    def read(self, where: Where) -> bytes:
        """Return the payload of a record, verified again."""
        name = _name(where.segment)
        for entry in entries(self._disk, name, where.first, where.last):
            return entry.payload
        raise _damage(name, where.first)

    def read_back(self) -> Iterator[tuple[Where, bytes]]:
        """Yield every payload in order, with its place.

        Raises:
            CorruptError: naming the segment and the byte of what does not verify.
        """
        sequence = 0
        limits = [head.previous_bytes for head in self._chain[1:]] + [self._size]
        for head, limit in zip(self._chain, limits, strict=True):
            name, end = _name(head.number), HEAD_BYTES
            if head.after != sequence:
                raise CorruptError(
                    f"{name} goes on after record {head.after}, but the log before it "
                    f"ends with {sequence}. {RESTORE}"
                )
            for entry in entries(self._disk, name, HEAD_BYTES, limit):
                if entry.sequence != sequence + 1:
                    break
                sequence, end = entry.sequence, entry.last
                yield Where(head.number, entry.first, end), entry.payload
            if end != limit:
                raise _damage(name, end)

    def sweep(self) -> None:
        """Remove the segments that were given up."""
        kept = {head.number for head in self._chain}
        for number in set(_numbers(self._disk)) - kept:
            self._disk.remove(_name(number))

    @property
    def _number(self) -> int:
        return self._chain[-1].number

    def _begin(self, payloads: Iterable[bytes], count: int | None = None) -> None:
        """Go on in a new segment, which repeats `payloads` behind what is durable."""
        if count is None:
            payloads = list(payloads)
            count = len(payloads)
        self._numbers_used += 1  # a name is not used again, whatever became of it
        head = Head(
            number=self._numbers_used,
            previous=self._number if self._chain else 0,
            previous_bytes=self._durable_bytes,
            after=self._durable,
            through=self._durable + count,
        )
        sizes: list[int] = []
        self._disk.write_new(_name(head.number), _segment(head, payloads, sizes))
        self._chain.append(head)
        self._durable = head.through
        self._size = self._durable_bytes = sum(sizes)
        self._pending, self._is_torn = [], False

    def _take_tail(self) -> None:
        """Find what of the last segment counts, and make sure that it is durable."""
        head = self._chain[-1]
        name = _name(head.number)
        tail = _tail(self._disk, name, head)
        promised, size = search(self._disk, name, tail.last)
        if max(tail.durable, promised) > tail.sequence:
            raise _damage(name, tail.last)
        self._durable, self._durable_bytes = tail.durable, tail.durable_bytes
        self._size, self.cut_bytes = tail.last, size - tail.last
        if size > tail.durable_bytes:
            unsynced = entries(self._disk, name, tail.durable_bytes, tail.last)
            count = tail.sequence - tail.durable
            self._begin((entry.payload for entry in unsynced), count)
        else:  # its maker may have been told that writing it had failed
            self._disk.sync(name)


class _Tail(NamedTuple):
    sequence: int
    last: int
    durable: int
    durable_bytes: int


def _tail(disk: Disk, name: str, head: Head) -> _Tail:
    durable, ends = head.through, [HEAD_BYTES]
    for entry in entries(disk, name, HEAD_BYTES):
        if entry.sequence != head.after + len(ends):
            raise _damage(name, entry.first)
        durable = max(durable, entry.durable)
        ends.append(entry.last)
    sequence = head.after + len(ends) - 1
    durable_bytes = ends[min(durable, sequence) - head.after]
    return _Tail(sequence, ends[-1], durable, durable_bytes)


def _segment(
    head: Head, payloads: Iterable[bytes], sizes: list[int]
) -> Iterator[bytes]:
    """Yield the parts of a segment, and note their sizes."""
    sizes.append(HEAD_BYTES)
    yield pack_head(head)
    for sequence, payload in enumerate(payloads, start=head.after + 1):
        record = pack_record(sequence, payload, durable=head.after)
        sizes.append(len(record))
        yield record
    if len(sizes) - 1 != head.through - head.after:
        raise CorruptError(f"the log changed while {_name(head.number)} was written.")


def _chain(disk: Disk) -> list[Head]:
    """Return the heads of the segments that count, oldest first."""
    numbers = _numbers(disk)
    if not numbers:
        raise UsageError("There is no journal on this disk. Create one for a new run.")
    chain, number = [], max(numbers)
    while number:
        name = _name(number)
        try:
            head = read_head(disk, name)
        except NoSuchFile as exc:
            raise CorruptError(f"{name} is missing. {RESTORE}") from exc
        is_right = (
            head.number == number
            and head.previous < number
            and head.after <= head.through
        )
        if not is_right:
            raise CorruptError(f"{name} contradicts its own head: {head}. {RESTORE}")
        chain.append(head)
        number = head.previous
    return chain[::-1]


def _numbers(disk: Disk) -> list[int]:
    found = {
        name: int(text)
        for name in disk.names(FOLDER)
        if (text := name.removeprefix(FOLDER)).isdecimal()
    }
    return [number for name, number in found.items() if name == _name(number)]


def _name(number: int) -> str:
    return f"{FOLDER}{number:08d}"


def _damage(name: str, first: int) -> CorruptError:
    return CorruptError(
        f"{name} is damaged at byte {first}: no record verifies there. {RESTORE}"
    )
