"""The roster of a round, and the characters that names and reasons may have.

A roster has every island with its verdict, and is read first of an outcome. An island
adopts or carries according to its roster entry, so a roster has exactly one encoding,
and a name stands in it at most once.

One rule holds for every string on the wire. The refused characters are listed here one
by one, because Python's notion of printable changes with its Unicode tables, and two
readers must never disagree.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_left
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from itertools import pairwise

from atoll.errors import CorruptError, UsageError

FETCH_AGAIN = "Discard these bytes and fetch the frame again."

MAX_NAME_BYTES = 128
MAX_REASON_BYTES = 512

# Control characters, and those that reorder or break a line on a terminal.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def name_fault(value: str, *, field: str) -> str | None:
    """Return the fault of `value` as the name of an island or run, if any.

    Names become parts of paths and object keys, hence no slash, dot or double dot.
    """
    if fault := _text_fault(value, field=field, max_bytes=MAX_NAME_BYTES):
        return fault
    if not value:
        return f"{field} must be a name of 1 to {MAX_NAME_BYTES} bytes, but is empty"
    if "/" in value or value in (".", ".."):
        return f"{field}={value!r} must not contain '/' nor be '.' or '..'"
    return None


def new_name_fault(value: str, *, field: str) -> str | None:
    """Return the fault of `value` as the name of an island that joins, if any.

    A backslash is refused too: no HTTP path may hold one, so such an island could join
    and would never be served. Frames and records that hold one are still read.
    """
    if "\\" in value:
        return f"{field}={value!r} must not contain a backslash"
    return name_fault(value, field=field)


def reason_fault(value: str, *, field: str) -> str | None:
    """Return the fault of `value` as a reason, if any; an empty reason is valid."""
    return _text_fault(value, field=field, max_bytes=MAX_REASON_BYTES)


def as_reason(text: str) -> str:
    """Return `text` as a reason that a frame can carry: printable, and cut to fit."""
    printable = _UNPRINTABLE.sub(" ", text).encode(errors="replace")
    return printable[:MAX_REASON_BYTES].decode(errors="ignore")


def decode_text(data: bytes, *, field: str) -> str:
    """Return `data` as text, or raise CorruptError if it is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as exc:
        raise CorruptError(
            f"{field} is not UTF-8 at its byte {exc.start}. {FETCH_AGAIN}"
        ) from exc


def _text_fault(value: str, *, field: str, max_bytes: int) -> str | None:
    if len(value) > _SHORT:
        return _judge_text(value, field, max_bytes)
    return _judge_short(value, field, max_bytes)


def _judge_text(value: str, field: str, max_bytes: int) -> str | None:
    try:
        size_bytes = len(value.encode())
    except UnicodeEncodeError:
        return f"{field}={value!r} contains a surrogate, which UTF-8 cannot say"
    if size_bytes > max_bytes:
        return (
            f"{field} has {size_bytes} bytes of UTF-8, above the limit of {max_bytes}"
        )
    if unprintable := _UNPRINTABLE.search(value):
        return f"{field}={value!r} contains {unprintable[0]!r}, which is not printable"
    return None


# The same few names come with every frame; long texts are not worth keeping.
_SHORT = 64
_judge_short = lru_cache(maxsize=4096)(_judge_text)


MAX_ENTRIES = 65536
DIGEST_BYTES = 32
U64_MAX = 2**64 - 1

_COUNT = struct.Struct("<I")
_ENTRY = struct.Struct("<QQQQBBBBHH")

MAX_SPANS_BYTES = 4096
_U32_MAX = 2**32 - 1

# Tails of an entry, in this order, each only if its bit is in the entry's `tails`.
_AGE, _WINDOW, _SPANS = 1, 2, 4
_U32 = struct.Struct("<I")
_U16 = struct.Struct("<H")


class Verdict(StrEnum):
    """The result of a round for an island's work."""

    COUNTED = "counted"
    LATE = "late"
    REFUSED = "refused"


_CODE_OF = {Verdict.COUNTED: 1, Verdict.LATE: 2, Verdict.REFUSED: 3}
_VERDICT_OF = {code: verdict for verdict, code in _CODE_OF.items()}


@dataclass(frozen=True, kw_only=True)
class RosterEntry:
    """One island in a round's outcome."""

    island: str
    incarnation: int
    digest: bytes
    """The update's digest, or empty when nothing was staged."""

    weight: int
    verdict: Verdict
    reason: str = ""
    """Why it was refused; never empty then."""

    inner_steps: int = 0
    tokens: int = 0
    age: int = 0
    """Rounds between the one it was sealed for and this one; in asynchronous runs."""

    window: int = 0
    """Inner steps per window of this island from now on; 0: `sync_every`."""

    spans: bytes = b""
    """The rows of the run's data that are in the update."""

    def __post_init__(self) -> None:
        if fault := _entry_fault(self):
            raise UsageError(f"{fault}.")


@dataclass(frozen=True)
class Roster:
    """The islands of a round, in the order of their names' bytes."""

    entries: tuple[RosterEntry, ...]

    def __post_init__(self) -> None:
        if len(self.entries) > MAX_ENTRIES:
            raise UsageError(
                f"a roster of {len(self.entries)} entries is above the limit of "
                f"{MAX_ENTRIES}."
            )
        # Code points and UTF-8 bytes sort alike, so the strings can be compared.
        for before, after in pairwise(self.entries):
            if before.island >= after.island:
                raise UsageError(
                    f"island {after.island!r} follows {before.island!r}, but a roster "
                    "lists each island once, in ascending order of names."
                )

    @cached_property
    def packed(self) -> bytes:
        """Its one encoding, made once: a round's goes to every island of the run."""
        return _packed(self)

    @property
    def counted(self) -> tuple[RosterEntry, ...]:
        """The entries whose updates are in the mean, in the order of the sum."""
        return tuple([e for e in self.entries if e.verdict is Verdict.COUNTED])

    @property
    def windows(self) -> dict[str, int]:
        """The inner steps per window of each island; 0: `sync_every`."""
        return {entry.island: entry.window for entry in self.entries}

    def entry(self, island: str) -> RosterEntry | None:
        """Return the entry of `island`, or None if it is not listed."""
        index = bisect_left(self.entries, island, key=lambda entry: entry.island)
        if index < len(self.entries) and self.entries[index].island == island:
            return self.entries[index]
        return None


def pack_roster(roster: Roster) -> bytes:
    """Return the one encoding of `roster`."""
    return roster.packed


def _packed(roster: Roster) -> bytes:
    parts = [_COUNT.pack(len(roster.entries))]
    for entry in roster.entries:
        island, reason = entry.island.encode(), entry.reason.encode()
        parts.append(
            _ENTRY.pack(
                entry.incarnation,
                entry.weight,
                entry.inner_steps,
                entry.tokens,
                _CODE_OF[entry.verdict],
                len(island),
                len(entry.digest),
                _flags(entry),
                len(reason),
                0,
            )
        )
        parts += (island, entry.digest, reason, *_tails(entry))
    return b"".join(parts)


def _flags(entry: RosterEntry) -> int:
    return (
        (_AGE if entry.age else 0)
        | (_WINDOW if entry.window else 0)
        | (_SPANS if entry.spans else 0)
    )


def _tails(entry: RosterEntry) -> list[bytes]:
    tails = [_U32.pack(number) for number in (entry.age, entry.window) if number]
    if entry.spans:
        tails += [_U16.pack(len(entry.spans)), entry.spans]
    return tails


def roster_bytes(roster: Roster) -> int:
    """Return how many bytes `pack_roster` gives."""
    return _COUNT.size + sum(_entry_bytes(entry) for entry in roster.entries)


def _entry_bytes(entry: RosterEntry) -> int:
    texts = len(entry.island.encode()) + len(entry.reason.encode())
    tails = _U32.size * (bool(entry.age) + bool(entry.window))
    if entry.spans:
        tails += _U16.size + len(entry.spans)
    return _ENTRY.size + texts + len(entry.digest) + tails


def unpack_roster(data: bytes) -> Roster:
    """Return the roster that `data` encodes, or raise CorruptError; nothing else."""
    entries, offset = [], _COUNT.size
    try:
        for _ in range(_promised_entries(data)):
            entry, offset = _unpack_entry(data, offset)
            entries.append(entry)
        roster = Roster(tuple(entries))
    except UsageError as exc:
        raise CorruptError(f"{exc} {FETCH_AGAIN}") from exc
    if offset != len(data):
        raise CorruptError(
            f"bytes {offset} to {len(data)} follow the last entry of a roster. "
            f"{FETCH_AGAIN}"
        )
    return roster


def _promised_entries(data: bytes) -> int:
    if len(data) < _COUNT.size:
        raise _too_short(data, _COUNT.size)
    (count,) = _COUNT.unpack_from(data)
    if count > MAX_ENTRIES:
        raise CorruptError(
            f"a roster promises {count} entries, above the limit of {MAX_ENTRIES}. "
            f"{FETCH_AGAIN}"
        )
    if len(data) < _COUNT.size + count * _ENTRY.size:
        raise _too_short(data, _COUNT.size + count * _ENTRY.size)
    return int(count)


def _unpack_entry(data: bytes, offset: int) -> tuple[RosterEntry, int]:
    if len(data) < offset + _ENTRY.size:
        raise _too_short(data, offset + _ENTRY.size)
    (incarnation, weight, inner_steps, tokens, code, *sizes) = _ENTRY.unpack_from(
        data, offset
    )
    island_bytes, digest_bytes, tails, reason_bytes, reserved = sizes
    if reserved:
        raise CorruptError(
            f"reserved bytes at {offset} of a roster are not zero. {FETCH_AGAIN}"
        )
    if tails > _AGE | _WINDOW | _SPANS:
        raise CorruptError(
            f"tails={tails} at {offset} of a roster must be from 0 to 7. {FETCH_AGAIN}"
        )
    if code not in _VERDICT_OF:
        raise CorruptError(f"verdict {code} is not one of 1 to 3. {FETCH_AGAIN}")
    start = offset + _ENTRY.size
    middle = start + island_bytes
    last = middle + digest_bytes
    end = last + reason_bytes
    if len(data) < end:
        raise _too_short(data, end)
    (age, window, spans), tails_end = _unpack_tails(data, end, tails)
    entry = RosterEntry(
        island=decode_text(data[start:middle], field="island"),
        incarnation=incarnation,
        digest=data[middle:last],
        weight=weight,
        verdict=_VERDICT_OF[code],
        reason=decode_text(data[last:end], field="reason"),
        inner_steps=inner_steps,
        tokens=tokens,
        age=age,
        window=window,
        spans=spans,
    )
    return entry, tails_end


def _unpack_tails(
    data: bytes, offset: int, flags: int
) -> tuple[tuple[int, int, bytes], int]:
    """Return age, window and spans, and where they end; a flagged one has a value."""
    numbers = []
    for flag, field in ((_AGE, "age"), (_WINDOW, "window")):
        number = 0
        if flags & flag:
            number, offset = _unpack_tail(data, offset, _U32, field)
        numbers.append(number)
    spans = b""
    if flags & _SPANS:
        size, offset = _unpack_tail(data, offset, _U16, "spans")
        if len(data) < offset + size:
            raise _too_short(data, offset + size)
        spans, offset = data[offset : offset + size], offset + size
    age, window = numbers
    return (age, window, spans), offset


def _unpack_tail(
    data: bytes, offset: int, form: struct.Struct, field: str
) -> tuple[int, int]:
    end = offset + form.size
    if len(data) < end:
        raise _too_short(data, end)
    (number,) = form.unpack_from(data, offset)
    if not number:
        raise CorruptError(
            f"{field} at {offset} of a roster is 0, and must not be written then. "
            f"{FETCH_AGAIN}"
        )
    return int(number), end


def _too_short(data: bytes, needed: int) -> CorruptError:
    return CorruptError(
        f"a roster of {len(data)} bytes ends before byte {needed}, which its entries "
        f"need. {FETCH_AGAIN}"
    )


def _entry_fault(entry: RosterEntry) -> str | None:
    fault = name_fault(entry.island, field="island")
    fault = fault or reason_fault(entry.reason, field="reason")
    if fault:
        return fault
    for field in ("incarnation", "weight", "inner_steps", "tokens"):
        value = getattr(entry, field)
        if not 0 <= value <= U64_MAX:
            return f"{field}={value} {_of(entry)} must be from 0 to {U64_MAX}"
    for field in ("age", "window"):
        value = getattr(entry, field)
        if not 0 <= value <= _U32_MAX:
            return f"{field}={value} {_of(entry)} must be from 0 to {_U32_MAX}"
    if len(entry.spans) > MAX_SPANS_BYTES:
        size = len(entry.spans)
        return f"spans {_of(entry)} have {size} bytes, above {MAX_SPANS_BYTES}"
    if len(entry.digest) not in (0, DIGEST_BYTES):
        size = len(entry.digest)
        return f"digest {_of(entry)} has {size} bytes; it must have 0 or 32"
    if entry.verdict is Verdict.COUNTED and not (entry.digest and entry.weight):
        return f"verdict counted {_of(entry)} needs a digest and a weight of 1 or more"
    if entry.verdict is Verdict.REFUSED and not entry.reason:
        return f"verdict refused {_of(entry)} must come with a reason"
    return None


def _of(entry: RosterEntry) -> str:
    return f"of roster entry {entry.island!r}"
