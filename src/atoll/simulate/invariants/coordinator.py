"""Checks a coordinator: its messages, its commits, its restarts and its deadlines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from atoll.coordinator import Service
from atoll.data import Claim, RowCounts
from atoll.exchange import calls
from atoll.journal.files import Body, views_of
from atoll.protocol.coordinator_state import CoordinatorState
from atoll.protocol.rounds import Phase, Round
from atoll.simulate.hosts import CoordinatorHost
from atoll.simulate.invariants import claims
from atoll.simulate.invariants.listings import StandingUpdates
from atoll.simulate.invariants.watch import InvariantWatch, longest_grace_s
from atoll.simulate.storms import COORDINATOR
from atoll.simulate.world import SimWorld
from atoll.wire import FrameKind, Header


class CoordinatorReferee:
    """Rounds are decided by a coordinator's journal. Implements `Referee`."""

    def __init__(
        self, world: SimWorld, coordinator: CoordinatorHost, watch: InvariantWatch
    ):
        self._world, self._coordinator, self._watch = world, coordinator, watch
        self._rounds, self.report = watch.rounds, watch.report
        self._service: Service | None = None
        self._standing = StandingUpdates(watch.report)
        self._rows = watch.rows
        self._seen: CoordinatorState | None = None
        """The state in which releases were looked for."""

        self._num_live: dict[tuple[int, int], int] = {}
        """Live members when a round closed, by fragment and round."""

    @property
    def opened(self) -> tuple[int, ...]:
        service = self._coordinator.service
        rounds = service.state.rounds if service is not None else ()
        return tuple([round.number for round in rounds])

    @property
    def has_started(self) -> bool:
        service = self._coordinator.service
        return service is None or service.state.has_started

    @property
    def is_ending(self) -> bool:
        service = self._coordinator.service
        return service is not None and any(
            round.phase is not Phase.ENDED and round.is_last
            for round in service.state.rounds
        )

    @property
    def has_ended(self) -> bool:
        service = self._coordinator.service
        return service is not None and all(
            round.phase is Phase.ENDED for round in service.state.rounds
        )

    @property
    def digests(self) -> list[bytes]:
        service = self._coordinator.service
        return [state.digest for state in service.weights] if service else []

    @property
    def rows(self) -> RowCounts | None:
        service = self._coordinator.service
        ledger = service.state.ledger if service is not None else None
        return ledger.counts if ledger is not None else None

    def look(self) -> None:
        service = self._coordinator.service
        if service is not self._service and service is not None:
            self._observe(service)
        if service is not None:
            self._note_closing(service)
            self._look_at_rows(service)

    def _look_at_rows(self, service: Service) -> None:
        """Note the releases of rows, and the end of the data."""
        state, now_s = service.state, self._coordinator.now_s()
        if state.ledger is None or state is self._seen:
            return
        self._seen = state
        self._rows.released(state, now_s)
        if state.last_round is not None or state.last_rounds is not None:
            self._rows.ending(state, now_s)

    def _note_closing(self, service: Service) -> None:
        """Note the live members when a round closes, which may be committed later."""
        for round in service.state.rounds:
            if round.phase is Phase.CLOSING:
                self._live_at_close(service, round)

    def _live_at_close(self, service: Service, round: Round) -> int:
        live = len(service.state.members.live(self._coordinator.now_s()))
        return self._num_live.setdefault((round.fragment, round.number), live)

    def judge(self) -> None:
        service = self._coordinator.service
        assert service is not None
        check_deadlines(service, self.report)
        for round in service.state.rounds:
            self._rounds.ends(round.fragment, service.state.last_of(round.fragment))
        self._rows.judge(service.state.ledger)

    def conclude(self) -> None:
        service = self._coordinator.service
        if service is not None:
            self._rounds.ended(service)
            self._rows.conclude(service.state.ledger)

    def _observe(self, service: Service) -> None:
        """Check a coordinator that has started, and observe its calls and commits."""
        self._service = service
        was_put_back = self._world.disks[COORDINATOR].was_put_back
        self._rounds.opened(service, was_put_back=was_put_back)
        self._rows.opened(service.state, self._coordinator.now_s())
        now_s = self._world.scheduler.now_s
        opened_s = {index: now_s for index in range(len(service.weights))}
        self._watch.opened_s = opened_s
        self._num_live.clear()
        self._standing.begin(service.state.rounds)
        handle, commit = service.handle, service.journal.commit
        # Wrappers of this object's methods, which observe and do not change the calls.
        service.handle = partial(self._handle, service, handle)  # type: ignore[method-assign]
        service.journal.commit = partial(self._commit, service, commit)  # type: ignore[method-assign]

    def _handle(
        self,
        service: Service,
        handle: Callable[[calls.Call, float], calls.Reply],
        call: calls.Call,
        now_s: float,
    ) -> calls.Reply:
        before, sender = service.state, _sender(call)
        try:
            reply = handle(call, now_s)
            if isinstance(call, calls.ClaimCall):
                self._note_claim(service, call, reply)
            return reply
        finally:
            if sender is not None:
                self._check_zombie(before, service.state, *sender)
            if isinstance(call, calls.PublishCall):
                check_staged(service, self.report)
                self._note_staged(before, service.state)
            elif isinstance(call, calls.FoundCall):
                self._rounds.founded(service.weights)

    def _note_claim(
        self, service: Service, call: calls.ClaimCall, reply: calls.Reply
    ) -> None:
        assert isinstance(reply, Claim)
        self._look_at_rows(service)
        self._rows.answered(call.island, call.ask.number, reply.spans, service.state)

    def _note_staged(self, before: CoordinatorState, after: CoordinatorState) -> None:
        for old, new in zip(before.rounds, after.rounds, strict=False):
            if new is not old and new.number == old.number:
                self._standing.look(new, old.staged, old.ahead)

    def _check_zombie(
        self,
        before: CoordinatorState,
        after: CoordinatorState,
        island: str,
        incarnation: int,
    ) -> None:
        latest = before.members.known.get(island)
        if after is before or latest is None or incarnation >= latest.incarnation:
            return
        staged = [
            header
            for old, new in zip(before.rounds, after.rounds, strict=False)
            for header in (new.staged.get(island), new.ahead.get(island))
            if header not in (None, old.staged.get(island), old.ahead.get(island))
        ]
        if after.members.known[island] is not latest or staged:
            self.report(
                claims.ZOMBIES_CHANGE_NOTHING,
                island,
                f"its incarnation {incarnation} changed the coordinator's state, "
                f"after incarnation {latest.incarnation} had joined",
            )

    def _commit(
        self,
        service: Service,
        commit: Callable[..., None],
        agreed: Header,
        body: Body,
        *,
        digest_after: bytes,
        epoch: int,
    ) -> None:
        now_s = self._world.scheduler.now_s
        data = b"".join(views_of(body))
        round = service.state.rounds[agreed.fragment]
        num_live = self._live_at_close(service, round)
        outcome = claims.CommittedRound(agreed, data, digest_after, now_s, num_live)
        self._rounds.attempted(outcome)
        commit(agreed, body, digest_after=digest_after, epoch=epoch)
        del self._num_live[round.fragment, round.number]
        self._watch.committed(outcome)
        self._standing.committed(outcome)


def _sender(call: calls.Call) -> tuple[str, int] | None:
    """Return name and incarnation of the sender, if the call contains them."""
    match call:
        case calls.HeartbeatCall(beat):
            return beat.island, beat.incarnation
        case calls.OfferCall(header):
            return header.island, header.incarnation
        case calls.PublishCall(frame):
            return frame.header.island, frame.header.incarnation
        case calls.ClaimCall(ask):
            return ask.island, ask.incarnation
        case calls.DataCall(island, incarnation, _):
            return island, incarnation
        case calls.LeaveCall(island, incarnation) | calls.FoundCall(
            island, incarnation, _
        ):
            return island, incarnation
    return None


def check_staged(service: Service, report: claims.Report) -> None:
    """Report staged updates of other rounds or unknown islands, or too many."""
    for round in service.state.rounds:
        members = service.state.members.known.keys()
        are_right = _asynchronous if round.is_async else _synchronous
        if not (are_right(round) and {*round.staged, *round.ahead} <= members):
            report(
                claims.BOUNDED,
                "coordinator",
                f"round {round.number} of fragment {round.fragment} holds updates of "
                "other rounds, or of unknown islands",
            )
    num_staged = sum(
        len(round.staged) + len(round.ahead) for round in service.state.rounds
    )
    if len(service._spool) > num_staged:
        report(
            claims.BOUNDED,
            "coordinator",
            f"its spool holds {len(service._spool)} updates, "
            f"and {num_staged} are staged",
        )


def _synchronous(round: Round) -> bool:
    """Return whether staged updates are of the open round, or depart for the next."""
    is_ahead = all(
        header.kind is FrameKind.DEPARTING and header.round == round.number + 1
        for header in round.ahead.values()
    )
    return is_ahead and all(
        header.round == round.number for header in round.staged.values()
    )


def _asynchronous(round: Round) -> bool:
    """Return whether staged updates have a label of the open round or before.

    The next roster lists updates that arrive while the round closes, and departing
    ones if another of their island stands, or for the next round.
    """
    is_ahead = all(
        header.round <= round.number + 1
        and (header.kind is FrameKind.DEPARTING or round.phase is Phase.CLOSING)
        for header in round.ahead.values()
    )
    return is_ahead and all(
        header.round <= round.number for header in round.staged.values()
    )


def check_deadlines(service: Service, report: claims.Report) -> None:
    """Report a deadline outside its bounds."""
    state = service.state
    for round in state.rounds:
        if round.phase is not Phase.OPEN:
            continue
        shortest_s, longest_s = _deadlines_s(state, round)
        from_s = max(round.waits_from_s, round.last_since_s or 0.0)
        for island in round.candidates:
            late_at_s = round.late_at_s(island, state.members, state.settings)
            after_s = late_at_s - round.opened_s
            # The clock shows up to some millions of seconds: a difference of sums.
            if after_s < shortest_s - 1e-6 or late_at_s > from_s + longest_s + 1e-6:
                report(
                    claims.DEADLINES_BOUNDED,
                    "coordinator",
                    f"waits {after_s:.3f} s for {island} in round {round.number} of "
                    f"fragment {round.fragment}",
                )


def _deadlines_s(state: CoordinatorState, round: Round) -> tuple[float, float]:
    """Return the bounds of a wait.

    The lower one is from the opening of the round; the upper one from its first update,
    or from the moment at which it became the last.
    """
    limits = state.settings.limits
    if not round.is_async:
        return limits.deadline_min_s, limits.deadline_max_s
    if round.is_last:
        return 0.0, limits.deadline_max_s
    paces_s = [member.step_s or 0.0 for member in state.members.known.values()]
    step_s = max(paces_s, default=0.0)
    return 0.0, longest_grace_s(state.settings, step_s=step_s)
