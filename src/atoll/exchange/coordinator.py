"""A run at a coordinator: the same calls again and again, until one is answered.

Rule 1: every call is safe to repeat, so whatever was not answered is asked again.
Rule 2: an update is kept until an outcome is known. A coordinator that restarted has
        forgotten it, says that it is wanted, and gets the same bytes again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, cast

from atoll.errors import (
    CorruptError,
    DiskError,
    LeaseLost,
    NameKnown,
    RemoteError,
    RunMoved,
    Unreachable,
)
from atoll.exchange.base import Constants, Frame, Outcome, another
from atoll.exchange.calls import (
    LONG_POLL_S,
    AgreedCall,
    Call,
    FoundCall,
    HeartbeatCall,
    JoinCall,
    KeepCall,
    Kept,
    LeaveCall,
    OfferCall,
    OutcomeCall,
    PublishCall,
    Reply,
    StateCall,
)
from atoll.exchange.receipts import ReceiptCache
from atoll.protocol import (
    Heartbeat,
    JoinReply,
    JoinRequest,
    ModelSpec,
    Position,
    Reception,
    Stats,
    TensorSpec,
)
from atoll.protocol.model import bytes_of, to_bring
from atoll.weights import lay_out
from atoll.wire import FrameKind, Header, blake3_digest
from atoll.wire.digests import Bytes, view_of
from atoll.wire.proofs import voucher

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
"""Between two attempts at a coordinator that does not answer; doubled each time."""

KEEP_TRIES = 5
"""So often a constant is brought from its beginning: a restarted coordinator has it no
more, and one whose bytes are not its own never arrives."""

HEARTBEAT_S = 3.0
"""A fifth of the lease, so that several may be lost."""


class CoordinatorLine(Protocol):
    """Takes one call to the coordinator. `CoordinatorExchange` is the only caller."""

    def call(self, call: Call) -> Reply:
        """Return the answer, or raise what the coordinator raised.

        Raises:
            Unreachable: no answer came; the call may or may not have been handled.
        """
        ...

    def pause(self, seconds: float) -> None:
        """Wait before another attempt."""
        ...

    def every(self, seconds: float, act: Callable[[], None]) -> None:
        """Call `act` again and again in the background, until the process ends."""
        ...


class CoordinatorExchange:
    """An `Exchange` for one life of one island."""

    def __init__(
        self,
        line: CoordinatorLine,
        *,
        key: bytes,
        nonce: bytes,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._line, self._key, self._nonce = line, key, nonce
        self._heartbeat_s = heartbeat_s
        self.stats: Callable[[], Stats] | None = None
        """What people are told of the island, asked for when it is sent."""
        self.moved: Callable[[RunMoved], None] | None = None
        """Told in the background that the run is elsewhere, for who follows it."""
        self._position: Position | None = None
        self._beat: Heartbeat | None = None
        self._lost: LeaseLost | None = None
        self._request: JoinRequest | None = None
        self._states: list[Frame] = []
        self._outcomes: list[Header] = []
        self._fragments = 0
        self._has_joined = False
        self._has_spoken = False
        self._unconfirmed: dict[tuple[int, int], Frame] = {}
        self._receipts = ReceiptCache()

    def join(self, request: JoinRequest) -> JoinReply:
        reply = self._join(request)
        self._request = replace(
            request, island=reply.island, incarnation=reply.incarnation
        )
        self._fragments = len(lay_out(request.model, reply.settings))
        self._position = reply.position
        self._beat = Heartbeat(
            island=reply.island,
            incarnation=reply.incarnation,
            step=reply.position.step,
        )
        self._states.clear()
        if not self._has_joined:
            self._has_joined = True
            self._line.every(self._heartbeat_s, self._beat_if_silent)
        return reply

    def _join(self, request: JoinRequest) -> JoinReply:
        while True:
            call = JoinCall(request, self._key, self._nonce)
            try:
                return cast(JoinReply, self._ask(call))
            except NameKnown as exc:
                request = replace(request, after=exc.incarnation)

    def heartbeat(self, beat: Heartbeat, *, at_once: bool = False) -> Position:
        if self._lost is not None:
            raise self._lost
        self._beat = beat
        if at_once:
            self._send_beat()
        assert self._position is not None
        return self._position

    def publish(self, frame: Frame) -> Reception:
        header = frame.header
        match header.kind:
            case FrameKind.STATE if header.round:
                outcomes, self._outcomes = tuple(self._outcomes), []
                call = self._receipts.recovery(frame, outcomes)
                self._position = cast(Position, self._ask(call))
            case FrameKind.STATE:
                self._found(frame)
            case FrameKind.AGREED:
                self._outcomes.append(header)
            case _:
                self._unconfirmed[header.fragment, header.round] = frame
                return cast(Reception, self._ask(PublishCall(frame, self._told())))
        return Reception.STAGED

    def _found(self, frame: Frame) -> None:
        """Bring the founding states together: they are one call."""
        header = frame.header
        self._states.append(frame)
        if len(self._states) == self._fragments:
            states = tuple(self._states)
            self._ask(FoundCall(header.island, header.incarnation, states))

    def keep(self, joined: JoinReply, model: ModelSpec, constants: Constants) -> None:
        """Have the run keep the founder's constants. Implements `Keeper`."""
        for constant in to_bring(model, joined.settings):
            for _ in range(KEEP_TRIES):
                if self._keep(joined, constant, constants):
                    break
            else:
                raise another(constant)

    def _keep(
        self, joined: JoinReply, constant: TensorSpec, constants: Constants
    ) -> bool:
        """Bring what the run has not; False: it has less than was brought."""
        size, there = bytes_of(constant), self._bring(joined, constant, 0)
        for part in constants.parts(constant, there) if there < size else ():
            expected = there + len(view_of(part))
            there = self._bring(joined, constant, there, part)
            if there != expected:
                break
        return there == size

    def _bring(
        self, joined: JoinReply, constant: TensorSpec, first: int, part: Bytes = b""
    ) -> int:
        who = joined.island, joined.incarnation
        call = KeepCall(*who, constant.digest, first, part)
        return cast(Kept, self._ask(call)).bytes

    def outcome(self, fragment: int, round: int, *, wait_s: float) -> Outcome | None:
        wait_s = LONG_POLL_S if wait_s else 0.0
        beat = self._beat and self._receipts.with_receipts(self._beat)
        reply = self._ask(OutcomeCall(fragment, round, wait_s, beat))
        if isinstance(reply, Outcome):
            self.note_receipts(reply)
            self._unconfirmed.pop((fragment, round), None)
            self._position = reply.position
            return reply
        self._position = cast(Position | None, reply) or self._position
        self._send_again(fragment, round)
        self._send_wanted()
        return None

    def agree(
        self,
        updates: tuple[Header, ...],
        agreed: Frame | None = None,
        vouchers: tuple[bytes, ...] = (),
    ) -> Outcome | Reception:
        """Bring what islands have reduced among themselves, or ask how they are to.

        The outcome has no body. A reception instead says that others take part, or
        that the round is over: the updates are then to be published.
        """
        assert self._request is not None
        island, incarnation = self._request.island, self._request.incarnation
        assert island is not None
        assert incarnation is not None
        call = AgreedCall(island, incarnation, updates, agreed, vouchers)
        reply = cast(Outcome | Reception, self._ask(call))
        if isinstance(reply, Outcome):
            self.note_receipts(reply)
            self._position = reply.position
        return reply

    def note_receipts(self, outcome: Outcome) -> None:
        """Keep the receipts of an outcome: later calls show them to the run."""
        self._receipts.note_outcome(outcome)

    def vouch(self, agreed: Header) -> bytes:
        """Return this island's word for an outcome, for who brings it to the run."""
        return voucher(blake3_digest(self._key), agreed)

    def state(self, fragment: int) -> Frame:
        frame = cast(Frame, self._ask(StateCall(fragment)))
        self._receipts.note_state(frame)
        return frame

    def leave(self, island: str, incarnation: int) -> None:
        self._beat = None
        self._ask(LeaveCall(island, incarnation))

    def _send_wanted(self) -> None:
        """Bring what the run waits for and was brought before: it has restarted."""
        position = self._position
        assert position is not None
        for fragment in position.wanted:
            self._send_again(fragment, position.rounds[fragment])

    def _send_again(self, fragment: int, round: int) -> None:
        frame = self._unconfirmed.get((fragment, round))
        if frame and self._ask(OfferCall(frame.header)) is Reception.WANTED:
            self._ask(PublishCall(frame))

    def _beat_if_silent(self) -> None:
        """Send a heartbeat, unless another call has said since what it would say."""
        has_spoken, self._has_spoken = self._has_spoken, False
        if not has_spoken:
            self._send_beat()

    def _send_beat(self) -> None:
        beat = self._told()
        if beat is None:
            return
        try:
            self._position = cast(Position, self._call(HeartbeatCall(beat)))
        except RunMoved as exc:
            if self.moved is not None:
                self.moved(exc)
        except LeaseLost as exc:
            # Told to the thread that trains, unless this is a beat after the leaving.
            self._lost = exc if self._beat is not None else None
        except (CorruptError, RemoteError):
            return  # the next call says the same, and meets the same: beats go on

    def _told(self) -> Heartbeat | None:
        """Return the beat with what people are told, and with receipts."""
        beat = self._beat
        if beat is None:
            return beat
        beat = self._receipts.with_receipts(beat)
        return beat if self.stats is None else replace(beat, stats=self.stats())

    def _ask(self, call: Call) -> Reply:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return self._call(call)
            except (DiskError, Unreachable):
                self._line.pause(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _call(self, call: Call) -> Reply:
        """Call, as a member: a run that lost the record of this life is given it."""
        try:
            reply = self._line.call(call)
            if isinstance(call, OutcomeCall | PublishCall):
                self._has_spoken = call.beat is not None
            return reply
        except LeaseLost:
            if self._request is None or isinstance(call, JoinCall):
                raise
            beat = self._told()
            request = replace(self._request, holds=beat.holds if beat else ())
            self._line.call(JoinCall(request, self._key, self._nonce))
            return self._line.call(call)
