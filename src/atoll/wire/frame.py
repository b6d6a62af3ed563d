"""A frame: a header with its digest, then a body in pieces.

The first PREFIX_BYTES of a frame give the lengths of its header and body, so that a
reader checks them before it reserves memory. A header ends with its own digest; a body
is verified piece by piece while it streams in. docs/wire-format.md is the
specification; `FramePrefix` and `FixedFields` repeat its table field by field.

A received header is judged three times, each time with more knowledge: `header_length`
checks the limits with the prefix alone, `unpack` checks the digest and the encoding,
and `Header` itself checks the rules between its fields.

Below are proofs by keyed BLAKE3: of an island, of a committed state, of an outcome.

Proof of an island (`island_proof`). Islands of a run share one token, and any holder of
the token can read an island's name and incarnation in the status. Only the island knows
its key, and only the run knows the digest of that key. A BLAKE3 keyed by the digest
over the run, the name and the incarnation is therefore a bearer token that only this
incarnation of this island can show. Both sides derive it: nothing is stored, and a
coordinator that restarts derives it again. It is the same for every call of one
incarnation, so it needs the protection of the token that travels beside it: TLS, or a
connection that does not leave the machine.

Receipts (`state_receipt`, `outcome_receipt`). A coordinator sends a receipt with every
state and every outcome. Later an island shows it to prove that the run did commit the
state that the island holds. Only the holder of the run's receipt key can make one. A
receipt does not prove the identity of its sender.

Vouchers (`voucher`). The key digest of a member is known to the run and to that member
only. So a keyed digest of an agreed frame's header, whose pieces fix every byte of its
body, proves that this island holds this frame, whichever island delivers it.
"""

from __future__ import annotations

import hmac
import struct
from itertools import chain
from struct import Struct
from typing import NamedTuple

from blake3 import blake3

from atoll.errors import CorruptError, UsageError
from atoll.wire.codecs import codec, codec_by_code
from atoll.wire.digests import (
    Bytes,
    Floats,
    blake3_digest,
    piece_count,
    piece_digests,
    view_of,
)
from atoll.wire.header import (
    MERGES,
    FrameKind,
    Header,
    OuterValues,
    TrainingProgress,
)
from atoll.wire.roster import (
    FETCH_AGAIN,
    decode_text,
    pack_roster,
    roster_bytes,
    unpack_roster,
)

MAGIC = b"ATOL"
VERSION = 1
MAX_HEADER_BYTES = 2**26
MAX_BODY_BYTES = 2**40
DIGEST_BYTES = 32


class FramePrefix(NamedTuple):
    """The fields that a reader checks before it reads on."""

    magic: bytes
    version: int
    kind: int
    codec: int
    header_bytes: int
    reserved: int
    body_bytes: int


class FixedFields(NamedTuple):
    """The numbers behind the prefix, and the sizes of the parts that follow."""

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
    gathered: int
    cursor_bytes: int
    refused_bytes: int
    lr: float
    momentum: float
    outer_steps: int
    roster_bytes: int
    share: float
    buffer: int
    reserved: int


PREFIX = Struct("<4sHBBIIQ")
FIXED = Struct("<QIIQQQ16sQQdQQBBBBHHffQIfII")

PREFIX_BYTES = PREFIX.size
FIXED_BYTES = PREFIX.size + FIXED.size


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
    min_bytes = FIXED_BYTES + 1 + DIGEST_BYTES
    max_bytes = min(max_header_bytes, MAX_HEADER_BYTES)
    if not min_bytes <= fields.header_bytes <= max_bytes:
        raise CorruptError(
            f"header_bytes={fields.header_bytes} must be from {min_bytes} to "
            f"{max_bytes}. {FETCH_AGAIN}"
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
    data_copy = view.tobytes()
    if blake3_digest(data_copy[:-DIGEST_BYTES]) != data_copy[-DIGEST_BYTES:]:
        raise CorruptError(f"the header does not match its digest. {FETCH_AGAIN}")
    try:
        header = unpack_fields(data_copy)
    except UsageError as exc:
        raise CorruptError(f"{exc} {FETCH_AGAIN}") from exc
    if not header.is_sealed:
        raise CorruptError(
            f"elements=0 in the {header.name}, which is not refused. {FETCH_AGAIN}"
        )
    return header


def frame_bytes(header: Header) -> int:
    """Return how many bytes the whole frame takes, header and body."""
    # Needed for every island that gets an outcome, and a roster is long. The cached
    # size stays right, because a header never changes.
    size_bytes: int | None = header.__dict__.get("_frame_bytes")
    if size_bytes is None:
        require_sealed(header)
        size_bytes = header_bytes(header) + header.body_bytes
        header.__dict__["_frame_bytes"] = size_bytes
    return size_bytes


def with_body(header: Header, *parts: Bytes | Floats) -> Header:
    """Return `header` sealed for a body: its length and the digests of its pieces.

    Each of `parts` is one of the bodies if they are gathered, and else a part of one.
    """
    packing = codec(header.codec)
    bodies = [[part] for part in parts] if header.gathered else [parts]
    digests = (piece_digests(packing, header.elements, *body) for body in bodies)
    return header.sealed(
        body_bytes=header.num_bodies * packing.body_bytes(header.elements),
        pieces=tuple(chain.from_iterable(digests)),
    )


def verify_piece(header: Header, index: int, piece: Bytes) -> None:
    """Raise CorruptError unless `piece` is piece `index` of the body."""
    if not 0 <= index < len(header.pieces):
        raise UsageError(
            f"index={index} must be from 0 to below {len(header.pieces)}, the number "
            f"of pieces of the {header.name}."
        )
    view = view_of(piece)
    start, end = header.piece_range(index)
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
    for index in range(len(header.pieces)):
        start, end = header.piece_range(index)
        _verify(header, index, view[start:end], start)


def update_digest(header: Header) -> bytes:
    """Return an update's identity, the same for every incarnation that sends it."""
    # Needed at every step of an update's path; a header never changes.
    digest: bytes | None = header.__dict__.get("_update_digest")
    if digest is None:
        digest = header.__dict__["_update_digest"] = _update_digest(header)
    return digest


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


_KINDS = frozenset(FrameKind)
_OPTIMIZER_CODE = {"nesterov": 1, "heavy_ball": 2, "sgd": 3, "adam": 4}
_OPTIMIZER_OF = {code: name for name, code in _OPTIMIZER_CODE.items()}
_MERGE_CODE = {"": 0} | {name: code for code, name in enumerate(MERGES, start=1)}
_MERGE_OF = {code: name for name, code in _MERGE_CODE.items()}
_OUTER = Struct("<ffQfI")
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
    prefix = FramePrefix(
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


def judge_prefix(view: memoryview) -> FramePrefix:
    """Return the prefix, or raise CorruptError if it is no frame that we can read."""
    prefix = FramePrefix._make(PREFIX.unpack_from(view))
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
            f"kind {prefix.kind} of frame is unknown; known are 1 to {len(FrameKind)}. "
            f"{_SAME_RELEASE}"
        )
    codec_by_code(prefix.codec)
    if prefix.reserved:
        raise CorruptError(f"reserved bytes 12 to 15 are not zero. {FETCH_AGAIN}")
    return prefix


def unpack_fields(header_data: bytes) -> Header:
    """Return the header that `header_data` encodes; its prefix and digest are verified.

    Raises:
        CorruptError: the fields cannot be read.
        UsageError: they can, and make a header that breaks its rules.
    """
    prefix = FramePrefix._make(PREFIX.unpack_from(header_data))
    fixed = FixedFields._make(FIXED.unpack_from(header_data, PREFIX_BYTES))
    _judge_sizes(prefix, fixed)
    run, island, cursor, refused, roster, *pieces = _cut(header_data, fixed)
    return Header(
        kind=FrameKind(prefix.kind),
        run=decode_text(run, field="run"),
        fragment=fixed.fragment,
        round=fixed.round,
        island=decode_text(island, field="island"),
        incarnation=fixed.incarnation,
        epoch=fixed.epoch,
        base=fixed.base,
        codec=codec_by_code(prefix.codec).name,
        seed=fixed.seed,
        elements=fixed.elements,
        weight=fixed.weight,
        norm=fixed.norm,
        progress=TrainingProgress(
            inner_steps=fixed.inner_steps, tokens=fixed.tokens, cursor=cursor
        ),
        refused=decode_text(refused, field="refused"),
        outer=_outer_values(fixed),
        roster=unpack_roster(roster) if roster else None,
        gathered=_MERGE_OF[fixed.gathered],
        body_bytes=prefix.body_bytes,
        pieces=tuple(pieces),
    )


def _fixed_of(header: Header, parts: tuple[bytes, ...]) -> FixedFields:
    run_bytes, island_bytes, cursor_bytes, refused_bytes, roster_bytes = map(len, parts)
    outer = header.outer
    return FixedFields(
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
        gathered=_MERGE_CODE[header.gathered],
        cursor_bytes=cursor_bytes,
        refused_bytes=refused_bytes,
        lr=outer.lr if outer else 0.0,
        momentum=outer.momentum if outer else 0.0,
        outer_steps=outer.count if outer else 0,
        roster_bytes=roster_bytes,
        share=outer.share if outer else 0.0,
        buffer=outer.buffer if outer else 0,
        reserved=0,
    )


def _judge_sizes(prefix: FramePrefix, fixed: FixedFields) -> None:
    if fixed.reserved:
        raise CorruptError(f"reserved bytes 156 to 159 are not zero. {FETCH_AGAIN}")
    if fixed.gathered not in _MERGE_OF:
        raise CorruptError(
            f"gathered={fixed.gathered} is unknown; known are 0 to {len(MERGES)}. "
            f"{_SAME_RELEASE}"
        )
    # How many bodies are gathered is in the roster, which `Header` compares with this.
    if not fixed.gathered and fixed.pieces != piece_count(fixed.elements):
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


def _sizes(fixed: FixedFields) -> tuple[int, ...]:
    return (
        fixed.run_bytes,
        fixed.island_bytes,
        fixed.cursor_bytes,
        fixed.refused_bytes,
        fixed.roster_bytes,
        DIGEST_BYTES * fixed.pieces,
    )


def _cut(header_data: bytes, fixed: FixedFields) -> list[bytes]:
    parts, offset = [], FIXED_BYTES
    for size in (*_sizes(fixed)[:-1], *(DIGEST_BYTES,) * fixed.pieces):
        parts.append(header_data[offset : offset + size])
        offset += size
    return parts


def _outer_values(fixed: FixedFields) -> OuterValues | None:
    if fixed.optimizer in _OPTIMIZER_OF:
        return OuterValues(
            optimizer=_OPTIMIZER_OF[fixed.optimizer],
            lr=fixed.lr,
            momentum=fixed.momentum,
            count=fixed.outer_steps,
            share=fixed.share,
            buffer=fixed.buffer,
        )
    if fixed.optimizer:
        raise CorruptError(
            f"optimizer {fixed.optimizer} is unknown; known are 0 to "
            f"{len(_OPTIMIZER_OF)}. {_SAME_RELEASE}"
        )
    # By their bytes, because -0.0 equals 0 and would be a second encoding of it.
    values = (fixed.lr, fixed.momentum, fixed.outer_steps, fixed.share, fixed.buffer)
    if _OUTER.pack(*values) != bytes(_OUTER.size):
        raise CorruptError(
            f"lr={fixed.lr}, momentum={fixed.momentum}, "
            f"outer_steps={fixed.outer_steps}, share={fixed.share} and "
            f"buffer={fixed.buffer} must be 0 in a frame without outer values. "
            f"{FETCH_AGAIN}"
        )
    return None


PROOF_BYTES = 32
_ISLAND_TAG = b"atoll island v2"
_SIZE = struct.Struct("<I")
_INCARNATION = struct.Struct("<Q")


def island_proof(key: bytes, *, run: str, island: str, incarnation: int) -> bytes:
    """Return the proof of an incarnation of the island whose key digest is `key`."""
    data = [_ISLAND_TAG]
    for name in (run.encode(), island.encode()):
        data += [_SIZE.pack(len(name)), name]
    data.append(_INCARNATION.pack(incarnation))
    return blake3(b"".join(data), key=key).digest()


KEY_BYTES = 32
RECEIPT_BYTES = 16

_STATE_TAG = b"atoll receipt v1"
_OUTCOME_TAG = b"atoll outcome v1"
_STATE = struct.Struct("<IQB")


def state_receipt(
    key: bytes, *, run: str, fragment: int, round: int, digest: bytes
) -> bytes:
    """Return the receipt for a fragment's state after a round.

    BLAKE3, keyed, over the tag, the fragment, the round, the state digest with its
    length, and the run's name.
    """
    head = _STATE.pack(fragment, round, len(digest))
    return _mac(key, _STATE_TAG + head + digest + run.encode())


def outcome_receipt(key: bytes, agreed: Header) -> bytes:
    """Return the receipt for the outcome of a round: its header, and so its body."""
    return _mac(key, _OUTCOME_TAG + blake3_digest(pack(agreed)))


def is_same_receipt(shown: bytes, expected: bytes) -> bool:
    """Return whether a receipt is the expected one, in constant time."""
    return hmac.compare_digest(shown, expected)


def _mac(key: bytes, data: bytes) -> bytes:
    return blake3(data, key=key).digest(length=RECEIPT_BYTES)


VOUCHER_BYTES = 32
_VOUCHER_TAG = b"atoll voucher v1"


def voucher(key: bytes, agreed: Header) -> bytes:
    """Return the voucher for a sealed outcome, by the island with this key digest."""
    return blake3(_VOUCHER_TAG + blake3_digest(pack(agreed)), key=key).digest()
