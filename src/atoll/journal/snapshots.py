"""States and the means after them: which are kept, compaction, and past anchors.

Rule 1: kept are the newest state and one to fall back on, every mean after that one,
        and at the least the last two outcomes' bodies.
Rule 2: nothing is removed before its replacement is durable and verified.
Rule 3: a damaged state is reported and skipped, while an older one and the means after
        it still lead to the same digest.

Compaction turns a state and the means after it into a later state, a piece at a time. A
piece of a fragment steps like a separate small fragment, so only a few pieces are in
memory, however large the state and however many the means. The frame's header comes
before its body and holds digests of it, and the body holds one vector behind the other:
so the pieces are computed once for the digests, and once more for each vector that is
written. The written bytes are compared with those digests again.

Each state and the means after it lead to any round between, so past anchors are
computed in the same way. That writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from atoll import wire
from atoll.disk import Disk
from atoll.errors import CorruptError, UsageError
from atoll.journal import files
from atoll.journal.records import (
    AgreedRecord,
)
from atoll.journal.replay import (
    RecordedFragment,
    RecordedRun,
)
from atoll.settings import RunSettings
from atoll.weights import FragmentLayout, FragmentState, lay_out
from atoll.weights.layout import F32, blocks
from atoll.weights.reduce import gathered_reader
from atoll.wire.digests import view_of


class Compaction:
    """The state after `means`, to be written with little memory.

    `digest` is the recorded digest. Both arguments' bytes are verified as they are
    read. Only gathered radial means need `layout`.
    """

    def __init__(
        self,
        state: files.StoredBody,
        means: Sequence[files.StoredBody],
        digest: bytes,
        layout: FragmentLayout | None = None,
    ) -> None:
        files.require_same_optimizer(state.header, (mean.header for mean in means))
        self._state, self._digest = state, digest
        self._vectors = 1 + wire.MOMENTS[_outer(state.header).optimizer]
        self._elements = state.header.elements // self._vectors
        self._readers = [_Floats(state) for _ in range(self._vectors)]
        self._last: tuple[int, FragmentState] | None = None
        for mean in means:
            if mean.header.elements not in (0, self._elements):
                raise CorruptError(
                    f"the {mean.header.name} has {mean.header.elements} elements, and "
                    f"the fragment {self._elements}."
                )
        self._means = [_StoredMean(mean, layout) for mean in means]

    def parts(self) -> Iterator[bytes | memoryview]:
        """Yield the bytes of the new state frame, in order.

        Raises:
            CorruptError: the means do not lead to the recorded digest, or bytes on the
                disk do not verify. The caller must discard the values yielded until
                then.
        """
        header = self._header()
        yield wire.pack(header)
        written = _PieceDigests(header.elements)
        for vector in range(self._vectors):
            for index in range(wire.piece_count(self._elements)):
                values = self._piece(index).vectors[vector]
                written.add(
                    vector * self._elements + index * wire.PIECE_ELEMENTS, values
                )
                yield view_of(values)
        if written.digests() != header.pieces:
            raise CorruptError(
                f"the {header.name} changed while it was written. Check this machine's "
                "memory and disk, and compact again."
            )

    def _header(self) -> wire.Header:
        """Return the sealed header of the state after the means."""
        hashes: list[bytes] = []
        digests = _PieceDigests(self._vectors * self._elements)
        for index in range(wire.piece_count(self._elements)):
            piece = self._piece(index)
            vectors = piece.vectors
            for block in blocks(len(piece.anchor)):
                hashes.append(wire.state_piece([values[block] for values in vectors]))
            for vector, values in enumerate(vectors):
                first = vector * self._elements + index * wire.PIECE_ELEMENTS
                digests.add(first, values)
        root = wire.state_root(
            hashes,
            elements=self._elements,
            moments=self._vectors - 1,
            count=piece.count,
        )
        last = self._means[-1].header
        files.require_digest(last, root, self._digest)
        return replace(
            self._state.header,
            round=last.round,
            base=root,
            island="",
            incarnation=0,
            epoch=last.epoch,
            outer=_outer(last).in_state(piece.count),
            pieces=digests.digests(),
        )

    def _piece(self, index: int) -> FragmentState:
        """Return piece `index` of the fragment after the means.

        The last one is remembered, so a fragment of one piece is computed once.
        """
        if self._last is None or self._last[0] != index:
            self._last = index, self._rebuild(index)
        return self._last[1]

    def _rebuild(self, index: int) -> FragmentState:
        first = index * wire.PIECE_ELEMENTS
        last = min(first + wire.PIECE_ELEMENTS, self._elements)
        anchor, *moments = (
            reader.read(vector * self._elements + first, last - first)
            for vector, reader in enumerate(self._readers)
        )
        header = self._state.header
        piece = FragmentState(
            anchor, moments, round=header.round, count=_outer(header).count
        )
        for mean in self._means:
            piece.apply(*mean.part(index, piece.digest))
        return piece


class _StoredMean:
    """An outcome whose pieces are applied like separate small outcomes."""

    def __init__(self, stored: files.StoredBody, layout: FragmentLayout | None) -> None:
        self.header, self._stored = stored.header, stored
        self._write_mean = None
        if self.header.num_bodies > 1:
            assert self.header.roster is not None
            counted = self.header.roster.counted
            updates = [
                _StoredUpdate(stored, number, entry.weight)
                for number, entry in enumerate(counted)
            ]
            self._write_mean = gathered_reader(self.header, updates, layout)

    def part(self, index: int, base: bytes) -> tuple[wire.Header, np.ndarray]:
        """Return the frame of one piece, for a piece of a state with digest `base`."""
        agreed = self.header
        if not agreed.elements:
            return replace(agreed, base=base), np.empty(0, np.uint8)
        if self._write_mean is None:
            # Kernels are compiled for memory that can be written to.
            body = np.frombuffer(bytearray(self._stored.piece(index)), np.uint8)
            return _part(agreed, index, base, codec_name=agreed.codec), body
        mean = np.empty(wire.piece_elements(agreed.elements, index), np.float32)
        self._write_mean(index * wire.PIECE_ELEMENTS, mean)
        header = _part(agreed, index, base, codec_name="fp32")
        return header, mean.view(np.uint8)


class _StoredUpdate:
    """An update in a gathered body; its last piece is cached."""

    def __init__(self, stored: files.StoredBody, number: int, weight: int) -> None:
        header = stored.header
        self.weight, self._stored = weight, stored
        self._codec = wire.codec(header.codec)
        self._first = number * wire.piece_count(header.elements)
        self._index, self._piece = -1, np.empty(0, np.uint8)

    def decode(self, out: F32, *, first: int) -> None:
        # A block of a merge does not straddle a piece.
        index, start = divmod(first, wire.PIECE_ELEMENTS)
        if index != self._index:
            data = self._stored.piece(self._first + index)
            self._index, self._piece = index, np.frombuffer(bytearray(data), np.uint8)
        self._codec.decode(self._piece, out, first=start)


class _Floats:
    """Reads a state's body from front to back in ranges, each piece once."""

    def __init__(self, stored: files.StoredBody) -> None:
        self._stored = stored
        self._index, self._piece = -1, np.empty(0, np.float32)

    def read(self, first: int, size: int) -> F32:
        values = np.empty(size, np.float32)
        done = 0
        while done < size:
            index, start = divmod(first + done, wire.PIECE_ELEMENTS)
            if index != self._index:
                data = self._stored.piece(index)
                self._index, self._piece = index, np.frombuffer(data, np.float32)
            part = self._piece[start : start + size - done]
            values[done : done + len(part)] = part
            done += len(part)
        return values


class _PieceDigests:
    """Digests of a body's pieces, from ranges that come in any order.

    Holds only the pieces that have begun and not ended.
    """

    def __init__(self, elements: int) -> None:
        self._elements = elements
        self._open: dict[int, tuple[F32, int]] = {}
        self._done: dict[int, bytes] = {}

    def add(self, first: int, values: F32) -> None:
        while len(values):
            index, start = divmod(first, wire.PIECE_ELEMENTS)
            size = min(
                wire.PIECE_ELEMENTS, self._elements - index * wire.PIECE_ELEMENTS
            )
            part = values[: size - start]
            piece, filled = self._open.pop(index, (None, 0))
            if piece is None:
                piece = np.empty(size, np.float32)
            piece[start : start + len(part)] = part
            if filled + len(part) < size:
                self._open[index] = piece, filled + len(part)
            else:
                self._done[index] = wire.blake3_digest(view_of(piece))
            first, values = first + len(part), values[len(part) :]

    def digests(self) -> tuple[bytes, ...]:
        return tuple(
            self._done[index] for index in range(wire.piece_count(self._elements))
        )


def _part(
    agreed: wire.Header, index: int, base: bytes, *, codec_name: str
) -> wire.Header:
    """Return the header of one piece of an agreed frame, as a separate frame."""
    if agreed.base == base and len(agreed.pieces) == 1 and codec_name == agreed.codec:
        return agreed  # a fragment of one piece is that piece
    elements = wire.piece_elements(agreed.elements, index)
    return replace(
        agreed,
        base=base,
        codec=codec_name,
        gathered="",
        elements=elements,
        body_bytes=wire.codec(codec_name).body_bytes(elements),
        pieces=(agreed.pieces[index],),
    )


def _layout_of(
    recorded: RecordedRun, fragment: int, means: Sequence[files.StoredBody]
) -> FragmentLayout | None:
    """Return the layout of a fragment if one of its means needs it."""
    if not any(mean.header.gathered == "radial" for mean in means):
        return None
    assert recorded.created is not None
    assert recorded.model is not None
    settings = RunSettings.from_dict(recorded.created.settings)
    return lay_out(recorded.model, settings)[fragment]


def _outer(header: wire.Header) -> wire.OuterValues:
    assert header.outer is not None
    return header.outer


KEPT_OUTCOMES = 2


class Snapshots:
    """The states of a run's fragments on a disk."""

    def __init__(
        self,
        disk: Disk,
        recorded: RecordedRun,
        bodies: files.BodyFiles,
        read_agreed: Callable[[int, int], AgreedRecord],
    ) -> None:
        self._disk, self._recorded, self._bodies = disk, recorded, bodies
        self._read_agreed = read_agreed
        self._damaged: set[tuple[int, int]] = set()
        self.damage: list[str] = []

    def check(self, lost: set[tuple[int, int]]) -> None:
        """Return if every fragment's present state can be reached.

        `lost` has fragment and round of recorded bodies whose files are missing. Only
        the names of files are checked, not their content.

        Raises:
            CorruptError: naming the missing file.
        """
        for fragment, recorded in enumerate(self._recorded.fragments):
            rounds = files.state_rounds(self._disk, fragment)
            states = [round for round in rounds if round <= recorded.round]
            if not any(recorded.leads_from(round) for round in states):
                raise _unreachable(fragment, recorded, states)
            floor = min([recorded.round - KEPT_OUTCOMES, *states[1:2]])
            for index, round in sorted(lost):
                if index == fragment and round > floor:
                    self._report(
                        f"The body of round {round} of fragment {fragment} is missing."
                    )

    def load(self, fragment: int) -> FragmentState:
        """Return the present state, replayed to the recorded bits.

        Raises:
            CorruptError: no kept state and means lead there.
        """
        recorded = self._recorded.fragment(fragment)
        for stored in self._candidates(fragment, recorded.round):
            try:
                state = files.begin(stored)
            except CorruptError as exc:
                self._set_aside(fragment, stored.header.round, exc)
                continue
            means = self._means(fragment, state.round, recorded.round)
            layout = _layout_of(self._recorded, fragment, [mean for mean, _ in means])
            files.rebuild(state, stored.header, means, layout)
            return state
        raise _unreachable(fragment, recorded, [])

    def compact(self, fragment: int) -> None:
        """Write a state of the newest round, and remove files that it replaces.

        Safe to repeat, and at every instant of a crash. Rounds may be committed
        meanwhile.

        Raises:
            CorruptError: the kept means do not lead to the recorded digest.
            DiskError: the existing files are unchanged.
        """
        recorded = self._recorded.fragment(fragment)
        round = recorded.round
        for stored in self._candidates(fragment, round):
            if stored.header.round == round:
                # Its writer may have got an error.
                self._disk.sync(stored.name)
                break
            try:
                stored.verify()
            except CorruptError as exc:
                self._set_aside(fragment, stored.header.round, exc)
                continue
            self._write(fragment, stored, round)
            break
        else:
            raise _unreachable(fragment, recorded, [])
        self._collect(fragment, round)

    def _write(self, fragment: int, stored: files.StoredBody, round: int) -> None:
        recorded = self._recorded.fragment(fragment)
        means = self._means(fragment, stored.header.round, round)
        digest = recorded.digests[round]
        bodies = [mean for mean, _ in means]
        layout = _layout_of(self._recorded, fragment, bodies)
        compaction = Compaction(stored, bodies, digest, layout)
        name = files.state_name(fragment, round)
        self._disk.remove(name)  # a damaged one, or one that the log does not know
        self._disk.write_new(name, compaction.parts())
        self._damaged.discard((fragment, round))

    def _collect(self, fragment: int, round: int) -> None:
        recorded = self._recorded.fragment(fragment)
        states = [n for n in files.state_rounds(self._disk, fragment) if n <= round]
        good = [n for n in states if (fragment, n) not in self._damaged]
        fallback = good[:2][-1]
        floor = min(fallback, round - KEPT_OUTCOMES)
        old = [number for number in list(recorded.locations) if number <= floor]
        self._bodies.collect(self._recorded.fragments, fragment, old)
        for number in states:
            if number not in good[:2]:
                self._disk.remove(files.state_name(fragment, number))

    def _candidates(self, fragment: int, round: int) -> Iterator[files.StoredBody]:
        """Yield the states that lead to `round`, newest first, bodies not verified."""
        recorded = self._recorded.fragment(fragment)
        for number in files.state_rounds(self._disk, fragment):
            is_out = (fragment, number) in self._damaged or number > round
            if is_out or not recorded.leads_from(number):
                continue
            try:
                yield files.stored_state(
                    self._disk, fragment, number, recorded.digests[number]
                )
            except CorruptError as exc:
                self._set_aside(fragment, number, exc)

    def _means(
        self, fragment: int, first: int, last: int
    ) -> list[tuple[files.StoredBody, bytes]]:
        """Return the means after round `first`, each with the digest it leads to."""
        recorded = self._recorded.fragment(fragment)
        means = []
        for round in range(first + 1, last + 1):
            agreed = self._read_agreed(fragment, round)
            location = recorded.locations.get(round)
            means.append(
                (self._bodies.stored(agreed, location), recorded.digests[round])
            )
        return means

    def _set_aside(self, fragment: int, round: int, error: CorruptError) -> None:
        self._damaged.add((fragment, round))
        self._report(f"{error}")

    def _report(self, message: str) -> None:
        if message not in self.damage:
            self.damage.append(message)


def _unreachable(
    fragment: int, recorded: RecordedFragment, states: list[int]
) -> CorruptError:
    if not states:
        lost = f"no state of it that verifies is on the disk for round {recorded.round}"
    else:
        missing = next(
            round
            for round in range(states[0] + 1, recorded.round + 1)
            if round not in recorded.locations and round not in recorded.void
        )
        lost = f"the body of round {missing} is missing"
    return CorruptError(
        f"Fragment {fragment} cannot be replayed to round {recorded.round}: {lost}. "
        "Restore the journal from a copy, or recover the run from its islands."
    )


class JournaledAnchors:
    """The anchors of earlier rounds that a journal still has. Thread-safe.

    Compaction may remove a file while it is read: that is a `CorruptError`, after which
    `rounds` no longer has the round.
    """

    def __init__(
        self,
        disk: Disk,
        recorded: RecordedRun,
        bodies: files.BodyFiles,
        read_agreed: Callable[[int, int], AgreedRecord],
    ) -> None:
        self._disk, self._recorded, self._bodies = disk, recorded, bodies
        self._read_agreed = read_agreed

    def rounds(self) -> list[int]:
        """Return the rounds at which every fragment is available, in order."""
        fragments = range(len(self._recorded.fragments))
        had = [set(self.rounds_of(fragment)) for fragment in fragments]
        return sorted(set.intersection(*had)) if had else []

    def rounds_of(self, fragment: int) -> list[int]:
        """Return the rounds of one fragment whose states are available, in order."""
        recorded = self._recorded.fragment(fragment)
        had: set[int] = set()
        for first in files.state_rounds(self._disk, fragment):
            had.update(_leading(recorded, first))
        return sorted(had)

    def digest(self, fragment: int, round: int) -> bytes:
        """Return the digest of a fragment's state after an available round."""
        return self._recorded.fragment(fragment).digests[round]

    def anchor(self, fragment: int, round: int) -> Iterator[F32]:
        """Yield the anchor of a fragment after a round, a piece at a time.

        It is compared with the recorded digest before the first piece is given; a
        damaged state is done without, while an older one leads to the round, too.

        Raises:
            UsageError: no stored state leads there.
            CorruptError: a stored file is damaged, or was removed meanwhile.
        """
        recorded = self._recorded.fragment(fragment)
        error: Exception = UsageError(
            f"Round {round} of fragment {fragment} is no longer available. Kept are "
            f"{self.rounds_of(fragment)}."
        )
        for first in files.state_rounds(self._disk, fragment):
            if round not in _leading(recorded, first):
                continue
            try:
                pieces = self._pieces(fragment, first, round)
                head = next(pieces)
            except CorruptError as exc:
                error = exc
                continue
            yield head
            yield from pieces
            return
        raise error

    def _pieces(self, fragment: int, first: int, round: int) -> Iterator[F32]:
        """Yield an anchor's pieces, from the state of `first` and the means after."""
        digests = self._recorded.fragment(fragment).digests
        stored = files.stored_state(self._disk, fragment, first, digests[first])
        if first == round:
            return _stored_anchor(stored)
        means = [self._mean(fragment, number) for number in range(first + 1, round + 1)]
        layout = _layout_of(self._recorded, fragment, means)
        parts = Compaction(stored, means, digests[round], layout).parts()
        next(parts)  # the header, which is made when all has led to the digest
        anchor = islice(parts, wire.piece_count(_elements(stored)))
        return (np.frombuffer(part, np.float32) for part in anchor)

    def _mean(self, fragment: int, round: int) -> files.StoredBody:
        location = self._recorded.fragment(fragment).locations.get(round)
        return self._bodies.stored(self._read_agreed(fragment, round), location)


def _leading(recorded: RecordedFragment, first: int) -> range:
    """Return the rounds that the state of `first` and the means after it lead to."""
    if first not in recorded.digests or first > recorded.round:
        return range(0)
    last = first
    while last < recorded.round and (
        last + 1 in recorded.locations or last + 1 in recorded.void
    ):
        last += 1
    return range(first, last + 1)


def _stored_anchor(stored: files.StoredBody) -> Iterator[F32]:
    """Yield the anchor of a state, every byte of which is verified before."""
    stored.verify()
    remaining = _elements(stored)
    for index in range(wire.piece_count(remaining)):
        piece = np.frombuffer(stored.piece(index), np.float32)
        yield piece[: min(remaining, wire.PIECE_ELEMENTS)]
        remaining -= wire.PIECE_ELEMENTS


def _elements(stored: files.StoredBody) -> int:
    """Return the elements of one vector of a state."""
    assert stored.header.outer is not None
    return stored.header.elements // (1 + wire.MOMENTS[stored.header.outer.optimizer])
