"""A line to a coordinator over HTTP: one call, one request.

A reply whose connection breaks is resumed from its last byte; a request is sent again.
A line keeps a proof of each incarnation that joined over it, and sends the proof with
every later call.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from atoll.errors import Refused, Unreachable
from atoll.exchange.api import (
    EncodedRequest,
    Incoming,
    Proofs,
    apart,
    parse_reply,
    to_request,
)
from atoll.exchange.calls import Call, HeartbeatCall, OutcomeCall, Reply
from atoll.http import BUSY, Download, HttpClient, download
from atoll.http import HttpReply as HttpReply
from atoll.retry import DAMAGED_REPLY, retried
from atoll.runtime import Clock, SystemRuntime
from atoll.weights import BodyPool
from atoll.wire.digests import view_of

if TYPE_CHECKING:  # loading the adapters of stores takes time
    from atoll.store.client import TransferMeter


class HttpTransport:
    """Sends calls to the coordinator of one run. Implements `CoordinatorTransport`."""

    def __init__(
        self,
        caller: HttpClient,
        *,
        runtime: SystemRuntime | None = None,
        headers: Mapping[str, str],
        run: str | None = None,
        meter: TransferMeter | None = None,
    ) -> None:
        self._caller, self._run = caller, run
        self.runtime = runtime or SystemRuntime()
        self._headers = dict(headers)
        self._spare = BodyPool()
        self._meter = meter

        self.proofs = Proofs()
        """Proofs of incarnations that joined here; lines to one run may share it."""

    def call(self, call: Call) -> Reply:
        heartbeat, call = apart(call)
        position = self._ask(heartbeat) if heartbeat else None
        reply = self._ask(call)
        self.proofs.learn(call, reply)
        return position if reply is None and isinstance(call, OutcomeCall) else reply

    def close_after(self, seconds: float) -> None:
        """Close this `seconds` from now, and wait for no longer until then."""
        self.runtime.close_after(seconds, then=self._caller.close)

    def close(self) -> None:
        """Stop the background threads and end all calls. Safe to repeat."""
        self.runtime.close()
        self._caller.close()

    def _ask(self, call: Call) -> Reply:
        ask = partial(self._ask_once, call)
        return retried(ask, DAMAGED_REPLY, sleep=self.runtime.sleep)

    def _ask_once(self, call: Call) -> Reply:
        sent = to_request(call, run=self._run, proof=self.proofs.of(call))
        arrival = _Arrival(self.runtime, self._spare)
        fetching, since_s = Download(arrival.buffer), self.runtime.now_s()
        try:
            reply = download(
                lambda: self._send(sent, fetching), fetching, sleep=self.runtime.sleep
            )
        except Refused as exc:  # by our HTTP client: the certificate is another one
            raise _other_run(exc) from exc
        if reply.status in (401, 403):
            raise _other_run(f"it answers {reply.status}")
        if self._meter is not None:
            self._meter.sent(sum(len(view_of(part)) for part in sent.body), since_s)
            self._meter.received(len(reply.body), arrival.since_s)
            if isinstance(call, HeartbeatCall):
                self._meter.answered(since_s)
        return parse_reply(call, reply.status, reply.headers, Incoming.of(reply.body))

    def _send(self, sent: EncodedRequest, fetching: Download) -> HttpReply:
        reply = self._caller.call(
            sent.method,
            sent.target,
            headers={**self._headers, **sent.headers},
            body=[view_of(part) for part in sent.body],
            fetching=fetching,
            is_repeatable=True,
        )
        if reply.status in BUSY and fetching.can_resume:
            raise Unreachable("The coordinator is busy. The rest is requested again.")
        return reply


class _Arrival:
    """The time at which the body of a reply begins."""

    def __init__(self, clock: Clock, spare: BodyPool) -> None:
        self._clock, self._spare = clock, spare
        self.since_s = clock.now_s()

    def buffer(self, size: int) -> memoryview:
        """Return memory for a body: a reused buffer, else pages that fill on demand."""
        self.since_s = self._clock.now_s()
        return memoryview(self._spare.body(size).data)


def _other_run(reason: object) -> Unreachable:
    """Return the error for a token or a pin that is no longer valid.

    They were valid when this line was opened, so another run is at the address. The
    run's coordinator may come back there: the island keeps its work and asks again.
    """
    return Unreachable(
        f"Another run than before is at this address: {reason}. "
        "The island waits for its own run to come back."
    )
