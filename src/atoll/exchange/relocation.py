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
"""Pause between two attempts to join at the new address; doubled each time."""

T = TypeVar("T")
log = logging.getLogger("atoll")


class RunLocation(KeepingExchange, Protocol):
    """An exchange with a run at one address, as one island uses it."""

    stats: Callable[[], Stats] | None
    moved: Callable[[RunMoved], None] | None
    """Called in the background when a heartbeat learns that the run has moved."""


Open = Callable[[str], RunLocation]
"""Opens an exchange with the run at a URL, and closes the one opened before."""


class FollowingExchange:
    """An `Exchange` for one incarnation of one island, at any address of its run."""

    def __init__(
        self, location: RunLocation, open: Open, *, pause: Callable[[float], None]
    ) -> None:
        self._open, self._pause = open, pause
        self._lock = threading.Lock()
        self._stats: Callable[[], Stats] | None = None
        self._request: JoinRequest | None = None
        self._beat: Heartbeat | None = None
        self._unconfirmed: dict[tuple[int, int], Frame] = {}
        self._last_warning = ""
        self._location: RunLocation | str = self._watched(location)
        """The exchange with the run; or the run's URL, until one is open."""

    @property
    def stats(self) -> Callable[[], Stats] | None:
        """Returns the island's statistics; called for each heartbeat that is sent."""
        return self._stats

    @stats.setter
    def stats(self, stats: Callable[[], Stats] | None) -> None:
        self._stats, location = stats, self._location
        if not isinstance(location, str):
            location.stats = stats

    def join(self, request: JoinRequest) -> JoinReply:
        reply = self._call(lambda location: location.join(request))
        self._request = replace(
            request, island=reply.island, incarnation=reply.incarnation, after=0
        )
        return reply

    def heartbeat(self, beat: Heartbeat, *, at_once: bool = False) -> Position:
        self._beat = beat
        return self._call(lambda location: location.heartbeat(beat, at_once=at_once))

    def keep(self, joined: JoinReply, model: ModelSpec, constants: Constants) -> None:
        """Have the run keep the founder's constants. Implements `Keeper`."""
        self._call(lambda location: location.keep(joined, model, constants))

    def publish(self, frame: Frame) -> Reception:
        header = frame.header
        if header.kind not in (FrameKind.STATE, FrameKind.AGREED):
            self._remember(frame)
        return self._call(lambda location: location.publish(frame))

    def outcome(self, fragment: int, round: int, *, wait_s: float) -> Outcome | None:
        try:
            outcome = self._call(
                lambda location: location.outcome(fragment, round, wait_s=wait_s)
            )
        except OutcomeLost:
            self._unconfirmed.pop((fragment, round), None)
            raise
        if outcome is not None:
            self._unconfirmed.pop((fragment, round), None)
        return outcome

    def state(self, fragment: int) -> Frame:
        return self._call(lambda location: location.state(fragment))

    def leave(self, island: str, incarnation: int) -> None:
        self._call(lambda location: location.leave(island, incarnation))

    def _remember(self, frame: Frame) -> None:
        """Keep an update that may have to be published again.

        An island that publishes for a round knows the outcome of the round before the
        last one, so older updates are dropped.
        """
        fragment, round = frame.header.fragment, frame.header.round
        for key in list(self._unconfirmed):
            if key[0] == fragment and key[1] < round - 1:
                self._unconfirmed.pop(key, None)
        self._unconfirmed[fragment, round] = frame

    def _call(self, act: Callable[[RunLocation], T]) -> T:
        while True:
            location = self._location
            if isinstance(location, str):
                self._follow(location, location)
                continue
            try:
                return act(location)
            except RunMoved as exc:
                self._follow(location, exc.target)
            except Exception:
                # Another thread may have followed the run and closed the exchange of
                # this call, which then fails somehow: repeat it at the new address.
                with self._lock:
                    if location is self._location:
                        raise

    def _watched(self, location: RunLocation) -> RunLocation:
        """Return an exchange whose heartbeats make this island follow the run."""
        location.stats = self._stats
        location.moved = lambda exc: self._follow_quietly(location, exc.target)
        return location

    def _follow_quietly(self, location: RunLocation, target: str) -> None:
        with suppress(AtollError):  # the next call meets the same error, and raises it
            self._follow(location, target)

    def _follow(self, location: RunLocation | str, target: str) -> None:
        """Open an exchange at `target`, unless another thread has done it since.

        If that fails, only the URL is kept and the next call tries again: the exchange
        before is closed and cannot be used.
        """
        with self._lock:
            if location is not self._location:
                return
            if not isinstance(location, str):
                log.warning("the run has moved to %s: this island follows", target)
            self._location = target
            self._location = self._arrive(target)

    def _arrive(self, target: str) -> RunLocation:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return self._enter(target)
            except RunMoved as exc:
                target = exc.target
                self._warn(f"the run has moved again, to {target}: this island follows")
            except LeaseLost:
                raise
            except AtollError as exc:
                self._warn(f"the run is at {target}, and this island waits: {exc}")
            self._pause(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _enter(self, target: str) -> RunLocation:
        """Return the new exchange: same incarnation, same unconfirmed updates."""
        location = self._watched(self._open(target))
        if self._request is None:
            return location
        location.join(self._request)
        if self._beat is not None:
            location.heartbeat(self._beat)
        for frame in list(self._unconfirmed.values()):
            try:
                location.publish(frame)
            except Refused as exc:  # only the outcome decides which updates count
                log.warning("an update was refused after the move: %s", exc)
        return location

    def _warn(self, message: str) -> None:
        if message != self._last_warning:
            self._last_warning = message
            log.warning("%s", message)
