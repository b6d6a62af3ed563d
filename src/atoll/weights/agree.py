"""From a round's roster and updates to its agreed frame, one way for all exchanges."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from atoll.errors import NonFinite
from atoll.protocol import refuse_all
from atoll.weights.layout import FragmentLayout
from atoll.weights.reduce import Contribution, reduce
from atoll.weights.spare import Spare
from atoll.weights.terms import Terms
from atoll.wire import (
    Header,
    Kind,
    OuterValues,
    Roster,
    blake3_digest,
    codec,
    piece_count,
    with_body,
)

U8 = NDArray[np.uint8]

Framed = tuple[Header, U8]


def agree(
    layout: FragmentLayout,
    terms: Terms,
    roster: Roster,
    updates: Mapping[str, Framed],
    *,
    run: str,
    fragment: int,
    round: int,
    base: bytes,
    outer: OuterValues,
    epoch: int = 0,
    after_block: Callable[[], None] | None = None,
    spare: Spare | None = None,
    threads: int = 1,
) -> Framed:
    """Return the agreed frame: the mean of the counted `updates`, and the roster.

    Finite updates whose mean is not refuse the whole round: no single island is to
    blame, and the round is void. The bytes do not depend on the number of `threads`.
    """
    counted = [updates[entry.island] for entry in roster.counted]
    body = np.empty(0, np.uint8)
    digests = [b""] * piece_count(layout.elements)

    def digest(index: int, piece: U8) -> None:
        digests[index] = blake3_digest(piece)

    try:
        if counted:
            body = reduce(
                layout,
                [Contribution(codec(h.codec), each, h.weight) for h, each in counted],
                down=terms.down,
                merge=terms.merge,
                after_block=after_block,
                on_piece=digest,
                spare=spare,
                threads=threads,
            )
    except NonFinite:
        roster = refuse_all(roster, "norm: the mean overflows")
    header = Header(
        kind=Kind.AGREED,
        run=run,
        fragment=fragment,
        round=round,
        epoch=epoch,
        base=base,
        codec=terms.down.name,
        elements=layout.elements if len(body) else 0,
        weight=0,
        outer=outer,
        roster=roster,
    )
    if not len(body):
        return with_body(header, body), body
    return header.sealed(body_bytes=len(body), pieces=tuple(digests)), body
