"""What a fuzzer feeds: bytes that every decoder of frames refuses, or reads whole.

The first byte of an input chooses the decoder, so that one corpus serves them all.
"""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from atoll.errors import CorruptError
from atoll.wire import (
    PREFIX_BYTES,
    codec,
    codec_by_code,
    header_length,
    pack,
    pack_roster,
    read_frame,
    unpack,
    unpack_roster,
)

GOLDEN = Path(__file__).parents[1] / "golden"
MAX_ELEMENTS = 4096
MAX_BODY_BYTES = 2**20
"""The limit that readers are given here: they must not reserve more."""


def feed(data: bytes) -> None:
    """Hold that bytes are refused as corrupt, or are the one encoding of a value."""
    is_read(data)


def is_read(data: bytes) -> bool:
    """Return whether the chosen decoder reads the bytes, as they are or completed."""
    return bool(data) and DECODERS[data[0] % len(DECODERS)](data[1:])


def resigned(head: bytes) -> bytes:
    """Return a header whose digest fits, as an attacker would send it."""
    return head[:-32] + blake3(head[:-32]).digest()


def _header(data: bytes) -> bool:
    found = False
    for whole in (data, resigned(data)):
        try:
            header = unpack(whole)
        except CorruptError:
            continue
        assert pack(header) == whole
        found = True
    return found


def _frame(data: bytes) -> bool:
    """Read a frame whose header was signed again, wherever it is said to end."""
    try:
        size = header_length(data[:PREFIX_BYTES], max_body_bytes=MAX_BODY_BYTES)
    except CorruptError:
        size = len(data)
    found = False
    for whole in (data, resigned(data[:size]) + data[size:]):
        try:
            header, body = read_frame(BytesIO(whole), max_body_bytes=MAX_BODY_BYTES)
        except CorruptError:
            continue
        assert pack(header) + body.tobytes() == whole
        _decode(header.codec, body, header.elements)
        found = True
    return found


def _roster(data: bytes) -> bool:
    try:
        roster = unpack_roster(data)
    except CorruptError:
        return False
    assert pack_roster(roster) == data
    return True


def _body(data: bytes) -> bool:
    """Decode a body by the codec and the number of elements in its first bytes."""
    if len(data) < 3:
        return False
    try:
        packing = codec_by_code(data[0])
    except CorruptError:
        return False
    elements = int.from_bytes(data[1:3], "little") % MAX_ELEMENTS
    body = np.frombuffer(data[3:], np.uint8)
    size = packing.body_bytes(elements)
    parts = (body, np.resize(body, size) if body.size else body)
    return any([_decode(packing.name, part, elements) for part in parts])


def _decode(name: str, body: NDArray[np.uint8], elements: int) -> bool:
    out = np.empty(elements, np.float32)
    try:
        codec(name).decode(body, out)
    except CorruptError:
        return False
    assert np.isfinite(out).all()
    return True


DECODERS: tuple[Callable[[bytes], bool], ...] = (_header, _frame, _roster, _body)
NUM_SIGNED = 2
"""The first decoders: what they read has a digest in it."""


def seeds() -> list[bytes]:
    """Return one input for each decoder and golden vector."""
    found = []
    for file in sorted(GOLDEN.glob("*.atoll")):
        whole = file.read_bytes()
        header, body = read_frame(BytesIO(whole))
        size = len(whole) - len(body)
        found += [b"\0" + whole[:size], b"\1" + whole]
        if header.roster is not None:
            found.append(b"\2" + pack_roster(header.roster))
        if len(body) and header.elements < MAX_ELEMENTS:
            code = whole[7:8] + header.elements.to_bytes(2, "little")
            found.append(b"\3" + code + body.tobytes()[:4096])
    return found
