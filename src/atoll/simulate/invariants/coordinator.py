"""Checks a coordinator: its messages, its commits, its restarts and its deadlines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from atoll.coordinator import Service
from atoll.exchange import calls
from atoll.journal.files import Body, views_of
from atoll.protocol.coordinator_state import CoordinatorState
from atoll.protocol.rounds import Phase
from atoll.simulate.hosts import CoordinatorHost
from atoll.simulate.invariants import claims
from atoll.simulate.invariants.watch import InvariantWatch
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
    def has_ended(self) -> bool:
        service = self._coordinator.service
        return service is not None and all(
            round.phase is Phase.ENDED for round in service.state.rounds
        )

    @property
    def digests(self) -> list[bytes]:
        service = self._coordinator.service
        return [state.digest for state in service.weights] if service else []

    def look(self) -> None:
        service = self._coordinator.service
        if service is not self._service and service is not None:
            self._observe(service)

    def judge(self) -> None:
        service = self._coordinator.service
        assert service is not None
        check_deadlines(service, self.report)

    def conclude(self) -> None:
        if self._coordinator.service is not None:
            self._rounds.ended(self._coordinator.service)

    def _observe(self, service: Service) -> None:
        """Check a coordinator that has started, and observe its calls and commits."""
        self._service = service
        was_put_back = self._world.disks[COORDINATOR].was_put_back
        self._rounds.opened(service, was_put_back=was_put_back)
        now_s = self._world.scheduler.now_s
        opened_s = {index: now_s for index in range(len(service.weights))}
        self._watch.opened_s = opened_s
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
            return handle(call, now_s)
        finally:
            if sender is not None:
                self._check_zombie(before, service.state, *sender)
            if isinstance(call, calls.PublishCall):
                check_staged(service, self.report)
            elif isinstance(call, calls.FoundCall):
                self._rounds.founded(service.weights)

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
        outcome = claims.CommittedRound(agreed, data, digest_after, now_s)
        self._rounds.attempted(outcome)
        commit(agreed, body, digest_after=digest_after, epoch=epoch)
        self._watch.committed(outcome)


def _sender(call: calls.Call) -> tuple[str, int] | None:
    """Return name and incarnation of the sender, if the call contains them."""
    match call:
        case calls.HeartbeatCall(beat):
            return beat.island, beat.incarnation
        case calls.OfferCall(header):
            return header.island, header.incarnation
        case calls.PublishCall(frame):
            return frame.header.island, frame.header.incarnation
        case calls.LeaveCall(island, incarnation) | calls.FoundCall(
            island, incarnation, _
        ):
            return island, incarnation
    return None


def check_staged(service: Service, report: claims.Report) -> None:
    """Report staged updates of other rounds or unknown islands, or too many."""
    for round in service.state.rounds:
        members = service.state.members.known.keys()
        is_ahead = all(
            header.kind is FrameKind.DEPARTING and header.round == round.number + 1
            for header in round.ahead.values()
        )
        is_now = all(header.round == round.number for header in round.staged.values())
        if not (is_ahead and is_now and {*round.staged, *round.ahead} <= members):
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


def check_deadlines(service: Service, report: claims.Report) -> None:
    """Report a deadline outside its bounds."""
    state, limits = service.state, service.state.settings.limits
    for round in state.rounds:
        if round.phase is not Phase.OPEN:
            continue
        for island in round.candidates:
            late_at_s = round.late_at_s(island, state.members, state.settings)
            after_s = late_at_s - round.opened_s
            # The clock shows up to some millions of seconds: a difference of sums.
            if (
                after_s < limits.deadline_min_s - 1e-6
                or late_at_s > round.waits_from_s + limits.deadline_max_s + 1e-6
            ):
                report(
                    claims.DEADLINES_BOUNDED,
                    "coordinator",
                    f"waits {after_s:.3f} s for {island} in round {round.number} of "
                    f"fragment {round.fragment}",
                )
