"""What a golden frame says, as JSON: floating-point numbers by their bits."""

from __future__ import annotations

import struct
from dataclasses import asdict

import numpy as np
from blake3 import blake3

from atoll.wire.codecs import codec
from atoll.wire.frame import update_digest
from atoll.wire.header import Header
from tests.golden.vectors import Body, Floats

WORDS_PER_LINE = 8
LISTED_ELEMENTS = 10_000
"""Beyond this the decoded values are given by their digest."""


def said(header: Header, body: Body) -> dict[str, object]:
    """Return everything that a reader must find in a frame."""
    facts = asdict(header)
    facts |= {
        "kind": header.kind.name.lower(),
        "base": header.base.hex(),
        "norm": struct.pack(">d", header.norm).hex(),
        "progress": {**facts["progress"], "cursor": header.progress.cursor.hex()},
        "pieces": [piece.hex() for piece in header.pieces],
    }
    if header.kind.is_update:
        facts["update_digest"] = update_digest(header).hex()
    if header.outer is not None:
        facts["outer"] |= {
            "lr": struct.pack(">f", header.outer.lr).hex(),
            "momentum": struct.pack(">f", header.outer.momentum).hex(),
        }
    if header.roster is not None:
        facts["roster"] = [
            {**asdict(entry), "digest": entry.digest.hex()}
            for entry in header.roster.entries
        ]
    return facts | _decoded(header, body)


def _decoded(header: Header, body: Body) -> dict[str, object]:
    values = np.empty(header.elements, dtype=np.float32)
    if header.elements:
        codec(header.codec).decode(body, values)
    if header.elements > LISTED_ELEMENTS:
        return {"decoded_blake3": blake3(values.tobytes()).hexdigest()}
    return {"decoded": words(values)}


def words(values: Floats) -> list[str]:
    """Return the bits of each value as eight hexadecimal digits, in lines."""
    bits = [f"{word:08x}" for word in values.view(np.uint32)]
    starts = range(0, len(bits), WORDS_PER_LINE)
    return [" ".join(bits[start : start + WORDS_PER_LINE]) for start in starts]
