"""One round among the ranks: every rank reduces a share of it, and has the whole.

Theory of operation. The pieces of a fragment are cut into shares, at most one for each
rank. Everybody sends each share of its update to the one who reduces it; that one adds
them up in the order of island names, as everywhere, and sends the mean of its share to
everybody. So a rank sends (N-1)/N of its update and (N-1)/N of the mean.

The cutting and the arithmetic are those of a run in a bucket, whose bits are those of a
coordinator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from atoll.exchange.base import Frame
from atoll.exchange.bucket import means
from atoll.exchange.bucket.documents import RosterDocument
from atoll.exchange.bucket.means import Mean, Pieces
from atoll.exchange.collective.world import U8, World
from atoll.weights import FragmentLayout, Terms
from atoll.wire import Codec, Header, piece_digests

GOOD, OVERFLOWS, SPOILT = 0, 1, 2
"""What a share has come to; the numbers are those on the wire."""


class Spoilt(Exception):
    """Bytes of an update did not arrive as they were sealed."""


@dataclass(frozen=True)
class Share:
    """A part of a fragment, and the rank that reduces it."""

    number: int
    pieces: Pieces
    owner: int


class Reduction:
    """A round that is reduced by all ranks together, seen from one of them."""

    def __init__(
        self,
        world: World,
        expected: Header,
        updates: Sequence[Header],
        layout: FragmentLayout,
        terms: Terms,
    ) -> None:
        """`expected` is the header of the outcome, `updates` are all by rank."""
        assert expected.outer is not None
        assert expected.roster is not None
        self._world, self._updates = world, updates
        self._layout, self._terms = layout, terms
        # A radial mean needs whole tensors: one rank reduces everything.
        owners = 1 if terms.merge == "radial" else world.size
        self._document = RosterDocument(
            run=expected.run,
            fragment=expected.fragment,
            round=expected.round,
            epoch=expected.epoch,
            base=expected.base,
            outer=expected.outer,
            shards=tuple(str(rank) for rank in range(owners)),
            roster=expected.roster,
        )
        counted = {entry.island for entry in expected.roster.counted}
        self._counted = [each.island in counted for each in updates]
        self._shares = [
            Share(number, pieces, (number + expected.fragment) % world.size)
            for number, pieces in enumerate(
                means.shards(self._document, layout.elements)
            )
        ]

    def agreed(self, own: U8) -> Frame:
        """Return the agreed frame of the round; `own` is this rank's update's body.

        Raises:
            Spoilt: an update is not what its header says. All ranks raise it.
            Gone: a rank is gone.
        """
        if not any(self._counted):
            return Frame(*means.agreed(self._document, [], *self._down()))
        parts = self._scatter(own)
        return self._gather([self._mean(share, parts) for share in self._mine()])

    def _mine(self) -> list[Share]:
        return [each for each in self._shares if each.owner == self._world.rank]

    def _down(self) -> tuple[FragmentLayout, Codec]:
        return self._layout, self._terms.down

    def _scatter(self, own: U8) -> list[U8]:
        """Return this rank's share of every update, by rank."""
        world, up = self._world, self._terms.up
        outgoing = []
        for share in self._shares:
            begin, end = share.pieces.span(up)
            if share.owner != world.rank and self._counted[world.rank]:
                outgoing.append((share.owner, own[begin:end]))
        parts = [np.empty(0, np.uint8) for _ in range(world.size)]
        for share in self._mine():
            begin, end = share.pieces.span(up)
            parts = [
                own[begin:end]
                if rank == world.rank
                else np.empty(end - begin, np.uint8)
                for rank in range(world.size)
            ]
        incoming = [
            (rank, part)
            for rank, part in enumerate(parts)
            if rank != world.rank and self._counted[rank] and len(part)
        ]
        world.swap(outgoing, incoming)
        return parts

    def _mean(self, share: Share, parts: Sequence[U8]) -> Mean:
        updates = {
            header.island: (header, part)
            for header, part in zip(self._updates, parts, strict=True)
        }
        try:
            return means.mean_of(
                self._document,
                share.number,
                share.pieces,
                updates,
                self._layout,
                self._terms,
            )
        except means.Unverified as exc:  # every rank is told with the share's flag
            return self._spoilt(share, exc.islands)

    def _spoilt(self, share: Share, islands: tuple[str, ...]) -> Mean:
        return Mean(
            run=self._document.run,
            of=b"",
            shard=share.number,
            overflows=False,
            spoilt=islands,
            digests=(),
            body=np.empty(0, np.uint8),
        )

    def _gather(self, mine: Sequence[Mean]) -> Frame:
        """Send the mean of this rank's share to all, and put those of all together."""
        world, down = self._world, self._terms.down
        body = np.empty(down.body_bytes(self._layout.elements), np.uint8)
        flags = np.zeros((len(self._shares), 1), np.uint8)
        outgoing, incoming = [], []
        for share in self._shares:
            begin, end = share.pieces.span(down)
            whole = [flags[share.number], body[begin:end]]
            if share.owner != world.rank:
                incoming += [(share.owner, part) for part in whole]
        for mean in mine:
            begin, end = self._shares[mean.shard].pieces.span(down)
            flags[mean.shard] = _flag(mean)
            body[begin:end] = mean.body if len(mean.body) else 0
            whole = [flags[mean.shard], body[begin:end]]
            others = [rank for rank in range(world.size) if rank != world.rank]
            outgoing += [(rank, part) for rank in others for part in whole]
        world.swap(outgoing, incoming)
        if (flags == SPOILT).any():
            raise Spoilt(_blame(mine))
        known = {mean.shard: mean.digests for mean in mine}
        return self._sealed(body, known, overflows=bool((flags == OVERFLOWS).any()))

    def _sealed(
        self, body: U8, known: Mapping[int, tuple[bytes, ...]], *, overflows: bool
    ) -> Frame:
        """Return the frame; its digests are of the bytes that this rank holds."""
        layout, down = self._down()
        digests: list[bytes] = []
        for share in self._shares if not overflows else ():
            begin, end = share.pieces.span(down)
            digests += known.get(share.number) or piece_digests(
                down, share.pieces.size, body[begin:end]
            )
        whole = Mean(
            run=self._document.run,
            of=b"",
            shard=0,
            overflows=overflows,
            spoilt=(),
            digests=tuple(digests),
            body=body,
        )
        return Frame(*means.agreed(self._document, [whole], layout, down))


def _flag(mean: Mean) -> int:
    if mean.spoilt:
        return SPOILT
    return OVERFLOWS if mean.overflows else GOOD


def _blame(mine: Sequence[Mean]) -> str:
    names = [name for mean in mine for name in mean.spoilt]
    if not names:
        return "a rank was sent an update that is not what its header says"
    return f"the update of {', '.join(names)} did not arrive as it was sealed"
