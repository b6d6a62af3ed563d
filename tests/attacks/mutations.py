"""What may happen to the files of a directory, drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable

Files = dict[str, bytes]
Rename = Callable[[random.Random, str], str]
"""Gives a file another name that its directory may have."""


def mutated(files: Files, rng: random.Random, rename: Rename) -> tuple[Files, str]:
    """Return the files after one accident, and what it was."""
    while True:
        name = rng.choice(sorted(files))
        kind = rng.choice([*sorted(EDITS), "duplicate", "remove", "rename"])
        changed = dict(files)
        if kind in EDITS:
            changed[name] = EDITS[kind](rng, files[name])
        else:
            other = rename(rng, name)
            if kind != "duplicate":
                del changed[name]
            if kind != "remove":
                changed[other] = files[name]
        if changed != files:
            return changed, f"{kind} {name}"


def _flip(rng: random.Random, data: bytes) -> bytes:
    if not data:
        return data
    changed, bit = bytearray(data), rng.randrange(8 * len(data))
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randint(0, len(data))]


def _insert(rng: random.Random, data: bytes) -> bytes:
    at = rng.randint(0, len(data))
    return data[:at] + rng.randbytes(rng.randint(1, 100)) + data[at:]


def _swap(rng: random.Random, data: bytes) -> bytes:
    size = rng.randint(1, max(1, len(data) // 3))
    first = rng.randint(0, max(0, len(data) - 2 * size))
    second = rng.randint(first + size, max(first + size, len(data) - size))
    head, tail = data[:first], data[second + size :]
    between = data[first + size : second]
    return head + data[second : second + size] + between + data[first:][:size] + tail


def _zero(rng: random.Random, data: bytes) -> bytes:
    first = rng.randint(0, len(data))
    size = min(rng.randint(1, 5000), len(data) - first)
    return data[:first] + bytes(size) + data[first + size :]


EDITS: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "cut": _cut,
    "flip": _flip,
    "insert": _insert,
    "swap": _swap,
    "zero": _zero,
}
