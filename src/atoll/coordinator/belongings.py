"""What a run takes along when it leaves its coordinator for a bucket."""

from __future__ import annotations

from collections.abc import Iterator

from atoll.coordinator.service import Service
from atoll.errors import Unreachable, UsageError
from atoll.exchange import Frame
from atoll.exchange.bucket.arriving import Belongings, Left, Progress
from atoll.exchange.bucket.documents import (
    ControlDocument,
    MemberDocument,
    RosterDocument,
    RunDocument,
    SettingsDocument,
    Stand,
)
from atoll.exchange.bucket.progress import BASES, ROSTERS, counted_progress
from atoll.protocol import Beat, Phase
from atoll.protocol.constants import bytes_of
from atoll.protocol.ending import END_ROUNDS, NO_ROUND, end_of
from atoll.protocol.membership import Member
from atoll.settings import RunSettings
from atoll.wire import Kind


def belongings_of(service: Service, now_s: float) -> Belongings:
    """Return all that a run takes along, apart from weights and updates.

    Raises:
        UsageError: it is not on its way.
        Unreachable: a round is being committed still: ask again.
    """
    state, created = service.state, service.journal.recorded.created
    if state.move is None:
        raise UsageError("The run is not on its way anywhere. Move it first.")
    if any(round.phase is Phase.CLOSING for round in state.rounds):
        raise Unreachable("A round is being committed. Ask again.")
    assert created is not None
    assert state.model is not None
    settings = SettingsDocument(
        run=state.run,
        fingerprint=created.fingerprint,
        settings=RunSettings.from_dict(created.settings),
    )
    return Belongings(
        settings=settings,
        run=RunDocument(
            run=state.run,
            fingerprint=created.fingerprint,
            founding=state.move.nonce,
            model=state.model,
            constants=_constants(service),
        ),
        controls=tuple(_controls(service, settings.settings)),
        members=tuple(_member(service, each) for each in state.members.known.values()),
        fragments=tuple(_progress(service, each) for each in range(len(state.rounds))),
        rosters=tuple(_rosters(service)),
        left=tuple(_left(service, now_s)),
    )


def _constants(service: Service) -> tuple[str, ...]:
    """Return the digests of what the coordinator has to send."""
    there = {each.digest for each in service.catalogue.there if bytes_of(each)}
    return tuple(sorted(there))


def update_of(service: Service, left: Left) -> Frame:
    """Return an update that comes along.

    Raises:
        UsageError: there is none.
    """
    frame = service.staged.get((left.fragment, left.round, left.island))
    if frame is None:
        raise UsageError(
            f"No update of island {left.island!r} stands for round {left.round} of "
            f"fragment {left.fragment}."
        )
    return frame


def _controls(service: Service, settings: RunSettings) -> Iterator[ControlDocument]:
    """Yield what operators have said, as if they had said it in a bucket."""
    state, epochs = service.state, service.journal.recorded.epochs
    for epoch in epochs:
        if epoch.values.get(END_ROUNDS) == NO_ROUND:
            continue  # said by the last round, below
        yield ControlDocument(run=state.run, action="set", values=epoch.values)
    _, last = end_of(
        settings,
        [each.values for each in epochs if each.values.get(END_ROUNDS) != NO_ROUND],
    )
    if state.last_round != last:
        yield ControlDocument(
            run=state.run, action="stop", values={}, last_round=state.last_round
        )
    if state.is_paused:
        yield ControlDocument(run=state.run, action="pause", values={})


def _member(service: Service, member: Member) -> MemberDocument:
    """Return a life that goes on: every open round waits for it.

    What stands by its word is looked for by whoever closes a round.
    """
    stands = [
        Stand(fragment=fragment, round=round, incarnation=frame.header.incarnation)
        for (fragment, round, island), frame in service.staged.items()
        if island == member.island
        and (member.has_left or frame.header.incarnation < member.incarnation)
    ]
    return MemberDocument(
        run=service.state.run,
        slot=member.slot,
        key=member.key,
        nonce=member.nonce,
        opened=(),
        stands=tuple(stands),
        beats=0,
        has_left=member.has_left,
        beat=Beat(
            island=member.island,
            incarnation=member.incarnation,
            step=member.step,
            holds=member.holds,
        ),
    )


def _progress(service: Service, fragment: int) -> Progress:
    state = service.state
    return Progress(
        round=service.weights[fragment].round,
        counted=counted_progress(state.counted, fragment),
        bases=state.rounds[fragment].bases[:-1][-BASES:],
    )


def _rosters(service: Service) -> Iterator[RosterDocument]:
    for fragment, known in enumerate(service.journal.recorded.fragments):
        for round in range(max(1, known.round - ROSTERS + 1), known.round + 1):
            if round not in known.where:
                continue  # lost before a recovery
            header, _ = service.journal.outcome(fragment, round, has_body=False)
            assert header.roster is not None
            assert header.outer is not None
            yield RosterDocument(
                run=header.run,
                fragment=fragment,
                round=round,
                epoch=header.epoch,
                base=header.base,
                outer=header.outer,
                shards=(),
                roster=header.roster,
            )


def _left(service: Service, now_s: float) -> Iterator[Left]:
    """Yield the updates whose islands will not publish them again."""
    members = service.state.members
    live = members.live(now_s)
    for (fragment, round, island), frame in service.staged.items():
        header = frame.header
        is_its = header.incarnation == members.known[island].incarnation
        if header.kind is Kind.DEPARTING or island not in live or not is_its:
            yield Left(fragment=fragment, round=round, island=island)
