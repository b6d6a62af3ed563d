"""Islands that call a coordinator in their own process, without a wire."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import cast

from atoll.coordinator import Service
from atoll.errors import Unreachable
from atoll.exchange import Frame, Outcome
from atoll.exchange.calls import (
    Call,
    FoundCall,
    HeartbeatCall,
    JoinCall,
    LeaveCall,
    OutcomeCall,
    PublishCall,
    Reply,
    StateCall,
)
from atoll.protocol import Heartbeat, JoinReply, JoinRequest, Position, Reception
from atoll.wire import FrameKind


class Desk:
    """A coordinator that may be replaced by its own restart, and calls to it."""

    def __init__(self, service: Service, now_s: Callable[[], float]) -> None:
        self.service, self.now_s = service, now_s
        self.changed = threading.Condition()

    def call(self, call: Call) -> Reply:
        with self.changed:
            try:
                return self.service.handle(call, self.now_s())
            finally:
                self.changed.notify_all()


class DirectExchange:
    """The `Exchange` of one island at a `Desk`."""

    def __init__(self, desk: Desk, key: bytes) -> None:
        self._desk, self._key = desk, key
        self._states: dict[int, Frame] = {}
        self._fragments = 0

    def join(self, request: JoinRequest) -> JoinReply:
        with self._desk.changed:
            while True:
                try:
                    reply = self._desk.call(JoinCall(request, self._key, b"1"))
                except Unreachable:
                    self._desk.changed.wait()
                else:
                    assert isinstance(reply, JoinReply)
                    return reply

    def heartbeat(self, beat: Heartbeat, *, at_once: bool = False) -> Position:
        return cast(Position, self._desk.call(HeartbeatCall(beat)))

    def publish(self, frame: Frame) -> Reception:
        if frame.header.kind is FrameKind.STATE:
            self._found(frame)
            return Reception.STAGED
        return cast(Reception, self._desk.call(PublishCall(frame)))

    def outcome(
        self, fragment: int, round: int, *, wait_s: float, has_body: bool = True
    ) -> Outcome | None:
        def ask() -> Outcome | None:
            call = OutcomeCall(fragment, round, has_body=has_body)
            reply = self._desk.call(call)
            return cast(Outcome | None, reply)

        with self._desk.changed:
            return ask() or (self._desk.changed.wait(wait_s) and ask()) or None

    def state(self, fragment: int) -> Frame:
        return cast(Frame, self._desk.call(StateCall(fragment)))

    def leave(self, island: str, incarnation: int) -> None:
        self._desk.call(LeaveCall(island, incarnation))

    def _found(self, frame: Frame) -> None:
        """Bring the founding states together: they are one call."""
        self._states[frame.header.fragment] = frame
        header = frame.header
        if len(self._states) == self._fragments:
            states = tuple(self._states[index] for index in sorted(self._states))
            self._desk.call(FoundCall(header.island, header.incarnation, states))

    def expect(self, fragments: int) -> DirectExchange:
        self._fragments = fragments
        return self
