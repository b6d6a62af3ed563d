"""A line to a coordinator over HTTP: one call, one request.

An answer whose connection breaks goes on from its last byte; a request is sent again.
A line remembers the lives that joined over it, and proves with every later call that
it comes from the one whose key that was.
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

SPOILT_TRIES = 3
"""So often a reply that does not verify is asked for again."""


BUSY = (502, 503, 504)
"""Answers that say nothing of a body of which a part has come."""


class HttpLine:
    """Takes calls to the coordinator of one run. Implements `Line`."""

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
        """Of the lives that joined over this line. Lines to one run may share it."""

    def call(self, call: Call) -> Reply:
        ahead, call = apart(call)
        said = self._ask(ahead) if ahead else None
        reply = self._ask(call)
        self.proofs.learn(call, reply)
        return said if reply is None and isinstance(call, OutcomeCall) else reply

    def pause(self, seconds: float) -> None:
        if self._clock.now_s() + seconds >= self._gives_up_at_s:
            raise Unreachable(
                "The coordinator did not answer in the time that was left. "
                "What it had not confirmed may be lost."
            )
        if self._ended.wait(seconds):
            raise Unreachable("The line to the coordinator has been closed.")

    def every(self, seconds: float, act: Callable[[], None]) -> None:
        def again() -> None:
            while not self._ended.wait(seconds):
                act()

        threading.Thread(target=again, name="atoll-heartbeat", daemon=True).start()

    def give_up_after(self, seconds: float) -> None:
        """Let nothing wait for the coordinator for longer than this from now on.

        A call that is under way by then is ended, too: it may be silent for long.
        """
        self._gives_up_at_s = self._clock.now_s() + seconds

        def give_up() -> None:
            if not self._ended.wait(seconds):
                self.close()

        threading.Thread(target=give_up, name="atoll-farewell", daemon=True).start()

    def close(self) -> None:
        """Stop what happens in the background. Safe to repeat."""
        self._ended.set()
        self._caller.close()

    def _ask(self, call: Call) -> Reply:
        for _ in range(SPOILT_TRIES - 1):
            try:
                return self._ask_once(call)
            except CorruptError:
                continue  # a line may spoil a reply: what is asked again is the same
        return self._ask_once(call)

    def _ask_once(self, call: Call) -> Reply:
        sent = to_request(call, run=self._run, proof=self.proofs.of(call))
        fetching = Download(self._into)
        try:
            reply = download(
                lambda: self._send(sent, fetching), fetching, pause=self.pause
            )
        except Refused as exc:  # by the caller itself: another certificate
            raise _another(exc) from exc
        if reply.status in (401, 403):
            raise _another(f"it answers {reply.status}")
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
            raise Unreachable("The coordinator is busy. The rest is asked for again.")
        return reply

    def _into(self, size: int) -> memoryview:
        """Return memory that is resident only as it fills, warm if there is any."""
        return memoryview(self._spare.body(size).data)


def _another(why: object) -> Unreachable:
    """Return what it means that a token or a pin is not right any more.

    They were when this line was made, so another run is at the address. Its own
    coordinator may come back there: the island keeps its work and asks again.
    """
    return Unreachable(
        f"Another run than before is at this address: {why}. "
        "The island waits for its own to come back."
    )
