"""Tells who was let in to change a run, and who was turned away.

What was allowed is always told. Denials are told sparingly, each kind by itself: the
next one that is told says how many were not, so that nobody who knocks on the port can
fill a disk or push all else out of the events.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from atoll.clock import Clock
from atoll.errors import AtollError, RunEnded
from atoll.http import Request, Shed, Unfit
from atoll.security import (
    UNLISTED,
    Action,
    Answer,
    Audit,
    MustWait,
    Role,
    Route,
    Sparing,
    What,
    route_of,
)
from atoll.telemetry import Events

_ACTIONS = {each.value: each for each in Action}
_WHAT = {"control": What.CONTROL, "invites": What.CODE_MADE}


class Audits:
    """Emits audits. Threads may share it."""

    def __init__(
        self,
        events: Events,
        clock: Clock,
        *,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self._events, self._clock, self._unix_s = events, clock, unix_s
        self._sparing = Sparing()

    def allowed(self, request: Request, role: Role | None) -> None:
        """Tell who changed something."""
        self._tell(_what(request), Answer.ALLOWED, request, role=role)

    def denied(self, request: Request, role: Role | None) -> None:
        """Tell whose token does not suffice."""
        answer = Answer.NO_TOKEN if role is None else Answer.WRONG_ROLE
        self._tell(_what(request), answer, request, role=role)

    def failed(
        self, request: Request, role: Role | None, exc: AtollError | RunEnded
    ) -> None:
        """Tell who brought a wrong code; other failures are no business of ours."""
        if request.segments[:1] == ("invites",):
            waits = isinstance(exc, MustWait)
            answer = Answer.MUST_WAIT if waits else Answer.WRONG_CODE
            self._tell(_what(request), answer, request, role=role)

    def unproven(self, request: Request, role: Role | None, island: str) -> None:
        """Audit a call that lacks the proof of the island it names."""
        self._emit(
            What.REQUEST,
            Answer.WRONG_PROOF,
            request.address[0],
            role=role,
            route=route_of(request.method, request.target.partition("?")[0]),
            island=island,
        )

    def refused_handshake(self, address: str, why: Unfit) -> None:
        """Tell who did not get through TLS; a hook of the listener."""
        self._emit(What.HANDSHAKE, Answer(why.value), address)

    def shed(self, address: str, why: Shed) -> None:
        """Tell that a connection was closed for room; a hook of the listener."""
        self._emit(What.CONNECTION, Answer(why.value), address)

    def _tell(
        self, what: What, answer: Answer, request: Request, *, role: Role | None
    ) -> None:
        self._emit(
            what,
            answer,
            request.address[0],
            role=role,
            route=route_of(request.method, request.target.partition("?")[0]),
            action=_ACTIONS.get((*request.segments, "", "")[1])
            if what is What.CONTROL
            else None,
        )

    def _emit(
        self,
        what: What,
        answer: Answer,
        address: str,
        *,
        role: Role | None = None,
        route: Route = UNLISTED,
        action: Action | None = None,
        island: str = "",
    ) -> None:
        untold: int | None = 0
        if answer is not Answer.ALLOWED:
            untold = self._sparing.untold((what, answer), now_s=self._clock.now_s())
        if untold is None:
            return
        audit = Audit(
            what=what,
            answer=answer,
            address=address,
            at_unix_s=self._unix_s(),
            role=role,
            route=route,
            action=action,
            untold=untold,
        )
        # The name of a member, which events show anyhow: not what a caller wrote.
        member = {"island": island} if island else {}
        self._events.emit("audit", **audit.as_event(), **member)


def _what(request: Request) -> What:
    first, then = (*request.segments, "", "")[:2]
    if (first, then) == ("invites", "redeem"):
        return What.CODE_REDEEMED
    return _WHAT.get(first, What.REQUEST)
