"""A run in miniature: its journal, and beside it what the journal must say."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from atoll.disk import Disk
from atoll.journal import (
    CreatedRecord,
    EpochRecord,
    JoinedRecord,
    Journal,
    LeftRecord,
)
from atoll.settings import RunSettings
from atoll.testing import vector_model
from atoll.weights import FragmentLayout, FragmentState
from atoll.wire import (
    FrameKind,
    Header,
    OuterValues,
    Roster,
    RosterEntry,
    Verdict,
    codec,
    with_body,
)

RUN = "lagoon"
NESTEROV = OuterValues(optimizer="nesterov", lr=0.5, momentum=0.875)
SMALL, LARGE = 5, 17000
"""Elements: 68000 bytes of fp32 do not fit the 65536 of a small body."""

Framed = tuple[Header, np.ndarray]
Tensors = dict[str, tuple[int, ...]]
State = tuple[int, bytes, bytes]
"""A round, and the bytes of its anchor and velocity."""


def a_created() -> CreatedRecord:
    settings = RunSettings()
    return CreatedRecord(
        run=RUN, settings=settings.to_dict(), fingerprint=settings.fingerprint
    )


def an_entry(island: str = "a", **changes: object) -> RosterEntry:
    values: dict[str, object] = {
        "island": island,
        "incarnation": 1,
        "digest": bytes(range(32)),
        "weight": 1,
        "verdict": Verdict.COUNTED,
    }
    return RosterEntry(**(values | changes))  # type: ignore[arg-type]


def an_agreed(
    state: FragmentState,
    fragment: int,
    *,
    value: float = 1.0,
    outer: OuterValues = NESTEROV,
    down: str = "fp32",
    is_void: bool = False,
    islands: int = 1,
    gathered: str = "",
) -> Framed:
    """Return the outcome of the next round, whose mean is `value` and its multiples.

    With `gathered` it has the body of each of the `islands`, turned by one element
    more than the one before.
    """
    elements = 0 if is_void else len(state.anchor)
    mean = np.arange(1, elements + 1, dtype=np.float32) * np.float32(value)
    bodies = []
    for number in range(islands if gathered else 1):
        bodies.append(np.empty(codec(down).body_bytes(elements), np.uint8))
        codec(down).encode(np.roll(mean, number), bodies[-1])
    verdict = Verdict.LATE if is_void else Verdict.COUNTED
    entries = [an_entry(f"island-{n:03d}", verdict=verdict) for n in range(islands)]
    header = Header(
        kind=FrameKind.AGREED,
        run=RUN,
        fragment=fragment,
        round=state.round + 1,
        base=state.digest,
        codec=down,
        elements=elements,
        weight=0,
        outer=outer.in_state(0) if is_void else outer,
        roster=Roster(tuple(entries)),
        gathered=gathered,
    )
    return with_body(header, *bodies), np.concatenate(bodies)


def a_departing(fragment: int, round: int, island: str, value: float = 1.0) -> Framed:
    body = np.full(3, value, np.float32).view(np.uint8)
    header = Header(
        kind=FrameKind.DEPARTING,
        run=RUN,
        fragment=fragment,
        round=round,
        island=island,
        incarnation=1,
        elements=3,
    )
    return with_body(header, body), body


def bits(state: FragmentState) -> State:
    velocity = b"".join(moment.tobytes() for moment in state.moments)
    return state.round, state.anchor.tobytes(), velocity


View = tuple[object, ...]


def view(journal: Journal) -> View:
    """Return all that a journal says of a run, in a form that can be compared."""
    recorded = journal.recorded
    return (
        tuple(
            sorted(
                (m.island, m.incarnation, m.has_left) for m in recorded.members.values()
            )
        ),
        tuple(epoch.number for epoch in recorded.epochs),
        tuple((f.round, tuple(sorted(f.digests.items()))) for f in recorded.fragments),
        tuple(sorted(recorded.staged)),
        tuple(sorted((key, c.round) for key, c in recorded.counted.items())),
        recorded.ended,
    )


@dataclass
class Run:
    """A journal and its shadow: live states, and what was true after each step."""

    disk: Disk
    sizes: tuple[int, ...] = (SMALL, LARGE)
    outer: OuterValues = NESTEROV
    tensors: Tensors = field(default_factory=dict)
    """Those of the only fragment, if radial means need them."""

    journal: Journal = field(init=False)
    states: list[FragmentState] = field(default_factory=list)
    after: dict[tuple[int, int], State] = field(default_factory=dict)
    """By fragment and round, the bits that a replay must give."""

    outcomes: dict[tuple[int, int], Framed] = field(default_factory=dict)

    def create(self) -> None:
        self.journal = Journal.create(self.disk, a_created())

    def create_or_open(self) -> None:
        """Go on with the journal that is there, or make one."""
        if self.disk.names("log/"):
            self.reopen()
        else:
            self.create()

    def found(self) -> None:
        frames = []
        self.states = []
        for index, size in enumerate(self.sizes):
            anchor = np.arange(size, dtype=np.float32) / np.float32(8)
            state = FragmentState.found(anchor, self.outer.optimizer)
            self.states.append(state)
            self.after[index, 0] = bits(state)
            frames.append(state.to_frame(run=RUN, fragment=index, outer=self.outer))
        vectors = {f"w{i}": (n,) for i, n in enumerate(self.sizes)}
        self.journal.found(vector_model(self.tensors or vectors), frames)

    def start(self) -> Run:
        self.create()
        self.found()
        return self

    def commit(self, fragment: int = 0, **how: object) -> None:
        """Take the outer step, then have the journal commit it, as a coordinator.

        A step that was taken and not committed is committed now instead.
        """
        state = self.states[fragment]
        if state.round > self.journal.recorded.fragment(fragment).round:
            self.record(fragment)
            return
        frame = an_agreed(state, fragment, outer=self.outer, **how)  # type: ignore[arg-type]
        layout = FragmentLayout(vector_model(self.tensors).tensors)
        state.apply(*frame, layout=layout)
        self.after[fragment, state.round] = bits(state)
        self.outcomes[fragment, state.round] = frame
        self.record(fragment)

    def commit_part(self, fragment: int, *, buffer: int, **how: object) -> None:
        """Commit a round of one update in an asynchronous run with this buffer."""
        plain, share = self.outer, float(np.float32(1 / buffer))
        self.outer = replace(plain, share=share, buffer=buffer)
        try:
            self.commit(fragment, **how)
        finally:
            self.outer = plain

    def record(self, fragment: int) -> None:
        """Have the journal commit the round whose outer step has been taken."""
        state = self.states[fragment]
        self.journal.commit(
            *self.outcomes[fragment, state.round], digest_after=state.digest, epoch=0
        )

    def join(self, island: str) -> None:
        known = self.journal.recorded.members
        before = known.get(island)
        self.journal.append(
            JoinedRecord(
                island=island,
                incarnation=before.incarnation + 1 if before else 1,
                slot=before.slot if before else len(known),
                key_digest=bytes(32),
            )
        )

    def leave(self, island: str) -> None:
        member = self.journal.recorded.members.get(island)
        if member and not member.has_left:
            self.journal.append(
                LeftRecord(island=island, incarnation=member.incarnation)
            )

    def set_epoch(self) -> None:
        number = len(self.journal.recorded.epochs) + 1
        self.journal.append(EpochRecord(number=number, values={"outer.lr": 0.25}))

    def draft(self, fragment: int, island: str, value: float = 1.0) -> None:
        round = self.journal.recorded.fragment(fragment).round + 1
        self.journal.draft(*a_departing(fragment, round, island, value))

    def stage(self, fragment: int, island: str) -> None:
        round = self.journal.recorded.fragment(fragment).round + 1
        self.journal.stage(*a_departing(fragment, round, island))

    def reopen(self) -> Run:
        """Open the journal again, and go on from what it says."""
        self.journal = Journal.open(self.disk)
        self.states = [
            self.journal.state(f) for f in range(len(self.journal.recorded.fragments))
        ]
        return self

    def check(self) -> None:
        """Hold that what the journal gives back is what was put in, bit for bit."""
        for index, known in enumerate(self.journal.recorded.fragments):
            assert bits(self.journal.state(index)) == self.after[index, known.round]
            for round in range(max(1, known.round - 1), known.round + 1):
                header, body = self.journal.outcome(index, round)
                expected = self.outcomes[index, round]
                assert header == expected[0]
                assert body is not None
                assert body.tobytes() == expected[1].tobytes()
                assert self.journal.recorded.rosters[index, round] == header.roster
        for fragment, round, island in self.journal.recorded.staged:
            header, body = self.journal.staged(fragment, round, island)
            assert (header.island, header.round) == (island, round)
            assert body.view(np.float32).tolist() == [1.0, 1.0, 1.0]
