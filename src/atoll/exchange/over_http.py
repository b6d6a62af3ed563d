"""A line to a coordinator over HTTP: one call, one request.

A reply whose connection breaks is resumed from its last byte; a request is sent again.
A line keeps a proof of each incarnation that joined over it, and sends the proof with
every later call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from atoll.clock import Clock
from atoll.errors import CorruptError, Refused, Unreachable
from atoll.exchange.api import (
    EncodedRequest,
    Incoming,
    Proofs,
    apart,
    parse_reply,
    to_request,
)
from atoll.exchange.calls import Call, OutcomeCall, Reply
from atoll.http import Download, HttpClient, download
from atoll.http import HttpReply as HttpReply
from atoll.weights import BodyPool
from atoll.wire.digests import view_of

CORRUPT_ATTEMPTS = 3
"""Attempts at a call whose replies do not verify."""

BUSY = (502, 503, 504)
"""Statuses of a busy server, which keep a partly received body valid."""


class HttpLine:
    """Sends calls to the coordinator of one run. Implements `CoordinatorLine`."""

    def __init__(
        self,
        caller: HttpClient,
        *,
        clock: Clock,
        headers: Mapping[str, str],
        run: str | None = None,
    ) -> None:
        self._caller, self._clock, self._run = caller, clock, run
        self._headers = dict(headers)
        self._ended = threading.Event()
        self._spare = BodyPool()
        self._gives_up_at_s = float("inf")
        self.proofs = Proofs()
        """Proofs of incarnations that joined here; lines to one run may share it."""

    def call(self, call: Call) -> Reply:
        heartbeat, call = apart(call)
        position = self._ask(heartbeat) if heartbeat else None
        reply = self._ask(call)
        self.proofs.learn(call, reply)
        return position if reply is None and isinstance(call, OutcomeCall) else reply

    def pause(self, seconds: float) -> None:
        if self._clock.now_s() + seconds >= self._gives_up_at_s:
            raise Unreachable(
                "The coordinator did not answer in the remaining time. "
                "Work that it had not confirmed may be lost."
            )
        if self._ended.wait(seconds):
            raise Unreachable("The line to the coordinator has been closed.")

    def every(self, seconds: float, act: Callable[[], None]) -> None:
        def again() -> None:
            while not self._ended.wait(seconds):
                act()

        threading.Thread(target=again, name="atoll-heartbeat", daemon=True).start()

    def give_up_after(self, seconds: float) -> None:
        """Set a deadline, `seconds` from now, for all waiting for the coordinator.

        The deadline also ends a call in progress, which may receive no byte for long.
        """
        self._gives_up_at_s = self._clock.now_s() + seconds

        def give_up() -> None:
            if not self._ended.wait(seconds):
                self.close()

        threading.Thread(target=give_up, name="atoll-farewell", daemon=True).start()

    def close(self) -> None:
        """Stop the background threads and end all calls. Safe to repeat."""
        self._ended.set()
        self._caller.close()

    def _ask(self, call: Call) -> Reply:
        # The third of five nested retries: see `CoordinatorExchange._ask`.
        for _ in range(CORRUPT_ATTEMPTS - 1):
            try:
                return self._ask_once(call)
            except CorruptError:
                continue  # damaged in transit: the same call has the same reply
        return self._ask_once(call)

    def _ask_once(self, call: Call) -> Reply:
        sent = to_request(call, run=self._run, proof=self.proofs.of(call))
        fetching = Download(self._into)
        try:
            reply = download(
                lambda: self._send(sent, fetching), fetching, pause=self.pause
            )
        except Refused as exc:  # by our HTTP client: the certificate is another one
            raise _other_run(exc) from exc
        if reply.status in (401, 403):
            raise _other_run(f"it answers {reply.status}")
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

    def _into(self, size: int) -> memoryview:
        """Return memory for a body: a reused buffer, else pages that fill on demand."""
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
