"""What the ranks of a collective say to each other, apart from updates and means."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from struct import Struct, error

from atoll.errors import CorruptError

MAX_WORD_BYTES = 2**28
MAX_PARTS = 2**16

_HEAD = Struct("<BIQI")
_SIZE = Struct("<I")


class Says(IntEnum):
    """What a word is about; the numbers are those on the wire."""

    BEAT = 1
    """I live."""

    HELLO = 2
    """My name in the run, and which run it is."""

    NAMES = 3
    """All names, by rank."""

    READY = 4
    """My update is sealed: its header. Without one: an earlier life's stands."""

    GO = 5
    """Reduce a round: the header of its outcome, and those of all updates, by rank."""

    MADE = 6
    """I have reduced it: the digest of its header and my voucher, or what is wrong."""

    COMMITTED = 7
    """The outcome is durable: the run's position, and its receipts for the state after
    the round and for the outcome."""

    ALONE = 8
    """Publish your update of this round yourself."""

    ENDED = 9
    """The round will never open."""

    LEAVING = 10
    """I shall go: let the rest be done by each for itself."""

    APART = 11
    """From now on everybody is for itself."""

    BYE = 12
    """You hear no more of me."""

    WAITS = 14
    """I stand still for this round; without a part: no more."""

    WANTED = 15
    """Everybody stands still, and this round waits for you."""

    FAILED = 13
    """The collective cannot go on, and why."""


@dataclass(frozen=True)
class Word:
    """One word. What it does not need is zero or empty."""

    says: Says
    fragment: int = 0
    round: int = 0
    parts: tuple[bytes, ...] = ()

    @property
    def key(self) -> tuple[int, int]:
        """The fragment and the round that it is about."""
        return self.fragment, self.round

    @property
    def text(self) -> str:
        """What it says to people, if it does."""
        return self.parts[0].decode(errors="replace") if self.parts else ""


def packed(word: Word) -> bytes:
    """Return a word as it travels."""
    head = _HEAD.pack(word.says, word.fragment, word.round, len(word.parts))
    sizes = b"".join(_SIZE.pack(len(part)) for part in word.parts)
    return head + sizes + b"".join(word.parts)


def parsed(data: bytes) -> Word:
    """Return the word in some bytes.

    Raises:
        CorruptError: they hold none, or more.
    """
    try:
        says, fragment, round, count = _HEAD.unpack_from(data)
        start = _HEAD.size + min(count, MAX_PARTS) * _SIZE.size
        sizes = [each for (each,) in _SIZE.iter_unpack(data[_HEAD.size : start])]
        if len(sizes) != count or start + sum(sizes) != len(data):
            raise ValueError
        parts = []
        for size in sizes:
            parts.append(data[start : start + size])
            start += size
        return Word(Says(says), fragment, round, tuple(parts))
    except (ValueError, error) as exc:
        raise CorruptError(
            f"{len(data)} bytes of a rank are no word of a collective. "
            "Run the same version of Atoll on all ranks."
        ) from exc
