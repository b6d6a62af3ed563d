"""The fields of a header to bytes and back; frame.py adds and checks the digest."""

from __future__ import annotations

from struct import Struct

from atoll.errors import CorruptError
from atoll.wire.codecs import codec, codec_by_code
from atoll.wire.digests import piece_count
from atoll.wire.header import Header, Kind, OuterValues, Progress
from atoll.wire.layout import (
    DIGEST_BYTES,
    FIXED,
    FIXED_BYTES,
    MAGIC,
    NO_RESERVED,
    PREFIX,
    PREFIX_BYTES,
    VERSION,
    Fixed,
    Prefix,
)
from atoll.wire.roster import pack_roster, roster_bytes, unpack_roster
from atoll.wire.text import FETCH_AGAIN, decode_text

_KINDS = frozenset(Kind)
_OPTIMIZER_CODE = {"nesterov": 1, "heavy_ball": 2, "sgd": 3, "adam": 4}
_OPTIMIZER_OF = {code: name for name, code in _OPTIMIZER_CODE.items()}
_OUTER = Struct("<ffQ")
_SAME_RELEASE = "Use the same release of Atoll as the run."


def texts_of(header: Header) -> tuple[bytes, bytes, bytes, bytes]:
    """Return run, island, cursor and refused as they go over the wire."""
    return (
        header.run.encode(),
        header.island.encode(),
        header.progress.cursor,
        header.refused.encode(),
    )


def pack_fields(header: Header) -> bytes:
    """Return everything of a header but its digest."""
    roster = b"" if header.roster is None else pack_roster(header.roster)
    parts = (*texts_of(header), roster)
    tail = b"".join((*parts, *header.pieces))
    prefix = Prefix(
        magic=MAGIC,
        version=VERSION,
        kind=header.kind,
        codec=codec(header.codec).code,
        header_bytes=FIXED_BYTES + len(tail) + DIGEST_BYTES,
        reserved=0,
        body_bytes=header.body_bytes,
    )
    return PREFIX.pack(*prefix) + FIXED.pack(*_fixed_of(header, parts)) + tail


def header_bytes(header: Header) -> int:
    """Return how many bytes a header takes with its digest, without packing it."""
    roster = 0 if header.roster is None else roster_bytes(header.roster)
    texts = sum(map(len, texts_of(header)))
    pieces = sum(map(len, header.pieces))
    return FIXED_BYTES + texts + roster + pieces + DIGEST_BYTES


def judge_prefix(view: memoryview) -> Prefix:
    """Return the prefix, or raise CorruptError if it is no frame that we can read."""
    prefix = Prefix._make(PREFIX.unpack_from(view))
    if prefix.magic != MAGIC:
        raise CorruptError(
            f"these bytes start with {prefix.magic!r} instead of {MAGIC!r}, so they "
            f"are no frame. {FETCH_AGAIN}"
        )
    if prefix.version != VERSION:
        raise CorruptError(
            f"version {prefix.version} of the wire format is unknown here, which "
            f"reads version {VERSION}. {_SAME_RELEASE}"
        )
    if prefix.kind not in _KINDS:
        raise CorruptError(
            f"kind {prefix.kind} of frame is unknown; known are 1 to {len(Kind)}. "
            f"{_SAME_RELEASE}"
        )
    codec_by_code(prefix.codec)
    if prefix.reserved:
        raise CorruptError(f"reserved bytes 12 to 15 are not zero. {FETCH_AGAIN}")
    return prefix


def unpack_fields(whole: bytes) -> Header:
    """Return the header that `whole` encodes; its prefix and digest are verified.

    Raises:
        CorruptError: the fields cannot be read.
        UsageError: they can, and make a header that breaks its rules.
    """
    prefix = Prefix._make(PREFIX.unpack_from(whole))
    fixed = Fixed._make(FIXED.unpack_from(whole, PREFIX_BYTES))
    _judge_sizes(prefix, fixed)
    run, island, cursor, refused, roster, *pieces = _cut(whole, fixed)
    return Header(
        kind=Kind(prefix.kind),
        run=decode_text(run, what="run"),
        fragment=fixed.fragment,
        round=fixed.round,
        island=decode_text(island, what="island"),
        incarnation=fixed.incarnation,
        epoch=fixed.epoch,
        base=fixed.base,
        codec=codec_by_code(prefix.codec).name,
        seed=fixed.seed,
        elements=fixed.elements,
        weight=fixed.weight,
        norm=fixed.norm,
        progress=Progress(
            inner_steps=fixed.inner_steps, tokens=fixed.tokens, cursor=cursor
        ),
        refused=decode_text(refused, what="refused"),
        outer=_outer_values(fixed),
        roster=unpack_roster(roster) if roster else None,
        body_bytes=prefix.body_bytes,
        pieces=tuple(pieces),
    )


def _fixed_of(header: Header, parts: tuple[bytes, ...]) -> Fixed:
    run_bytes, island_bytes, cursor_bytes, refused_bytes, roster_bytes = map(len, parts)
    outer = header.outer
    return Fixed(
        elements=header.elements,
        fragment=header.fragment,
        pieces=len(header.pieces),
        round=header.round,
        incarnation=header.incarnation,
        epoch=header.epoch,
        base=header.base,
        seed=header.seed,
        weight=header.weight,
        norm=header.norm,
        inner_steps=header.progress.inner_steps,
        tokens=header.progress.tokens,
        optimizer=_OPTIMIZER_CODE[outer.optimizer] if outer else 0,
        run_bytes=run_bytes,
        island_bytes=island_bytes,
        reserved=0,
        cursor_bytes=cursor_bytes,
        refused_bytes=refused_bytes,
        lr=outer.lr if outer else 0.0,
        momentum=outer.momentum if outer else 0.0,
        outer_steps=outer.count if outer else 0,
        roster_bytes=roster_bytes,
        reserved_too=NO_RESERVED,
    )


def _judge_sizes(prefix: Prefix, fixed: Fixed) -> None:
    if fixed.reserved or fixed.reserved_too != NO_RESERVED:
        raise CorruptError(
            f"reserved bytes 123 or 148 to 159 are not zero. {FETCH_AGAIN}"
        )
    if fixed.pieces != piece_count(fixed.elements):
        raise CorruptError(
            f"pieces={fixed.pieces}, but {fixed.elements} elements have "
            f"{piece_count(fixed.elements)}. {FETCH_AGAIN}"
        )
    needed = FIXED_BYTES + sum(_sizes(fixed)) + DIGEST_BYTES
    if prefix.header_bytes != needed:
        raise CorruptError(
            f"header_bytes={prefix.header_bytes}, but its parts take {needed}. "
            f"{FETCH_AGAIN}"
        )


def _sizes(fixed: Fixed) -> tuple[int, ...]:
    return (
        fixed.run_bytes,
        fixed.island_bytes,
        fixed.cursor_bytes,
        fixed.refused_bytes,
        fixed.roster_bytes,
        DIGEST_BYTES * fixed.pieces,
    )


def _cut(whole: bytes, fixed: Fixed) -> list[bytes]:
    parts, at = [], FIXED_BYTES
    for size in (*_sizes(fixed)[:-1], *(DIGEST_BYTES,) * fixed.pieces):
        parts.append(whole[at : at + size])
        at += size
    return parts


def _outer_values(fixed: Fixed) -> OuterValues | None:
    if fixed.optimizer in _OPTIMIZER_OF:
        return OuterValues(
            optimizer=_OPTIMIZER_OF[fixed.optimizer],
            lr=fixed.lr,
            momentum=fixed.momentum,
            count=fixed.outer_steps,
        )
    if fixed.optimizer:
        raise CorruptError(
            f"optimizer {fixed.optimizer} is unknown; known are 0 to "
            f"{len(_OPTIMIZER_OF)}. {_SAME_RELEASE}"
        )
    # By their bytes, because -0.0 equals 0 and would be a second encoding of it.
    if _OUTER.pack(fixed.lr, fixed.momentum, fixed.outer_steps) != bytes(_OUTER.size):
        raise CorruptError(
            f"lr={fixed.lr}, momentum={fixed.momentum} and "
            f"outer_steps={fixed.outer_steps} must be 0 in a frame without outer "
            f"values. {FETCH_AGAIN}"
        )
    return None
