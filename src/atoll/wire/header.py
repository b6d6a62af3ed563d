"""A frame's header: the value, and the rules that it must obey.

Rule 1: a `Header` that exists is right; building a wrong one raises UsageError.
Rule 2: bytes are judged by the same rules, and a wrong one raises CorruptError.
Rule 3: a field that a kind of frame does not use is empty or zero, so that a header
        has one encoding only.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, fields, replace
from enum import IntEnum

from atoll.errors import UsageError
from atoll.wire.codecs import codec
from atoll.wire.digests import piece_count, piece_range
from atoll.wire.roster import DIGEST_BYTES, U64_MAX, Roster, name_fault, reason_fault

MAX_CURSOR_BYTES = 4096
MAX_FRAGMENT = 2**32 - 1
MAX_BUFFER = 2**16
BASE_BYTES = 16

MERGES = ("mean", "radial", "trimmed")
"""How the updates in a gathered body become the mean."""

FP32_BYTES = 4
MAX_GATHERED_PIECES = 2**20
"""Of a gathered body: 32 MiB of digests, half of the largest header."""

MOMENTS = {"nesterov": 1, "heavy_ball": 1, "sgd": 0, "adam": 2}
"""The outer optimizers a frame can name, and the moments in a state of each."""


class FrameKind(IntEnum):
    """The kind of a frame; the numbers are those on the wire."""

    UPDATE = 1
    DEPARTING = 2
    AGREED = 3
    STATE = 4

    @property
    def is_update(self) -> bool:
        """Whether an island sent it as its work, staying or leaving."""
        return self is FrameKind.UPDATE or self is FrameKind.DEPARTING


@dataclass(frozen=True, kw_only=True)
class TrainingProgress:
    """An island's progress in training, cumulative over its incarnations."""

    inner_steps: int = 0
    tokens: int = 0
    cursor: bytes = b""
    """Opaque: where the island stands in its data."""

    def __post_init__(self) -> None:
        for field in ("inner_steps", "tokens"):
            value = getattr(self, field)
            if not 0 <= value <= U64_MAX:
                raise UsageError(f"{field}={value} must be from 0 to {U64_MAX}.")
        if len(self.cursor) > MAX_CURSOR_BYTES:
            raise UsageError(
                f"a cursor of {len(self.cursor)} bytes is above the limit of "
                f"{MAX_CURSOR_BYTES}."
            )


@dataclass(frozen=True, kw_only=True)
class OuterValues:
    """The outer step's values, exact in fp32; `count` is how many a state has seen.

    In an asynchronous nesterov run, `count` is the number of updates that counted since
    the velocity last moved.
    """

    optimizer: str
    lr: float
    momentum: float
    count: int = 0
    share: float = 0.0
    """In an agreed frame of an asynchronous run: the factor of the mean."""

    buffer: int = 0
    """In such a frame: how many updates make one outer step. 0: a synchronous run."""

    @property
    def scale(self) -> float:
        """The factor of the mean: 1 in a synchronous run."""
        return self.share if self.buffer else 1.0

    def in_state(self, count: int) -> OuterValues:
        """Return the values that a state frame with this count has."""
        return replace(self, count=count, share=0.0, buffer=0)

    def __post_init__(self) -> None:
        if self.optimizer not in MOMENTS:
            raise UsageError(
                f"optimizer={self.optimizer!r} is unknown to frames. "
                f"Known are {', '.join(sorted(MOMENTS))}."
            )
        for field, value in (("lr", self.lr), ("momentum", self.momentum)):
            if not (_is_measure(value) and _is_fp32(value)):
                raise UsageError(
                    f"{field}={value!r} must be finite, not negative and exact in fp32."
                )
        if self.optimizer == "sgd" and self.momentum:
            raise UsageError(f"momentum={self.momentum} must be 0 with sgd.")
        if not 0 <= self.count <= U64_MAX:
            raise UsageError(f"count={self.count} must be from 0 to {U64_MAX}.")
        self._require_share()

    def _require_share(self) -> None:
        if not 0 <= self.buffer <= MAX_BUFFER:
            raise UsageError(f"buffer={self.buffer} must be from 0 to {MAX_BUFFER}.")
        if not (_is_measure(self.share) and _is_fp32(self.share) and self.share <= 1.0):
            raise UsageError(
                f"share={self.share!r} must be from 0 to 1 and exact in fp32."
            )
        if bool(self.share) != bool(self.buffer):
            raise UsageError(
                f"share={self.share} with buffer={self.buffer}: both are 0 in a "
                "synchronous run, and neither is in an asynchronous one."
            )


@dataclass(frozen=True, kw_only=True)
class Header:
    """Everything a frame says before its body.

    Until `with_body` has filled in `body_bytes` and `pieces`, it is not sealed.
    """

    kind: FrameKind
    run: str
    fragment: int
    round: int
    island: str = ""
    incarnation: int = 0
    epoch: int = 0
    base: bytes = bytes(BASE_BYTES)
    codec: str = "fp32"
    seed: int = 0
    elements: int = 0
    weight: int = 1
    norm: float = 0.0
    progress: TrainingProgress = TrainingProgress()
    refused: str = ""
    """Why the island refuses its own values; then there is no body."""

    outer: OuterValues | None = None
    roster: Roster | None = None
    gathered: str = ""
    """How the bodies of a gathered outcome become the mean: the counted updates' own,
    one after another in roster order. Empty: there is one body, in `codec`."""

    body_bytes: int = 0
    pieces: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        if fault := _fault(self):
            raise UsageError(f"{fault}.")

    def sealed(self, *, body_bytes: int, pieces: tuple[bytes, ...]) -> Header:
        """Return this header with the size and the piece digests of its body.

        Only the rules about bodies are checked again. The others hold already, and a
        second check of every field would be most of the cost of sealing.
        """
        header = object.__new__(Header)
        header.__dict__.update(
            {field: self.__dict__[field] for field in _FIELDS},
            body_bytes=body_bytes,
            pieces=pieces,
        )
        if fault := _body_fault(header):
            raise UsageError(f"{fault}.")
        return header

    @property
    def is_sealed(self) -> bool:
        """Whether the body is known, or there is to be none."""
        if self.kind.is_update and not (self.elements or self.refused):
            return False
        return len(self.pieces) == self.num_bodies * piece_count(self.elements)

    @property
    def num_bodies(self) -> int:
        """How many bodies of `elements` elements follow: several if it is gathered."""
        if self.gathered and self.roster is not None:
            return len(self.roster.counted)
        return 1

    def piece_range(self, index: int) -> tuple[int, int]:
        """Return where piece `index` of the body starts and ends, in bytes."""
        packing = codec(self.codec)
        number, piece = divmod(index, max(1, piece_count(self.elements)))
        start, end = piece_range(packing, self.elements, piece)
        offset = number * packing.body_bytes(self.elements) if number else 0
        return offset + start, offset + end

    @property
    def name(self) -> str:
        """This frame's name in messages."""
        owner = f" of island {self.island!r}" if self.island else ""
        return (
            f"{self.kind.name.lower()} frame{owner} "
            f"(fragment {self.fragment}, round {self.round})"
        )


_FIELDS = tuple(field.name for field in fields(Header))
_NUMBERS = (
    *("round", "incarnation", "epoch", "seed"),
    *("elements", "weight", "body_bytes"),
)
_NO_PROGRESS = TrainingProgress()


def _fault(header: Header) -> str | None:
    """Return the first rule that a header breaks, if any."""
    fault = _text_fault(header) or _number_fault(header) or _gathered_fault(header)
    fault = fault or _body_fault(header)
    if fault or header.kind.is_update:
        return fault or _update_fault(header)
    fault = _common_fault(header)
    if header.kind is FrameKind.AGREED:
        return fault or _agreed_fault(header)
    return fault or _state_fault(header)


def _text_fault(header: Header) -> str | None:
    fault = name_fault(header.run, field="run")
    if header.island and not fault:
        fault = name_fault(header.island, field="island")
    return fault or reason_fault(header.refused, field="refused")


def _number_fault(header: Header) -> str | None:
    if not 0 <= header.fragment <= MAX_FRAGMENT:
        return f"fragment={header.fragment} must be from 0 to {MAX_FRAGMENT}"
    for field in _NUMBERS:
        if not 0 <= getattr(header, field) <= U64_MAX:
            return f"{field}={getattr(header, field)} must be from 0 to {U64_MAX}"
    if not _is_measure(header.norm):
        return f"norm={header.norm!r} must be finite and not negative"
    codec(header.codec)
    if len(header.base) != BASE_BYTES:
        return f"base has {len(header.base)} bytes; it must have {BASE_BYTES}"
    return None


def fits_gathered(elements: int, *, codec_name: str, num_bodies: int) -> bool:
    """Return whether updates may be gathered: not if their mean in fp32 is smaller."""
    return (
        num_bodies * codec(codec_name).body_bytes(elements) <= FP32_BYTES * elements
        and num_bodies * piece_count(elements) <= MAX_GATHERED_PIECES
    )


def _gathered_fault(header: Header) -> str | None:
    if not header.gathered:
        return None
    if header.gathered not in MERGES:
        return f"gathered={header.gathered!r} must be one of {', '.join(MERGES)}"
    if header.kind is not FrameKind.AGREED or header.roster is None:
        return (
            f"gathered={header.gathered!r} must be empty in the "
            f"{header.kind.name.lower()} frame: only an outcome has several bodies"
        )
    num_bodies = header.num_bodies
    if not num_bodies or not fits_gathered(
        header.elements, codec_name=header.codec, num_bodies=num_bodies
    ):
        return (
            f"{num_bodies} updates of {header.elements} elements in {header.codec} "
            "must not be gathered: at least one is needed, and together they must "
            f"take at most the {FP32_BYTES * header.elements} bytes of their mean in "
            f"fp32, and have at most {MAX_GATHERED_PIECES} pieces"
        )
    return None


def _body_fault(header: Header) -> str | None:
    if not header.pieces and not header.body_bytes:
        return None
    num_bodies = header.num_bodies
    needed = num_bodies * codec(header.codec).body_bytes(header.elements)
    bodies = f"{num_bodies} times " if header.gathered else ""
    if header.body_bytes != needed:
        return (
            f"body_bytes={header.body_bytes}, but {bodies}{header.elements} elements "
            f"in {header.codec} must take {needed}"
        )
    pieces = num_bodies * piece_count(header.elements)
    if len(header.pieces) != pieces:
        return (
            f"{len(header.pieces)} pieces are listed, but {bodies}{header.elements} "
            f"elements must have {pieces}"
        )
    if any([len(piece) != DIGEST_BYTES for piece in header.pieces]):
        return f"each piece digest must have {DIGEST_BYTES} bytes"
    return None


def _update_fault(header: Header) -> str | None:
    if not header.island:
        return "an update must name its island"
    if header.outer is not None or header.roster is not None:
        return "an update must carry neither outer values nor a roster"
    if header.refused and header.elements:
        return f"elements={header.elements} must be 0 in an update that is refused"
    if not header.refused and not header.weight:
        return "weight=0 must be at least 1 in an update that is not refused"
    return None


def _common_fault(header: Header) -> str | None:
    kind = header.kind.name.lower()
    if header.progress != _NO_PROGRESS or header.refused:
        return f"progress and refused must be empty in the {kind} frame"
    if header.outer is None:
        return f"the {kind} frame must carry its outer values"
    return None


def _agreed_fault(header: Header) -> str | None:
    if header.island or header.incarnation:
        return (
            f"island={header.island!r} and incarnation={header.incarnation} must be "
            "empty in the agreed frame, which belongs to no island"
        )
    if header.roster is None:
        return "the agreed frame must carry its roster"
    if bool(header.roster.counted) != bool(header.elements):
        return (
            f"elements={header.elements} with {len(header.roster.counted)} counted "
            "islands: the mean must have elements, and without counted islands none"
        )
    if header.outer is not None and header.outer.count:
        return f"count={header.outer.count} must be 0 in the agreed frame"
    if header.outer is not None and header.outer.buffer:
        return _buffer_fault(header, header.outer)
    return None


def _buffer_fault(header: Header, outer: OuterValues) -> str | None:
    if outer.optimizer not in ("nesterov", "sgd"):
        return f"buffer={outer.buffer} must be 0 with {outer.optimizer}"
    if not header.elements:
        return f"buffer={outer.buffer} must be 0 in a void round, which has no mean"
    return None


def _state_fault(header: Header) -> str | None:
    if header.incarnation and not header.island:
        return f"incarnation={header.incarnation} must be 0 without an island"
    if header.roster is not None:
        return "the state frame must carry no roster"
    if header.codec != "fp32":
        return f"codec={header.codec!r} must be 'fp32' in the state frame"
    if header.outer is not None:
        if header.outer.buffer:
            return f"buffer={header.outer.buffer} must be 0 in the state frame"
        arrays = 1 + MOMENTS[header.outer.optimizer]
        if not header.elements or header.elements % arrays:
            return (
                f"elements={header.elements} must be a positive multiple of {arrays}, "
                f"the anchor and the moments of {header.outer.optimizer}"
            )
    return None


def _is_measure(value: float) -> bool:
    return math.isfinite(value) and math.copysign(1.0, value) > 0


def _is_fp32(value: float) -> bool:
    try:
        (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:
        return False
    return bool(rounded == value)
