"""A run at a coordinator: each call is repeated until it is answered.

Rule 1: every call is safe to repeat, so a call without an answer is sent again.
Rule 2: an update is kept until its outcome is known. A coordinator that restarted has
        lost it, lists it as wanted, and receives the same bytes again.
Rule 3: the outcome of an asynchronous update is the roster that lists it. Until then
        it is offered again whenever a later round of its fragment has no outcome yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, cast

from atoll import protocol
from atoll.data import Ask, Claim, DataSpec
from atoll.errors import (
    CorruptError,
    LeaseLost,
    NameKnown,
    OutcomeLost,
    RemoteError,
    RunMoved,
)
from atoll.exchange import calls
from atoll.exchange.base import Constants, Frame, Outcome, digest_error
from atoll.protocol.model import bytes_of, to_bring
from atoll.retry import COORDINATOR_CALL, DAMAGED_CONSTANT, retried
from atoll.runtime import Runtime
from atoll.weights import lay_out
from atoll.wire import FrameKind, Header, Verdict, blake3_digest, update_digest
from atoll.wire.digests import Bytes, view_of
from atoll.wire.frame import voucher

HEARTBEAT_S = 3.0
"""A fifth of the lease, so that several may be lost."""


class CoordinatorTransport(Protocol):
    """Sends calls to the coordinator. `CoordinatorExchange` is the only caller."""

    @property
    def runtime(self) -> Runtime:
        """Waits between attempts, and sends heartbeats in the background."""
        ...

    def call(self, call: calls.Call) -> calls.Reply:
        """Return the reply, or raise the error that the coordinator raised.

        Raises:
            Unreachable: no answer came; the call may or may not have been handled.
        """
        ...


class CoordinatorExchange:
    """An `Exchange` for one incarnation of one island."""

    def __init__(
        self,
        line: CoordinatorTransport,
        *,
        key: bytes,
        nonce: bytes,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._line, self._key, self._nonce = line, key, nonce
        self._heartbeat_s = heartbeat_s
        self.stats: Callable[[], protocol.Stats] | None = None
        """Returns the island's statistics; called for each heartbeat that is sent."""
        self.moved: Callable[[RunMoved], None] | None = None
        """Called in the background when a heartbeat learns that the run has moved."""
        self._position: protocol.Position | None = None
        self._beat: protocol.Heartbeat | None = None
        self._lost: LeaseLost | None = None
        self._request: protocol.JoinRequest | None = None
        self._states: list[Frame] = []
        self._outcomes: list[Header] = []
        self._fragments = 0
        self._has_joined = self._is_async = False
        self._has_beaten = False
        self.unconfirmed: dict[tuple[int, int], Frame] = {}
        """The island's updates without an outcome, by fragment and the round that they
        were sealed for."""

        self._receipts = ReceiptCache()

    def join(self, request: protocol.JoinRequest) -> protocol.JoinReply:
        reply = self._join(request)
        self._request = replace(
            request, island=reply.island, incarnation=reply.incarnation
        )
        self._is_async = reply.settings.sync.is_async
        self._fragments = len(lay_out(request.model, reply.settings))
        self._position = reply.position
        self._beat = protocol.Heartbeat(
            island=reply.island,
            incarnation=reply.incarnation,
            step=reply.position.step,
        )
        self._states.clear()
        if not self._has_joined:
            self._has_joined = True
            self._line.runtime.every(self._heartbeat_s, self._beat_if_silent)
        return reply

    def _join(self, request: protocol.JoinRequest) -> protocol.JoinReply:
        while True:
            call = calls.JoinCall(request, self._key, self._nonce)
            try:
                return cast(protocol.JoinReply, self._ask(call))
            except NameKnown as exc:
                request = replace(request, after=exc.incarnation)

    def heartbeat(
        self, beat: protocol.Heartbeat, *, at_once: bool = False
    ) -> protocol.Position:
        if self._lost is not None:
            raise self._lost
        self._beat = beat
        if at_once:
            self._send_beat()
        assert self._position is not None
        return self._position

    def publish(self, frame: Frame) -> protocol.Reception:
        header = frame.header
        match header.kind:
            case FrameKind.STATE if header.round:
                outcomes, self._outcomes = tuple(self._outcomes), []
                call = self._receipts.recovery(frame, outcomes)
                self._position = cast(protocol.Position, self._ask(call))
            case FrameKind.STATE:
                self._found(frame)
            case FrameKind.AGREED:
                self._outcomes.append(header)
            case _:
                self.unconfirmed[header.fragment, header.round] = frame
                return cast(
                    protocol.Reception,
                    self._ask(calls.PublishCall(frame, self._full_beat())),
                )
        return protocol.Reception.STAGED

    def _found(self, frame: Frame) -> None:
        """Collect the founding states, and upload all of them in one call."""
        header = frame.header
        self._states.append(frame)
        if len(self._states) == self._fragments:
            states = tuple(self._states)
            self._ask(calls.FoundCall(header.island, header.incarnation, states))

    def keep(
        self,
        joined: protocol.JoinReply,
        model: protocol.ModelSpec,
        constants: Constants,
    ) -> None:
        """Have the run keep the founder's constants. Implements `ConstantsUploader`."""
        for constant in to_bring(model, joined.settings):
            keep = partial(self._keep, joined, constant, constants)
            retried(keep, DAMAGED_CONSTANT, sleep=self._line.runtime.sleep)

    def _keep(
        self,
        joined: protocol.JoinReply,
        constant: protocol.TensorSpec,
        constants: Constants,
    ) -> None:
        """Upload the missing bytes; raise if the run has fewer than were uploaded."""
        size, stored = bytes_of(constant), self._upload(joined, constant, 0)
        for part in constants.parts(constant, stored) if stored < size else ():
            expected = stored + len(view_of(part))
            stored = self._upload(joined, constant, stored, part)
            if stored != expected:
                break
        if stored != size:
            raise digest_error(constant)

    def _upload(
        self,
        joined: protocol.JoinReply,
        constant: protocol.TensorSpec,
        first: int,
        part: Bytes = b"",
    ) -> int:
        call = calls.KeepCall(
            joined.island, joined.incarnation, constant.digest, first, part
        )
        return cast(calls.KeepReply, self._ask(call)).bytes

    def outcome(
        self, fragment: int, round: int, *, wait_s: float, has_body: bool = True
    ) -> Outcome | None:
        wait_s = calls.LONG_POLL_S if wait_s else 0.0
        beat = self._beat and self._receipts.with_receipts(self._beat)
        call = calls.OutcomeCall(fragment, round, wait_s, beat, has_body=has_body)
        try:
            reply = self._ask(call)
        except OutcomeLost:
            self._forget(fragment, round)
            raise
        if isinstance(reply, Outcome):
            self.note_receipts(reply)
            self._confirm(reply.agreed.header)
            self._position = reply.position
            return reply
        self._position = cast(protocol.Position | None, reply) or self._position
        self._send_again(fragment, round)
        self._send_wanted()
        return None

    def agree(
        self,
        updates: tuple[Header, ...],
        agreed: Frame | None = None,
        vouchers: tuple[bytes, ...] = (),
    ) -> Outcome | protocol.Reception:
        """Upload a mean that islands have reduced, or ask for its roster first.

        The outcome has no body. A reception instead means that other islands take
        part, or that the round is over: the updates must then be published.
        """
        assert self._request is not None
        island, incarnation = self._request.island, self._request.incarnation
        assert island is not None
        assert incarnation is not None
        call = calls.AgreedCall(island, incarnation, updates, agreed, vouchers)
        reply = cast(Outcome | protocol.Reception, self._ask(call))
        if isinstance(reply, Outcome):
            self.note_receipts(reply)
            self._position = reply.position
        return reply

    def note_receipts(self, outcome: Outcome) -> None:
        """Keep the receipts of an outcome; later calls send them to the run."""
        self._receipts.note_outcome(outcome)

    def vouch(self, agreed: Header) -> bytes:
        """Return this island's voucher for an outcome that another island uploads."""
        return voucher(blake3_digest(self._key), agreed)

    def state(self, fragment: int) -> Frame:
        frame = cast(Frame, self._ask(calls.StateCall(fragment)))
        self._receipts.note_state(frame)
        return frame

    def leave(self, island: str, incarnation: int) -> None:
        self._beat = None
        self._ask(calls.LeaveCall(island, incarnation))

    def _confirm(self, agreed: Header) -> None:
        """Forget the updates whose outcome is known."""
        if not self._is_async:
            self.unconfirmed.pop((agreed.fragment, agreed.round), None)
            return
        assert agreed.roster is not None
        for label, frame in self._standing(agreed.fragment, agreed.round):
            digest = update_digest(frame.header)
            verdict = protocol.verdict_of(agreed.roster, frame.header.island, digest)
            if verdict is not Verdict.LATE:
                self.unconfirmed.pop((agreed.fragment, label), None)

    def _forget(self, fragment: int, round: int) -> None:
        """Forget the updates that a lost round may have listed."""
        for label, _ in self._standing(fragment, round):
            self.unconfirmed.pop((fragment, label), None)

    def _standing(self, fragment: int, round: int) -> list[tuple[int, Frame]]:
        """Return the updates that a round may list, by the rounds of their seals."""
        if not self._is_async:
            frame = self.unconfirmed.get((fragment, round))
            return [] if frame is None else [(round, frame)]
        # Another thread may publish at the same time.
        frames = list(self.unconfirmed.items())
        return sorted(
            (
                (label, frame)
                for (index, label), frame in frames
                if index == fragment and label <= round
            ),
            key=lambda item: item[0],
        )

    def open_data(self, island: str, incarnation: int, data: DataSpec) -> DataSpec:
        """Describe the island's data to the run. Implements `Dealer`."""
        return cast(DataSpec, self._ask(calls.DataCall(island, incarnation, data)))

    def claim(self, ask: Ask) -> Claim:
        """Return rows of the run that now belong to the island."""
        return cast(Claim, self._ask(calls.ClaimCall(ask)))

    def _send_wanted(self) -> None:
        """Upload wanted updates again: the coordinator has restarted and lost them."""
        position = self._position
        assert position is not None
        for fragment in position.wanted:
            self._send_again(fragment, position.rounds[fragment])

    def _send_again(self, fragment: int, round: int) -> None:
        for _, frame in self._standing(fragment, round):
            reception = self._ask(calls.OfferCall(frame.header))
            if reception is protocol.Reception.WANTED:
                self._ask(calls.PublishCall(frame))

    def _beat_if_silent(self) -> None:
        """Send a heartbeat, unless another call has carried one since the last time."""
        has_beaten, self._has_beaten = self._has_beaten, False
        if not has_beaten:
            self._send_beat()

    def _send_beat(self) -> None:
        beat = self._full_beat()
        if beat is None:
            return
        try:
            self._position = cast(
                protocol.Position, self._call(calls.HeartbeatCall(beat))
            )
        except RunMoved as exc:
            if self.moved is not None:
                self.moved(exc)
        except LeaseLost as exc:
            # Raised in the training thread, unless the island has left already.
            self._lost = exc if self._beat is not None else None
        except (CorruptError, RemoteError):
            return  # the next call meets the same error; heartbeats continue

    def _full_beat(self) -> protocol.Heartbeat | None:
        """Return the last heartbeat with statistics and receipts."""
        beat = self._beat
        if beat is None:
            return beat
        beat = self._receipts.with_receipts(beat)
        return beat if self.stats is None else replace(beat, stats=self.stats())

    def _ask(self, call: calls.Call) -> calls.Reply:
        # The table of `atoll.retry` has the retries inside this one.
        ask = partial(self._call, call)
        return retried(ask, COORDINATOR_CALL, sleep=self._line.runtime.sleep)

    def _call(self, call: calls.Call) -> calls.Reply:
        """Call as a member; join again if the run has lost this incarnation."""
        try:
            reply = self._line.call(call)
            if isinstance(call, calls.OutcomeCall | calls.PublishCall):
                self._has_beaten = call.beat is not None
            return reply
        except LeaseLost:
            if self._request is None or isinstance(call, calls.JoinCall):
                raise
            beat = self._full_beat()
            request = replace(self._request, holds=beat.holds if beat else ())
            self._line.call(calls.JoinCall(request, self._key, self._nonce))
            return self._line.call(call)


KEPT_ROUNDS = 16
"""Rounds of one fragment whose receipts are kept. An island holds the last round that
it took, uploads at most two outcomes, and may have fetched a few outcomes ahead."""


class ReceiptCache:
    """The receipts that one incarnation has got from its coordinator. Thread-safe.

    An island repeats them in its heartbeats and in a recovery: a coordinator that has
    lost rounds believes nothing else. They are kept in memory only, because an island
    that starts again fetches the run's state or outcomes, and new receipts with them.
    """

    def __init__(self) -> None:
        self._states: dict[int, dict[int, bytes]] = {}
        self._outcomes: dict[int, dict[int, bytes]] = {}

    def note_state(self, state: Frame) -> None:
        """Keep the receipt of a state that the run has sent."""
        _keep_receipt(self._states, state.header, state.receipt)

    def note_outcome(self, outcome: Outcome) -> None:
        """Keep the receipts of an outcome, and of the state after it."""
        _keep_receipt(self._outcomes, outcome.agreed.header, outcome.agreed.receipt)
        _keep_receipt(self._states, outcome.agreed.header, outcome.receipt)

    def with_receipts(self, beat: protocol.Heartbeat) -> protocol.Heartbeat:
        """Return the beat with the receipt of every holding that has one."""
        if not self._states:
            return beat
        holds = tuple(
            replace(item, receipt=_find_receipt(self._states, fragment, item.round))
            for fragment, item in enumerate(beat.holds)
        )
        return replace(beat, holds=holds)

    def recovery(self, state: Frame, outcomes: Sequence[Header]) -> calls.RecoverCall:
        """Return the call that uploads a lost state, with all outcomes that are proven.

        Outcomes lead to the state without a gap, so those before an outcome without a
        receipt are omitted.
        """
        header = state.header
        proven: list[tuple[Header, bytes]] = []
        for outcome in reversed(outcomes):
            receipt = _find_receipt(self._outcomes, outcome.fragment, outcome.round)
            if not receipt:
                break
            proven.insert(0, (outcome, receipt))
        receipt = _find_receipt(self._states, header.fragment, header.round)
        return calls.RecoverCall(
            header.island,
            header.incarnation,
            replace(state, receipt=receipt),
            tuple(outcome for outcome, _ in proven),
            tuple(receipt for _, receipt in proven),
        )


def _keep_receipt(
    receipts: dict[int, dict[int, bytes]], header: Header, receipt: bytes
) -> None:
    if not receipt:
        return
    # The dictionary is replaced: another thread may read it at the same time.
    rounds = {**receipts.get(header.fragment, {}), header.round: receipt}
    newest = sorted(rounds)[-KEPT_ROUNDS:]
    receipts[header.fragment] = {round: rounds[round] for round in newest}


def _find_receipt(
    receipts: dict[int, dict[int, bytes]], fragment: int, round: int
) -> bytes:
    return receipts.get(fragment, {}).get(round, b"")
