"""The fixed part of a header, field by field, as docs/wire-format.md tables it."""

from __future__ import annotations

import struct
from typing import NamedTuple

MAGIC = b"ATOL"
VERSION = 1
MAX_HEADER_BYTES = 2**26
MAX_BODY_BYTES = 2**40
DIGEST_BYTES = 32


class Prefix(NamedTuple):
    """What a reader judges before it reads on."""

    magic: bytes
    version: int
    kind: int
    codec: int
    header_bytes: int
    reserved: int
    body_bytes: int


class Fixed(NamedTuple):
    """The numbers behind the prefix, and the sizes of what follows them."""

    elements: int
    fragment: int
    pieces: int
    round: int
    incarnation: int
    epoch: int
    base: bytes
    seed: int
    weight: int
    norm: float
    inner_steps: int
    tokens: int
    optimizer: int
    run_bytes: int
    island_bytes: int
    reserved: int
    cursor_bytes: int
    refused_bytes: int
    lr: float
    momentum: float
    outer_steps: int
    roster_bytes: int
    reserved_too: bytes


PREFIX = struct.Struct("<4sHBBIIQ")
FIXED = struct.Struct("<QIIQQQ16sQQdQQBBBBHHffQI12s")

PREFIX_BYTES = PREFIX.size
FIXED_BYTES = PREFIX.size + FIXED.size
NO_RESERVED = bytes(12)
