"""From a roster and the updates in a bucket to the agreed body, the same for everyone.

Rule 1: the mean is a function of the roster and of bytes that are there before the
        roster is, so anybody can make any part of it, and two that do put the same.
Rule 2: only bytes with the digest that the roster lists count. An update that does not
        verify is damage: no mean is made of it, and `Unverified` names its island.
        A piece that verifies and does not decode counts as zeros for every reader,
        because that is a function of its bytes, too. The maker of the mean lists its
        island in `spoilt`.
Rule 3: up to three islands read each other's updates whole (the direct plan). More
        divide the pieces into shards: each island reads its part of every update, puts
        the mean of it, and reads the other parts. So what an island moves is about
        three times its update, however many there are.
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

from atoll.errors import CorruptError, NonFinite, UsageError
from atoll.exchange.api.fields import (
    FLAG,
    MAX_LARGE_BYTES,
    NAME,
    JsonField,
    listed,
    load,
    table,
    whole,
)
from atoll.exchange.bucket.documents import (
    DIGEST,
    MAX_SHARDS,
    RosterDocument,
    packed,
    parse,
)
from atoll.protocol import TensorSpec, refuse_all
from atoll.store import Data
from atoll.weights import FragmentLayout, Terms
from atoll.weights.reduce import Contribution, reduce
from atoll.weights.verify import exceeds_largest
from atoll.wire import (
    PIECE_ELEMENTS,
    Codec,
    FrameKind,
    Header,
    Roster,
    blake3_digest,
    piece_count,
    piece_digests,
    piece_range,
)

U8 = NDArray[np.uint8]

DIRECT_ISLANDS = 3
"""So many read each other's updates: fewer bytes and fewer requests than shards."""

OVERFLOWS = "norm: the mean overflows"

_SIZE = Struct("<Q")
_HEAD_BYTES = 2048
"""What a mean's head takes beside digests and names, and more."""

_DIGEST_CHARACTERS, _ESCAPED = 67, 16
"""In JSON: a digest, and at most a letter of a name with its share of quotes."""


class Unverified(Exception):
    """Counted updates are not there with the digests that the roster lists."""

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
        """How many elements they hold."""
        end = min(self.last * PIECE_ELEMENTS, self.elements)
        return end - self.first * PIECE_ELEMENTS

    def span(self, of: Codec) -> tuple[int, int]:
        """Return where they begin and end in a body."""
        begin, _ = piece_range(of, self.elements, self.first)
        _, end = piece_range(of, self.elements, self.last - 1)
        return begin, end


@dataclass(frozen=True, kw_only=True)
class Mean:
    """The agreed body of some pieces."""

    run: str
    of: bytes
    """The digest of the roster that it belongs to."""

    shard: int
    overflows: bool
    """The mean is beyond what the codec or an outer step can take: then the whole
    round is void."""

    spoilt: tuple[str, ...]
    """Whose updates have pieces here that do not decode, and count as zeros."""

    digests: tuple[bytes, ...]
    body: U8


_HEAD: JsonField[Any] = table(
    dict,
    {
        "run": NAME,
        "of": DIGEST,
        "shard": whole(),
        "overflows": FLAG,
        "spoilt": listed(NAME, max_items=65_536),
        "digests": listed(DIGEST, max_items=2**20),
    },
)


def owners(roster: Roster, departing: frozenset[str], merge: str) -> tuple[str, ...]:
    """Return who makes which shard; nobody: the direct plan."""
    counted = [entry.island for entry in roster.counted]
    if len(counted) <= DIRECT_ISLANDS or merge == "radial":
        return ()  # a radial mean needs whole tensors: everybody reads everything
    staying = [name for name in counted if name not in departing]
    return tuple(staying or counted)[:MAX_SHARDS]


def shards(document: RosterDocument, elements: int) -> list[Pieces]:
    """Return which pieces each shard of a round has: all alike, some one piece more."""
    pieces = piece_count(elements)
    count = max(1, min(len(document.shards), pieces))
    cuts = [pieces * number // count for number in range(count + 1)]
    return [Pieces(first, last, elements) for first, last in pairwise(cuts)]


def roster_digest(document: RosterDocument) -> bytes:
    """Return what a mean names as the roster it belongs to."""
    if document.before:
        return document.digest
    # Of 0.1.0, or of a round that no bucket has: these name what decides the mean.
    said = (
        f"{document.run}/{document.fragment}/{document.round}/{document.base.hex()}/"
    ).encode()
    return blake3_digest(said + document.roster.packed)


def mean_of(
    document: RosterDocument,
    shard: int,
    pieces: Pieces,
    updates: Mapping[str, tuple[Header | None, U8]],
    layout: FragmentLayout,
    terms: Terms,
) -> Mean:
    """Return the mean of some pieces of the counted updates.

    `updates` has each one's header, and the bytes of these pieces. One that is missing
    or foreign has None.

    Raises:
        Unverified: some are not what the roster lists.
    """
    _require_verified(document, updates, pieces, terms.up)
    here = layout if pieces.size == layout.elements else _flat(pieces.size)
    reduced = partial(reduce, here, down=terms.down, merge=terms.merge)
    contributions, spoilt = _contributions(document, updates, pieces, terms.up)
    body, overflows = np.empty(0, np.uint8), False
    try:
        body = reduced(contributions)
    except (CorruptError, NonFinite):
        # What does not decode, or hides among what overflows, is looked for now only:
        # to decode every piece twice would be for nothing almost always.
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
        digests=piece_digests(terms.down, pieces.size, body) if len(body) else (),
        body=body,
    )


def _flat(elements: int) -> FragmentLayout:
    """Return a layout of one tensor: only its size matters to a mean."""
    tensor = TensorSpec(
        name="pieces", shape=(elements,), dtype="float32", role="parameter"
    )
    return FragmentLayout((tensor,))


def _require_verified(
    document: RosterDocument,
    updates: Mapping[str, tuple[Header | None, U8]],
    pieces: Pieces,
    up: Codec,
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
    document: RosterDocument,
    updates: Mapping[str, tuple[Header | None, U8]],
    pieces: Pieces,
    up: Codec,
    *,
    must_decode: bool = False,
) -> tuple[list[Contribution], tuple[str, ...]]:
    """Return what counts of each update, and whose have pieces that are zeros."""
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


def _with_zeros(body: U8, bad: Sequence[int], pieces: Pieces, up: Codec) -> U8:
    begin, _ = pieces.span(up)
    clean = body.copy()
    for index in bad:
        first, last = piece_range(up, pieces.elements, index)
        zeros = np.zeros(_elements_of(index, pieces.elements), np.float32)
        up.encode(zeros, clean[first - begin : last - begin])
    return clean


def _elements_of(index: int, elements: int) -> int:
    return min(PIECE_ELEMENTS, elements - index * PIECE_ELEMENTS)


def _piece(body: U8, index: int, pieces: Pieces, up: Codec) -> U8:
    begin, _ = pieces.span(up)
    first, last = piece_range(up, pieces.elements, index)
    return body[first - begin : last - begin]


def _is_verified(
    header: Header, body: U8, index: int, pieces: Pieces, up: Codec
) -> bool:
    first, last = piece_range(up, pieces.elements, index)
    piece = _piece(body, index, pieces, up)
    if len(piece) != last - first or index >= len(header.pieces):
        return False
    return blake3_digest(piece) == header.pieces[index]


def _decodes(body: U8, index: int, pieces: Pieces, up: Codec) -> bool:
    values = np.empty(_elements_of(index, pieces.elements), np.float32)
    try:
        up.decode(_piece(body, index, pieces, up), values)
    except CorruptError:
        return False
    return True


def agreed(
    document: RosterDocument, means: Sequence[Mean], layout: FragmentLayout, down: Codec
) -> tuple[Header, U8]:
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
    document: RosterDocument, roster: Roster, layout: FragmentLayout, down: Codec
) -> Header:
    """Return the header of a round's agreed frame, whose body is not known yet."""
    return Header(
        kind=FrameKind.AGREED,
        run=document.run,
        fragment=document.fragment,
        round=document.round,
        epoch=document.epoch,
        base=document.base,
        codec=down.name,
        elements=layout.elements if roster.counted else 0,
        weight=0,
        outer=document.outer,
        roster=roster,
    )


def packed_mean(mean: Mean, key: str) -> list[Data]:
    """Return a mean as the bytes of the object at `key`."""
    (head,) = packed(_HEAD, mean, key)
    return [_SIZE.pack(len(head)), head, mean.body.data]


def most_bytes(document: RosterDocument, pieces: Pieces, down: Codec) -> int:
    """Return how large the object of a mean can be.

    Hardly more than it is: a range that begins behind the end is one request more.
    """
    begin, end = pieces.span(down)
    names = sum(_ESCAPED * len(each.island) for each in document.roster.counted)
    digests = _DIGEST_CHARACTERS * (pieces.last - pieces.first)
    return _SIZE.size + _HEAD_BYTES + names + digests + end - begin


def parse_mean(
    data: memoryview,
    document: RosterDocument,
    shard: int,
    pieces: Pieces,
    down: Codec,
    *,
    key: str,
) -> Mean:
    """Return the mean in an object's bytes, verified.

    Raises:
        CorruptError: these are not the bytes of that part of that round's mean.
    """
    fields, body = _taken_apart(data, key, is_sealed=bool(document.before))
    mean = Mean(body=body, **fields)
    begin, end = pieces.span(down)
    size = 0 if mean.overflows else end - begin
    if (mean.of, mean.shard, len(body)) != (roster_digest(document), shard, size):
        raise _strange("it belongs to another round or shard, or is cut off")
    if size and piece_digests(down, pieces.size, body) != mean.digests:
        raise _strange("its bytes do not match their digests")
    if size and exceeds_largest(down, body, pieces.size):
        raise _strange("its values are beyond what updates that count can have")
    return mean


def _taken_apart(
    data: memoryview, key: str, *, is_sealed: bool
) -> tuple[dict[str, Any], U8]:
    """Return head and body; only the means of a roster of 0.1.0 have a bare head."""
    if len(data) < _SIZE.size:
        raise _strange(f"{len(data)} bytes are too few")
    (size,) = _SIZE.unpack_from(data)
    end = _SIZE.size + size
    if size > MAX_LARGE_BYTES or end > len(data):
        raise _strange(f"it says that its head has {size} bytes")
    head = data[_SIZE.size : end]
    try:
        if is_sealed or bytes(head[:10]) == b'{"digest":':
            fields = parse(_HEAD, head, key=key)
        else:
            fields = _HEAD.read(
                load(head, name="mean", max_bytes=MAX_LARGE_BYTES), "mean"
            )
    except UsageError as exc:
        raise _strange(str(exc)) from exc
    return fields, np.frombuffer(data[end:], np.uint8)


def _strange(why: str) -> CorruptError:
    return CorruptError(f"This is no part of the round's mean: {why}.")
