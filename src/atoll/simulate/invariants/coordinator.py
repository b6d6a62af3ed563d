"""Looks over the shoulder of a coordinator: its messages, its commits, its restarts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from atoll.coordinator import Service
from atoll.exchange.calls import (
    Call,
    FoundCall,
    HeartbeatCall,
    LeaveCall,
    OfferCall,
    PublishCall,
    Reply,
)
from atoll.protocol.coordinator_state import CoordinatorState
from atoll.protocol.rounds import Phase
from atoll.simulate.hosts import CoordinatorHost
from atoll.simulate.invariants.bounds import check_deadlines, check_staged
from atoll.simulate.invariants.claims import ZOMBIES_CHANGE_NOTHING
from atoll.simulate.invariants.history import CommittedRound
from atoll.simulate.invariants.watch import (
    InvariantWatch,
)
from atoll.simulate.storms import COORDINATOR
from atoll.simulate.world import (
    SimWorld,
)
from atoll.wire import Header


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
            self._meet(service)

    def judge(self) -> None:
        service = self._coordinator.service
        assert service is not None
        check_deadlines(service, self.report)

    def conclude(self) -> None:
        if self._coordinator.service is not None:
            self._rounds.ended(self._coordinator.service)

    def _meet(self, service: Service) -> None:
        """Judge a coordinator that has begun to live, and see all that it does."""
        self._service = service
        was_put_back = self._world.disks[COORDINATOR].was_put_back
        self._rounds.opened(service, was_put_back=was_put_back)
        now_s = self._world.scheduler.now_s
        opened_s = {index: now_s for index in range(len(service.weights))}
        self._watch.opened_s = opened_s
        handle, commit = service.handle, service.journal.commit
        # The world looks over the shoulder of this one coordinator; nothing changes.
        service.handle = partial(self._handle, service, handle)  # type: ignore[method-assign]
        service.journal.commit = partial(self._commit, service, commit)  # type: ignore[method-assign]

    def _handle(
        self,
        service: Service,
        handle: Callable[[Call, float], Reply],
        call: Call,
        now_s: float,
    ) -> Reply:
        before, who = service.state, _speaker(call)
        try:
            return handle(call, now_s)
        finally:
            if who is not None:
                self._check_zombie(before, service.state, *who)
            if isinstance(call, PublishCall):
                check_staged(service, self.report)
            elif isinstance(call, FoundCall):
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
                ZOMBIES_CHANGE_NOTHING,
                island,
                f"its incarnation {incarnation} changed what the coordinator knows, "
                f"after incarnation {latest.incarnation} had joined",
            )

    def _commit(
        self,
        service: Service,
        commit: Callable[..., None],
        agreed: Header,
        body: np.ndarray,
        *,
        digest_after: bytes,
        epoch: int,
    ) -> None:
        now_s = self._world.scheduler.now_s
        outcome = CommittedRound(agreed, body.tobytes(), digest_after, now_s)
        self._rounds.attempted(outcome)
        commit(agreed, body, digest_after=digest_after, epoch=epoch)
        self._watch.committed(outcome)


def _speaker(call: Call) -> tuple[str, int] | None:
    """Return which life of which island speaks, if the call says so."""
    match call:
        case HeartbeatCall(beat):
            return beat.island, beat.incarnation
        case OfferCall(header):
            return header.island, header.incarnation
        case PublishCall(frame):
            return frame.header.island, frame.header.incarnation
        case LeaveCall(island, incarnation) | FoundCall(island, incarnation, _):
            return island, incarnation
    return None
