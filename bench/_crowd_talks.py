"""What a crowd of islands says: to a coordinator, and to the standard library."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
from _crowd import Heard
from _light import WAIT_S, Islands, key_of, name_of
from _served import Served

from atoll.exchange import Frame
from atoll.exchange.api import Identity, Incoming, proof_text, to_request
from atoll.exchange.calls import Call, HeartbeatCall, OutcomeCall, PublishCall
from atoll.protocol import Heartbeat, HeldRound
from atoll.security import Role
from atoll.wire.digests import blake3_digest, view_of

ELEMENTS = 1000
FRAME = b"application/vnd.atoll.frame"


class Calls:
    """What islands say to a coordinator. Implements `Talk`."""

    def __init__(self, served: Served, run: Islands) -> None:
        self._run, self._shown = run, served.shown(Role.ISLAND)
        self._said = f"host: {':'.join(map(str, served.address))}"
        self._proofs: dict[Identity, str] = {}

    def publish(self, number: int, round: int) -> bytes:
        update = self._run.update
        header = replace(
            update.header,
            round=round,
            base=self._run.state.digest,
            island=name_of(number),
        )
        return self._request(
            number, PublishCall(Frame(header, update.body), self._beat(number))
        )

    def ask(self, number: int, round: int) -> bytes:
        beat = self._beat(number, waits_for=(0, round))
        return self._request(number, OutcomeCall(0, round, WAIT_S, beat))

    def is_outcome(self, heard: Heard, round: int) -> bool:
        if FRAME not in heard.head:
            return False
        if self._run.state.round < round:  # one copy of the state is all there is
            agreed = Incoming.of(heard.body).frame()
            self._run.state.apply(agreed.header, agreed.body)
        return True

    def beat(self, number: int) -> bytes:
        """Return a heartbeat."""
        return self._request(number, HeartbeatCall(self._beat(number)))

    def _beat(self, number: int, waits_for: tuple[int, int] | None = None) -> Heartbeat:
        state = self._run.state
        return Heartbeat(
            island=name_of(number),
            incarnation=1,
            step=state.round,
            waits_for=waits_for,
            holds=(HeldRound(state.round, state.digest),),
        )

    def _proof(self, number: int) -> str:
        """Return the proof of an island that joined by `joining`, made once."""
        identity = Identity(name_of(number), 1)
        if identity not in self._proofs:
            key, run = blake3_digest(key_of(number)), self._run.joined[0].run
            self._proofs[identity] = proof_text(identity, key, run=run)
        return self._proofs[identity]

    def _request(self, number: int, call: Call) -> bytes:
        sent = to_request(call, proof=self._proof(number))
        views = [view_of(part) for part in sent.body]
        headers = {**self._shown, **sent.headers}
        size = sum(map(len, views))
        lines = [f"{sent.method} {sent.target} HTTP/1.1", self._said]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += [f"content-length: {size}"] if size else []
        return b"".join([("\r\n".join(lines) + "\r\n\r\n").encode(), *views])


class Plain:
    """What islands say to the standard library. Implements `Talk`."""

    def publish(self, number: int, round: int) -> bytes:
        return put(round)

    def ask(self, number: int, round: int) -> bytes:
        return f"GET /{round} HTTP/1.1\r\nhost: here\r\n\r\n".encode()

    def is_outcome(self, heard: Heard, round: int) -> bool:
        return len(heard.body) == 4 * ELEMENTS


@cache
def put(round: int) -> bytes:
    """Return an upload, made once: all are alike."""
    body = np.ones(ELEMENTS, np.float32).tobytes()
    head = f"PUT /{round} HTTP/1.1\r\nhost: here\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body
