"""Headers to bytes and back, and bodies checked against them.

The first PREFIX_BYTES of a frame say how long its header and body are, so a reader
judges them before it reserves anything. A header ends with its own digest; a body is
verified piece by piece as it streams in. docs/wire-format.md is the law.
"""

from __future__ import annotations

from struct import Struct

from atoll.errors import CorruptError, UsageError
from atoll.wire.codecs import codec
from atoll.wire.digests import (
    Bytes,
    Floats,
    blake3_digest,
    piece_digests,
    piece_range,
    view_of,
)
from atoll.wire.header import Header
from atoll.wire.layout import (
    DIGEST_BYTES,
    FIXED_BYTES,
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
)
from atoll.wire.packing import (
    header_bytes,
    judge_prefix,
    pack_fields,
    texts_of,
    unpack_fields,
)
from atoll.wire.text import FETCH_AGAIN

_UPDATE_TAG = b"atoll update v1\0"
_UPDATE = Struct("<IQ16sQQQBQQd")


def pack(header: Header) -> bytes:
    """Return the one encoding of a sealed header."""
    require_sealed(header)
    head = pack_fields(header)
    if len(head) + DIGEST_BYTES > MAX_HEADER_BYTES:
        raise UsageError(
            f"the header of the {header.name} takes {len(head) + DIGEST_BYTES} bytes, "
            f"above the limit of {MAX_HEADER_BYTES}. Use more fragments."
        )
    return head + blake3_digest(head)


def require_sealed(header: Header) -> None:
    """Raise UsageError if a header does not know its body yet."""
    if not header.is_sealed:
        raise UsageError(f"the {header.name} has no body yet. Call with_body first.")


def header_length(
    prefix: Bytes,
    *,
    max_header_bytes: int = MAX_HEADER_BYTES,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> int:
    """Return how many bytes the header has in all, judged by its first ones alone.

    Raises:
        CorruptError: this is no frame, one we cannot read, or one above the limits.
    """
    view = view_of(prefix)
    if len(view) < PREFIX_BYTES:
        raise CorruptError(
            f"{len(view)} bytes are too few for a frame, which has at least "
            f"{PREFIX_BYTES}. {FETCH_AGAIN}"
        )
    fields = judge_prefix(view)
    least = FIXED_BYTES + 1 + DIGEST_BYTES
    most = min(max_header_bytes, MAX_HEADER_BYTES)
    if not least <= fields.header_bytes <= most:
        raise CorruptError(
            f"header_bytes={fields.header_bytes} must be from {least} to {most}. "
            f"{FETCH_AGAIN}"
        )
    if fields.body_bytes > max_body_bytes:
        raise CorruptError(
            f"body_bytes={fields.body_bytes} is above the limit of {max_body_bytes}. "
            "Raise limits.max_body_bytes if the sender is right."
        )
    return fields.header_bytes


def unpack(
    data: Bytes,
    *,
    max_header_bytes: int = MAX_HEADER_BYTES,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> Header:
    """Return the header that `data` encodes, without its body.

    Raises:
        CorruptError: on any bytes that `pack` did not write; nothing else is raised.
    """
    view = view_of(data)
    needed = header_length(
        view, max_header_bytes=max_header_bytes, max_body_bytes=max_body_bytes
    )
    if len(view) != needed:
        raise CorruptError(
            f"the header has {len(view)} bytes, but says that it has {needed}. "
            f"{FETCH_AGAIN}"
        )
    whole = view.tobytes()
    if blake3_digest(whole[:-DIGEST_BYTES]) != whole[-DIGEST_BYTES:]:
        raise CorruptError(f"the header does not match its digest. {FETCH_AGAIN}")
    try:
        header = unpack_fields(whole)
    except UsageError as exc:
        raise CorruptError(f"{exc} {FETCH_AGAIN}") from exc
    if not header.is_sealed:
        raise CorruptError(
            f"elements=0 in the {header.name}, which is not refused. {FETCH_AGAIN}"
        )
    return header


def frame_bytes(header: Header) -> int:
    """Return how many bytes the whole frame takes, header and body."""
    # Everyone who gets an outcome asks, and a roster is long; a header never changes.
    known: int | None = header.__dict__.get("_frame_bytes")
    if known is None:
        require_sealed(header)
        known = header_bytes(header) + header.body_bytes
        header.__dict__["_frame_bytes"] = known
    return known


def with_body(header: Header, *parts: Bytes | Floats) -> Header:
    """Return `header` sealed for a body: its length and the digests of its pieces."""
    packing = codec(header.codec)
    pieces = piece_digests(packing, header.elements, *parts)
    return header.sealed(body_bytes=packing.body_bytes(header.elements), pieces=pieces)


def verify_piece(header: Header, index: int, piece: Bytes) -> None:
    """Raise CorruptError unless `piece` is piece `index` of the body."""
    if not 0 <= index < len(header.pieces):
        raise UsageError(
            f"index={index} must be from 0 to below {len(header.pieces)}, the number "
            f"of pieces of the {header.name}."
        )
    view = view_of(piece)
    start, end = piece_range(codec(header.codec), header.elements, index)
    if len(view) != end - start:
        raise CorruptError(
            f"piece {index} of the {header.name} has {len(view)} bytes instead of "
            f"{end - start}. Fetch the piece again."
        )
    _verify(header, index, view, start)


def _verify(header: Header, index: int, piece: memoryview, start: int) -> None:
    if blake3_digest(piece) != header.pieces[index]:
        end = start + len(piece)
        raise CorruptError(
            f"piece {index} of the {header.name}, bytes {start} to {end} of the body, "
            "does not match its digest. Fetch the piece again."
        )


def verify_body(header: Header, body: Bytes) -> None:
    """Raise CorruptError unless `body` is the one that `header` was sealed for."""
    view = view_of(body)
    if len(view) != header.body_bytes:
        raise CorruptError(
            f"the body of the {header.name} has {len(view)} bytes instead of "
            f"{header.body_bytes}. {FETCH_AGAIN}"
        )
    packing = codec(header.codec)
    for index in range(len(header.pieces)):
        start, end = piece_range(packing, header.elements, index)
        _verify(header, index, view[start:end], start)


def update_digest(header: Header) -> bytes:
    """Return an update's identity, the same whichever life of its island sends it."""
    # Asked for at every turn of an update's way; a header never changes.
    known: bytes | None = header.__dict__.get("_update_digest")
    if known is None:
        known = header.__dict__["_update_digest"] = _update_digest(header)
    return known


def _update_digest(header: Header) -> bytes:
    if not (header.kind.is_update and header.is_sealed):
        raise UsageError(
            f"the {header.name} has no update digest: only a sealed update has."
        )
    numbers = _UPDATE.pack(
        header.fragment,
        header.round,
        header.base,
        header.weight,
        header.progress.inner_steps,
        header.progress.tokens,
        codec(header.codec).code,
        header.elements,
        header.seed,
        header.norm,
    )
    sized = b"".join(
        len(text).to_bytes(2, "little") + text for text in texts_of(header)
    )
    pieces = len(header.pieces).to_bytes(4, "little") + b"".join(header.pieces)
    return blake3_digest(_UPDATE_TAG + numbers + sized + pieces)
