"""The journal of a run that comes to a coordinator from a bucket.

Rule 1: nothing here decides that the run has come. What is written is a journal like
        any other, which nobody opens before that is decided elsewhere.
Rule 2: it is whole on return: what a coordinator reads at its start was read from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from atoll.coordinator.drafting import as_departing
from atoll.coordinator.service import Service
from atoll.disk import Disk
from atoll.errors import CorruptError, OutcomeLost
from atoll.exchange import Frame
from atoll.exchange.bucket.arriving import Belongings, Left, Progress
from atoll.exchange.bucket.constants import constants_of
from atoll.exchange.bucket.documents import MemberDocument
from atoll.journal import (
    CountedSet,
    Created,
    EpochSet,
    Joined,
    Journal,
    PauseSet,
)
from atoll.journal import Left as HasLeft
from atoll.protocol import TensorSpec
from atoll.protocol.ending import END_ROUNDS, end_of
from atoll.protocol.membership import EVICTED
from atoll.weights import Layout, lay_out, require_state, terms_of
from atoll.wire import verify_body
from atoll.wire.digests import Bytes


class Source(Protocol):
    """Where the run is until then; nothing changes there meanwhile."""

    def belongings(self) -> Belongings:
        """Return all that comes along, apart from weights and updates."""
        ...

    def state(self, fragment: int) -> Frame:
        """Return the state of a fragment after its last round."""
        ...

    def agreed(self, fragment: int, round: int) -> Frame:
        """Return the outcome of a round that belongings name; OutcomeLost if gone."""
        ...

    def parts(self, constant: TensorSpec, first: int = 0) -> Iterator[Bytes]:
        """Yield a constant that belongings name, in parts."""
        ...

    def update(self, left: Left) -> Frame:
        """Return an update that belongings name."""
        ...


def receive(disk: Disk, source: Source) -> None:
    """Write the journal of a run that comes here; all is durable on return.

    Raises:
        UsageError: there is a journal on the disk.
        CorruptError: what is brought does not fit together; nothing else is on the
            disk than a journal to be thrown away.
        DiskError, Unreachable: likewise; safe to repeat on an empty disk.
    """
    has = source.belongings()
    created = Created(
        run=has.settings.run,
        settings=has.settings.settings.to_dict(),
        fingerprint=has.settings.fingerprint,
    )
    journal = Journal.create(disk, created)
    for constant in constants_of(has.run):
        journal.constants.store(constant, source.parts(constant))
    journal.arrive(
        has.run.model,
        ((frame.header, frame.body) for frame in _states(has, source)),
    )
    for fragment, progress in enumerate(has.fragments):
        _pass(journal, has, fragment, source)
        _count(journal, fragment, progress)
    _say_again(journal, has)
    for member in sorted(has.members, key=lambda each: each.slot):
        _join(journal, has, member)
    for left in has.left:
        frame = as_departing(source.update(left))
        verify_body(frame.header, frame.body)
        journal.stage(frame.header, frame.body)
    journal.sync()
    Service.open(disk, now_s=0.0)


def _states(has: Belongings, source: Source) -> Iterator[Frame]:
    settings, _ = end_of(has.settings.settings, _epochs(has))
    layout: Layout = lay_out(has.run.model, settings)
    if len(layout) != len(has.fragments):
        raise CorruptError(
            f"{len(has.fragments)} fragments come along, and the model has "
            f"{len(layout)}. Give the move up with --back."
        )
    for index, (each, progress) in enumerate(zip(layout, has.fragments, strict=True)):
        frame = source.state(index)
        terms = terms_of(each, settings)
        require_state(frame.header, each, terms, round=progress.round)
        verify_body(frame.header, frame.body)
        yield frame


def _pass(journal: Journal, has: Belongings, fragment: int, source: Source) -> None:
    """Keep the last outcomes, as far as they can be had, and what updates may name."""
    outcomes: list[Frame] = []
    rounds = sorted(each.round for each in has.rosters if each.fragment == fragment)
    for round in rounds[-2:]:
        try:
            outcomes.append(source.agreed(fragment, round))
        except OutcomeLost:
            outcomes.clear()  # who missed it takes the state
    for frame in outcomes:
        verify_body(frame.header, frame.body)
    journal.passed(
        fragment,
        bases=has.fragments[fragment].bases,
        outcomes=[(frame.header, frame.body) for frame in outcomes],
    )


def _count(journal: Journal, fragment: int, progress: Progress) -> None:
    for each in progress.counted:
        journal.append(
            CountedSet(
                fragment=fragment,
                island=each.island,
                round=each.round,
                inner_steps=each.inner_steps,
                tokens=each.tokens,
            )
        )


def _say_again(journal: Journal, has: Belongings) -> None:
    """Record what operators have said, as if they had said it here."""
    for number, values in enumerate(_epochs(has), start=1):
        journal.append(EpochSet(number=number, values=values))
    said = [each.action for each in has.controls if each.action in ("pause", "resume")]
    if said[-1:] == ["pause"]:
        journal.append(PauseSet(is_paused=True))


def _epochs(has: Belongings) -> list[Mapping[str, Any]]:
    """Return the values of every epoch; that a run is to stop is one of them here."""
    epochs: list[Mapping[str, Any]] = []
    for control in has.controls:
        if control.action == "set":
            epochs.append(control.values)
        elif control.action == "stop" and control.last_round is not None:
            epochs.append({END_ROUNDS: control.last_round})
    return epochs


def _join(journal: Journal, has: Belongings, member: MemberDocument) -> None:
    """Record the latest life of an island: it goes on here, or has left."""
    life = (member.beat.island, member.beat.incarnation)
    island, incarnation = life
    journal.append(
        Joined(
            island=island,
            incarnation=incarnation,
            slot=member.slot,
            key_digest=member.key,
            nonce=member.nonce,
        )
    )
    evicted = [(each.island, each.incarnation) for each in has.controls]
    if member.has_left or life in evicted:
        reason = EVICTED if life in evicted else ""
        journal.append(HasLeft(island=island, incarnation=incarnation, reason=reason))
