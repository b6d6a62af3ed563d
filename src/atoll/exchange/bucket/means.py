"""From a roster and the updates in a bucket to the agreed body, the same for everyone.

Rule 1: the mean is a function of the roster and of bytes that exist before the roster
        does, so any island can make any part of it, and two that do put equal bytes.
Rule 2: only bytes with the digest that the roster lists count. An update that does not
        verify is damage: no mean is made of it, and `Unverified` names its island.
        A piece that verifies and does not decode counts as zeros for every reader:
        that is a function of its bytes, too. The mean lists its island in `spoilt`.
Rule 3: up to three islands read each other's updates whole (the direct plan). More
        divide the pieces into shards: each island reads its part of every update, puts
        the mean of it, and reads the other parts. So an island transfers about three
        times the size of its update, however many islands there are.
Rule 4: with `wire.down = "gather"` all islands read each other's updates whole, as long
        as these are no larger than their mean in fp32. No mean is put or read, so the
        one that each island computes is in fp32: nothing is encoded again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll import wire
from atoll.errors import CorruptError, NonFinite, UsageError
from atoll.exchange.api.bodies import (
    FLAG,
    MAX_LARGE_BYTES,
    NAME,
    integer,
    listed,
    load,
    table,
)
from atoll.exchange.bucket import documents
from atoll.fields import JsonField
from atoll.protocol import refuse_all
from atoll.store import Data
from atoll.weights import FragmentLayout, Terms
from atoll.weights.layout import flat_layout
from atoll.weights.reduce import Contribution, reduce
from atoll.weights.verify import exceeds_largest

U8 = NDArray[np.uint8]

DIRECT_ISLANDS = 3
"""Up to this many read each other's updates, with fewer requests than shards."""

OVERFLOWS = "norm: the mean overflows"

_SIZE = Struct("<Q")
_HEAD_BYTES = 2048
"""Upper bound of a mean's head without digests and names."""

_DIGEST_CHARACTERS, _ESCAPED = 67, 16
"""In JSON: a digest, and at most a letter of a name with its share of quotes."""


class Unverified(Exception):
    """Counted updates are missing, or lack the digests that the roster lists."""

    def __init__(self, islands: Sequence[str]) -> None:
        super().__init__(", ".join(islands))
        self.islands = tuple(islands)


@dataclass(frozen=True)
class Pieces:
    """Some pieces of a fragment's vector, one after the other."""

    first: int
    last: int
    """The first one that does not belong to it."""

    elements: int
    """Of the whole fragment."""

    @property
    def size(self) -> int:
        """The number of elements in them."""
        end = min(self.last * wire.PIECE_ELEMENTS, self.elements)
        return end - self.first * wire.PIECE_ELEMENTS

    def span(self, codec: wire.Codec) -> tuple[int, int]:
        """Return the first and the last offset of the pieces in a body."""
        begin, _ = wire.piece_range(codec, self.elements, self.first)
        _, end = wire.piece_range(codec, self.elements, self.last - 1)
        return begin, end


@dataclass(frozen=True, kw_only=True)
class Mean:
    """The agreed body of some pieces."""

    run: str
    of: bytes
    """The digest of the roster that it belongs to."""

    shard: int
    overflows: bool
    """The mean exceeds the range of codec or outer step, so the round is void."""

    spoilt: tuple[str, ...]
    """Islands whose updates have pieces that do not decode, and count as zeros."""

    digests: tuple[bytes, ...]
    body: U8


_HEAD: JsonField[Any] = table(
    dict,
    {
        "run": NAME,
        "of": documents.DIGEST,
        "shard": integer(),
        "overflows": FLAG,
        "spoilt": listed(NAME, max_items=65_536),
        "digests": listed(documents.DIGEST, max_items=2**20),
    },
)


def owners(
    roster: wire.Roster,
    departing: frozenset[str],
    layout: FragmentLayout,
    terms: Terms,
) -> tuple[str, ...]:
    """Return the owner of each shard; empty for the direct plan."""
    counted = [entry.island for entry in roster.counted]
    if len(counted) <= DIRECT_ISLANDS or terms.merge == "radial":
        return ()  # a radial mean needs whole tensors: every island reads all updates
    if terms.gathers and wire.fits_gathered(
        layout.elements, codec_name=terms.up.name, num_bodies=len(counted)
    ):
        return ()  # they are smaller than the shards of their mean
    staying = [name for name in counted if name not in departing]
    return tuple(staying or counted)[: documents.MAX_SHARDS]


def shards(document: documents.RosterDocument, elements: int) -> list[Pieces]:
    """Return the pieces of each shard; their numbers differ by at most one."""
    pieces = wire.piece_count(elements)
    count = max(1, min(len(document.shards), pieces))
    cuts = [pieces * number // count for number in range(count + 1)]
    return [Pieces(first, last, elements) for first, last in pairwise(cuts)]


def roster_digest(document: documents.RosterDocument) -> bytes:
    """Return the digest by which a mean names its roster."""
    if document.before:
        return document.digest
    # Of 0.1.0, or of a round outside of buckets: a digest of the fields that decide.
    prefix = (
        f"{document.run}/{document.fragment}/{document.round}/{document.base.hex()}/"
    ).encode()
    return wire.blake3_digest(prefix + document.roster.packed)


def mean_of(
    document: documents.RosterDocument,
    shard: int,
    pieces: Pieces,
    updates: Mapping[str, tuple[wire.Header | None, U8]],
    layout: FragmentLayout,
    terms: Terms,
) -> Mean:
    """Return the mean of some pieces of the counted updates.

    `updates` has each one's header, and the bytes of these pieces. One that is missing
    or foreign has None.

    Raises:
        Unverified: some do not have the digests that the roster lists.
    """
    _require_verified(document, updates, pieces, terms.up)
    part = layout if pieces.size == layout.elements else flat_layout(pieces.size)
    reduced = partial(reduce, part, down=terms.down, merge=terms.merge)
    contributions, spoilt = _contributions(document, updates, pieces, terms.up)
    body, overflows = np.empty(0, np.uint8), False
    try:
        body = reduced(contributions)
    except (CorruptError, NonFinite):
        # Pieces that do not decode are searched only now: to decode every piece twice
        # would almost always be a waste.
        contributions, spoilt = _contributions(
            document, updates, pieces, terms.up, must_decode=True
        )
        try:
            body = reduced(contributions)
        except NonFinite:
            overflows = True
    # The norms in the headers are believed here, so the mean itself is measured.
    if len(body) and exceeds_largest(terms.down, body, pieces.size):
        body, overflows = np.empty(0, np.uint8), True
    return Mean(
        run=document.run,
        of=roster_digest(document),
        shard=shard,
        overflows=overflows,
        spoilt=spoilt,
        digests=wire.piece_digests(terms.down, pieces.size, body) if len(body) else (),
        body=body,
    )


def _require_verified(
    document: documents.RosterDocument,
    updates: Mapping[str, tuple[wire.Header | None, U8]],
    pieces: Pieces,
    up: wire.Codec,
) -> None:
    damaged = []
    for entry in document.roster.counted:
        header, body = updates[entry.island]
        if header is None or not all(
            _is_verified(header, body, index, pieces, up)
            for index in range(pieces.first, pieces.last)
        ):
            damaged.append(entry.island)
    if damaged:
        raise Unverified(damaged)


def _contributions(
    document: documents.RosterDocument,
    updates: Mapping[str, tuple[wire.Header | None, U8]],
    pieces: Pieces,
    up: wire.Codec,
    *,
    must_decode: bool = False,
) -> tuple[list[Contribution], tuple[str, ...]]:
    """Return each update's contribution, and the islands with pieces of zeros."""
    spoilt, contributions = [], []
    for entry in document.roster.counted:
        _, body = updates[entry.island]
        bad = [
            index
            for index in range(pieces.first, pieces.last)
            if must_decode and not _decodes(body, index, pieces, up)
        ]
        if bad:
            spoilt.append(entry.island)
            body = _with_zeros(body, bad, pieces, up)
        contributions.append(Contribution(up, body, entry.weight))
    return contributions, tuple(spoilt)


def _with_zeros(body: U8, bad: Sequence[int], pieces: Pieces, up: wire.Codec) -> U8:
    begin, _ = pieces.span(up)
    clean = body.copy()
    for index in bad:
        first, last = wire.piece_range(up, pieces.elements, index)
        zeros = np.zeros(_elements_of(index, pieces.elements), np.float32)
        up.encode(zeros, clean[first - begin : last - begin])
    return clean


def _elements_of(index: int, elements: int) -> int:
    return min(wire.PIECE_ELEMENTS, elements - index * wire.PIECE_ELEMENTS)


def _piece(body: U8, index: int, pieces: Pieces, up: wire.Codec) -> U8:
    begin, _ = pieces.span(up)
    first, last = wire.piece_range(up, pieces.elements, index)
    return body[first - begin : last - begin]


def _is_verified(
    header: wire.Header, body: U8, index: int, pieces: Pieces, up: wire.Codec
) -> bool:
    first, last = wire.piece_range(up, pieces.elements, index)
    piece = _piece(body, index, pieces, up)
    if len(piece) != last - first or index >= len(header.pieces):
        return False
    return wire.blake3_digest(piece) == header.pieces[index]


def _decodes(body: U8, index: int, pieces: Pieces, up: wire.Codec) -> bool:
    values = np.empty(_elements_of(index, pieces.elements), np.float32)
    try:
        up.decode(_piece(body, index, pieces, up), values)
    except CorruptError:
        return False
    return True


def agreed(
    document: documents.RosterDocument,
    means: Sequence[Mean],
    layout: FragmentLayout,
    down: wire.Codec,
) -> tuple[wire.Header, U8]:
    """Return the agreed frame of a round from the means of all its shards."""
    roster, body = document.roster, np.empty(0, np.uint8)
    digests: tuple[bytes, ...] = ()
    if any(mean.overflows for mean in means):
        roster = refuse_all(roster, OVERFLOWS)
    elif roster.counted:
        bodies = [mean.body for mean in means]
        body = bodies[0] if len(bodies) == 1 else np.concatenate(bodies)
        digests = tuple(digest for mean in means for digest in mean.digests)
    header = header_of(document, roster, layout, down)
    return header.sealed(body_bytes=len(body), pieces=digests), body


def header_of(
    document: documents.RosterDocument,
    roster: wire.Roster,
    layout: FragmentLayout,
    down: wire.Codec,
) -> wire.Header:
    """Return the header of a round's agreed frame, whose body is not known yet."""
    return wire.Header(
        kind=wire.FrameKind.AGREED,
        run=document.run,
        fragment=document.fragment,
        round=document.round,
        epoch=document.epoch,
        base=document.base,
        codec=down.name,
        elements=layout.elements if roster.counted else 0,
        weight=0,
        outer=document.outer if roster.counted else document.outer.in_state(0),
        roster=roster,
    )


def packed_mean(mean: Mean, key: str) -> list[Data]:
    """Return a mean as the bytes of the object at `key`."""
    (head,) = documents.packed(_HEAD, mean, key)
    return [_SIZE.pack(len(head)), head, mean.body.data]


def max_bytes(
    document: documents.RosterDocument, pieces: Pieces, down: wire.Codec
) -> int:
    """Return an upper bound of the size of a mean's object.

    A tight one: a range that begins behind the end costs another request.
    """
    begin, end = pieces.span(down)
    names = sum(_ESCAPED * len(entry.island) for entry in document.roster.counted)
    digests = _DIGEST_CHARACTERS * (pieces.last - pieces.first)
    return _SIZE.size + _HEAD_BYTES + names + digests + end - begin


def parse_mean(
    data: memoryview,
    document: documents.RosterDocument,
    shard: int,
    pieces: Pieces,
    down: wire.Codec,
    *,
    key: str,
) -> Mean:
    """Return the mean in an object's bytes, verified.

    Raises:
        CorruptError: these are not the bytes of that part of that round's mean.
    """
    fields, body = _split(data, key, is_sealed=bool(document.before))
    mean = Mean(body=body, **fields)
    begin, end = pieces.span(down)
    size = 0 if mean.overflows else end - begin
    if (mean.of, mean.shard, len(body)) != (roster_digest(document), shard, size):
        raise _foreign("it belongs to another round or shard, or is cut off")
    if size and wire.piece_digests(down, pieces.size, body) != mean.digests:
        raise _foreign("its bytes do not match their digests")
    if size and exceeds_largest(down, body, pieces.size):
        raise _foreign("its values exceed those of any counted updates")
    return mean


def _split(data: memoryview, key: str, *, is_sealed: bool) -> tuple[dict[str, Any], U8]:
    """Return head and body; only the means of a roster of 0.1.0 have a bare head."""
    if len(data) < _SIZE.size:
        raise _foreign(f"{len(data)} bytes are too few")
    (size,) = _SIZE.unpack_from(data)
    end = _SIZE.size + size
    if size > MAX_LARGE_BYTES or end > len(data):
        raise _foreign(f"it says that its head has {size} bytes")
    head = data[_SIZE.size : end]
    try:
        if is_sealed or bytes(head[:10]) == b'{"digest":':
            fields = documents.parse(_HEAD, head, key=key)
        else:
            fields = _HEAD.read(
                load(head, name="mean", max_bytes=MAX_LARGE_BYTES), "mean"
            )
    except UsageError as exc:
        raise _foreign(str(exc)) from exc
    return fields, np.frombuffer(data[end:], np.uint8)


def _foreign(reason: str) -> CorruptError:
    return CorruptError(f"This is no part of the round's mean: {reason}.")
