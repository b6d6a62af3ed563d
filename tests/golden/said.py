"""What a golden frame says, as JSON: floating-point numbers by their bits."""

from __future__ import annotations

import struct
from dataclasses import asdict

import numpy as np
from blake3 import blake3

from atoll.algorithm.merge import weighted
from atoll.wire.codecs import codec
from atoll.wire.frame import update_digest
from atoll.wire.header import Header, OuterValues
from atoll.wire.roster import RosterEntry
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
    if not header.gathered:
        del facts["gathered"]
    if header.kind.is_update:
        facts["update_digest"] = update_digest(header).hex()
    if header.outer is not None:
        facts["outer"] = _outer(header.outer)
    if header.roster is not None:
        facts["roster"] = [_entry(entry) for entry in header.roster.entries]
    return facts | _decoded(header, body)


def _outer(outer: OuterValues) -> dict[str, object]:
    """Return the outer values; share and buffer only of an asynchronous run."""
    facts = asdict(outer)
    share, buffer = facts.pop("share"), facts.pop("buffer")
    if buffer:
        facts |= {"share": struct.pack(">f", share).hex(), "buffer": buffer}
    return facts | {
        "lr": struct.pack(">f", outer.lr).hex(),
        "momentum": struct.pack(">f", outer.momentum).hex(),
    }


def _entry(entry: RosterEntry) -> dict[str, object]:
    """Return an entry; of its tails only those that are written."""
    facts = asdict(entry) | {"digest": entry.digest.hex(), "spans": entry.spans.hex()}
    absent = {key for key in ("age", "window", "spans") if not facts[key]}
    return {key: value for key, value in facts.items() if key not in absent}


def _decoded(header: Header, body: Body) -> dict[str, object]:
    if header.gathered:
        return _gathered(header, body)
    values = np.empty(header.elements, dtype=np.float32)
    if header.elements:
        codec(header.codec).decode(body, values)
    if header.elements > LISTED_ELEMENTS:
        return {"decoded_blake3": blake3(values.tobytes()).hexdigest()}
    return {"decoded": words(values)}


def _gathered(header: Header, body: Body) -> dict[str, object]:
    """Return the decoded values of every update, one after another, and their mean."""
    assert header.roster is not None
    updates = [
        np.empty(header.elements, dtype=np.float32) for _ in header.roster.counted
    ]
    for update, part in zip(updates, np.split(body, len(updates)), strict=True):
        codec(header.codec).decode(part, update)
    mean = weighted(updates, [entry.weight for entry in header.roster.counted])
    return {"decoded": words(np.concatenate(updates)), "mean": words(mean)}


def words(values: Floats) -> list[str]:
    """Return the bits of each value as eight hexadecimal digits, in lines."""
    bits = [f"{word:08x}" for word in values.view(np.uint32)]
    starts = range(0, len(bits), WORDS_PER_LINE)
    return [" ".join(bits[start : start + WORDS_PER_LINE]) for start in starts]
