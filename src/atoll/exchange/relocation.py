"""An exchange that follows its run to another address.

Rule 1: a call that is answered with `RunMoved` is repeated at the new address. Rounds,
        bases and digests there are the same.
Rule 2: an update is kept until its outcome is known. An update that was not confirmed
        at the old address is published again at the new one, before any other call.
Rule 3: an island that cannot reach the new address keeps its work, reports the reason,
        and retries: only an incarnation that has a successor there ends.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Protocol, TypeVar

from atoll.errors import AtollError, LeaseLost, OutcomeLost, Refused, RunMoved
from atoll.exchange.base import Constants, Frame, KeepingExchange, Outcome
from atoll.protocol import (
    Heartbeat,
    JoinReply,
    JoinRequest,
    ModelSpec,
    Position,
    Reception,
    Stats,
)
from atoll.wire import FrameKind

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 5.0
"""Between two attempts to get where the run is; doubled each time."""

T = TypeVar("T")
log = logging.getLogger("atoll")


class RunLocation(KeepingExchange, Protocol):
    """Where a run is, for one island: an exchange that can be left behind."""

    stats: Callable[[], Stats] | None
    moved: Callable[[RunMoved], None] | None
    """Told in the background that the run has moved, if a heartbeat learns of it."""


Open = Callable[[str], RunLocation]
"""Opens the way to where a run is now, and ends the one that was opened before."""


class FollowingExchange:
    """An `Exchange` for one life of one island, wherever its run may be."""

    def __init__(
        self, place: RunLocation, open: Open, *, pause: Callable[[float], None]
    ) -> None:
        self._open, self._pause = open, pause
        self._lock = threading.Lock()
        self._stats: Callable[[], Stats] | None = None
        self._request: JoinRequest | None = None
        self._beat: Heartbeat | None = None
        self._unconfirmed: dict[tuple[int, int], Frame] = {}
        self._told = ""
        self._place: RunLocation | str = self._watched(place)
        """Where the run is; or only its URL, while the way there is not open."""

    @property
    def stats(self) -> Callable[[], Stats] | None:
        """What people are told of the island, asked for when it is sent."""
        return self._stats

    @stats.setter
    def stats(self, stats: Callable[[], Stats] | None) -> None:
        self._stats, place = stats, self._place
        if not isinstance(place, str):
            place.stats = stats

    def join(self, request: JoinRequest) -> JoinReply:
        reply = self._call(lambda place: place.join(request))
        self._request = replace(
            request, island=reply.island, incarnation=reply.incarnation, after=0
        )
        return reply

    def heartbeat(self, beat: Heartbeat, *, at_once: bool = False) -> Position:
        self._beat = beat
        return self._call(lambda place: place.heartbeat(beat, at_once=at_once))

    def keep(self, joined: JoinReply, model: ModelSpec, constants: Constants) -> None:
        """Have the run keep the founder's constants. Implements `Keeper`."""
        self._call(lambda place: place.keep(joined, model, constants))

    def publish(self, frame: Frame) -> Reception:
        header = frame.header
        if header.kind not in (FrameKind.STATE, FrameKind.AGREED):
            self._remember(frame)
        return self._call(lambda place: place.publish(frame))

    def outcome(self, fragment: int, round: int, *, wait_s: float) -> Outcome | None:
        try:
            outcome = self._call(
                lambda place: place.outcome(fragment, round, wait_s=wait_s)
            )
        except OutcomeLost:
            self._unconfirmed.pop((fragment, round), None)
            raise
        if outcome is not None:
            self._unconfirmed.pop((fragment, round), None)
        return outcome

    def state(self, fragment: int) -> Frame:
        return self._call(lambda place: place.state(fragment))

    def leave(self, island: str, incarnation: int) -> None:
        self._call(lambda place: place.leave(island, incarnation))

    def _remember(self, frame: Frame) -> None:
        """Keep an update that may have to be published again.

        Who publishes for a round knows how the one before the last went.
        """
        fragment, round = frame.header.fragment, frame.header.round
        for key in list(self._unconfirmed):
            if key[0] == fragment and key[1] < round - 1:
                self._unconfirmed.pop(key, None)
        self._unconfirmed[fragment, round] = frame

    def _call(self, act: Callable[[RunLocation], T]) -> T:
        while True:
            place = self._place
            if isinstance(place, str):
                self._follow(place, place)
                continue
            try:
                return act(place)
            except RunMoved as exc:
                self._follow(place, exc.target)
            except Exception:
                # Another thread may follow, and has ended the way of this call: then
                # it fails somehow, and is made again where the run is.
                with self._lock:
                    if place is self._place:
                        raise

    def _watched(self, place: RunLocation) -> RunLocation:
        """Return a place whose heartbeats make this island follow."""
        place.stats = self._stats
        place.moved = lambda exc: self._follow_quietly(place, exc.target)
        return place

    def _follow_quietly(self, place: RunLocation, target: str) -> None:
        with suppress(AtollError):  # the next call meets the same, and tells
            self._follow(place, target)

    def _follow(self, place: RunLocation | str, target: str) -> None:
        """Go where the run is, unless another thread has since.

        Who does not get there leaves the rest of the way to the next call: the place
        before is closed for good.
        """
        with self._lock:
            if place is not self._place:
                return
            if not isinstance(place, str):
                log.warning("the run has moved to %s: this island follows", target)
            self._place = target
            self._place = self._arrive(target)

    def _arrive(self, target: str) -> RunLocation:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return self._enter(target)
            except RunMoved as exc:
                target = exc.target
                self._tell(f"the run has moved on to {target}: this island follows")
            except LeaseLost:
                raise
            except AtollError as exc:
                self._tell(f"the run is at {target}, and this island waits: {exc}")
            self._pause(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _enter(self, target: str) -> RunLocation:
        """Return the new place, as the same life with the same work under way."""
        place = self._watched(self._open(target))
        if self._request is None:
            return place
        place.join(self._request)
        if self._beat is not None:
            place.heartbeat(self._beat)
        for frame in list(self._unconfirmed.values()):
            try:
                place.publish(frame)
            except Refused as exc:  # only the outcome says what counted
                log.warning("an update was refused after the move: %s", exc)
        return place

    def _tell(self, what: str) -> None:
        if what != self._told:
            self._told = what
            log.warning("%s", what)
