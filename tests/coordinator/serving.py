"""A coordinator on loopback for tests, those who call it, and a picture of its run."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from atoll.coordinator.app import Coordinator, ListenOptions
from atoll.coordinator.move import JOURNAL
from atoll.data import Ask, Claim, DataSpec
from atoll.exchange import CoordinatorExchange, Frame, Outcome
from atoll.exchange.api import PROTOCOL, Identity, identities_of, proof_text, to_request
from atoll.exchange.calls import Call
from atoll.exchange.over_http import HttpTransport
from atoll.http import HttpClient, ListenerLimits
from atoll.protocol import Heartbeat, JoinReply, JoinRequest, Phase, Position, Reception
from atoll.runtime import Clock
from atoll.security import Role, authorization, calling_context, read_token, token_file
from atoll.settings import RunSettings
from atoll.testing.dealer_contract import DealingExchange
from atoll.wire.digests import blake3_digest, view_of
from tests.http.loopback import PATIENCE_S, Dialogue, Heard, head

VOLATILE = {
    *("now_unix_s", "bytes_in", "bytes_out", "connections", "free_bytes"),
    *("lease_s", "seen_s", "since_s", "late_in_s"),
    *("as_of_unix_s", "deaths", "marks", "findings", "opened_unix_s", "closes_unix_s"),
    *("process", "starts", "created_unix_s", "past_from_unix_s", "tokens_per_s"),
    *("utilisation", "stall_share_mean", "usual_round_s", "last_commit_unix_s"),
}
"""What a status says of the time, the traffic and the past, and not of the run."""


class Served(Protocol):
    """A coordinator that can be called, in this process or in another."""

    @property
    def url(self) -> str: ...

    @property
    def directory(self) -> Path: ...

    @property
    def run(self) -> str: ...


@contextmanager
def serving(
    directory: Path,
    settings: RunSettings | None,
    *,
    has_tls: bool = False,
    port: int = 0,
    clock: Clock | None = None,
    **limits: Any,
) -> Iterator[Coordinator]:
    """Serve the run of a directory on a port of loopback, a free one if it is 0."""
    directory.mkdir(mode=0o700, exist_ok=True)
    coordinator = Coordinator(
        directory,
        settings,
        listening=ListenOptions(has_tls=has_tls, port=port),
        clock=clock,
        limits=ListenerLimits(**limits) if limits else None,
    )
    coordinator.start()
    try:
        yield coordinator
    finally:
        coordinator.close(grace_s=0.2)


def bearer(directory: Path, role: Role = Role.ISLAND) -> str:
    """Return the header that shows a role to the run of a directory."""
    return authorization(read_token(token_file(directory, role)))


def address_of(url: str) -> tuple[str, int]:
    """Return the host and the port of a coordinator's address."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


@contextmanager
def line_to(
    coordinator: Coordinator, address: tuple[str, int] | None = None
) -> Iterator[HttpTransport]:
    """Return an island's line to a coordinator, or to what stands in front of it."""
    tls = calling_context(coordinator.pin) if coordinator.pin else None
    caller = HttpClient(
        *(address or address_of(coordinator.url)),
        timeout_s=PATIENCE_S,
        connect_timeout_s=PATIENCE_S,
        tls=tls,
        pin=coordinator.pin,
    )
    headers = {"Authorization": bearer(coordinator.directory)}
    line = HttpTransport(caller, headers=headers, run=coordinator.run)
    try:
        yield line
    finally:
        line.close()


class Calm:
    """An `Exchange` that returns when no round is being committed any more.

    The claims of all exchanges look at a run at once; a coordinator reduces a round
    behind the backs of those who ask.
    """

    def __init__(self, inner: DealingExchange, settle: Callable[[], None]) -> None:
        self._inner, self._settle = inner, settle

    def join(self, request: JoinRequest) -> JoinReply:
        return self._inner.join(request)

    def heartbeat(self, beat: Heartbeat, *, at_once: bool = False) -> Position:
        return self._inner.heartbeat(beat, at_once=at_once)

    def publish(self, frame: Frame) -> Reception:
        reception = self._inner.publish(frame)
        self._settle()
        return reception

    def outcome(
        self, fragment: int, round: int, *, wait_s: float, has_body: bool = True
    ) -> Outcome | None:
        return self._inner.outcome(fragment, round, wait_s=wait_s, has_body=has_body)

    def state(self, fragment: int) -> Frame:
        return self._inner.state(fragment)

    def open_data(self, island: str, incarnation: int, data: DataSpec) -> DataSpec:
        return self._inner.open_data(island, incarnation, data)

    def claim(self, ask: Ask) -> Claim:
        return self._inner.claim(ask)

    def leave(self, island: str, incarnation: int) -> None:
        self._inner.leave(island, incarnation)
        self._settle()


class Islands:
    """Attaches islands to one coordinator, each with a line of its own."""

    def __init__(self, coordinator: Coordinator, stack: ExitStack) -> None:
        self._coordinator, self._stack = coordinator, stack
        self._changed = threading.Condition()
        self._lives = 0
        coordinator.events.subscribe(self._tell, name="islands")

    def __call__(self, *, key: bytes) -> Calm:
        line = self._stack.enter_context(line_to(self._coordinator))
        self._lives += 1
        nonce = str(self._lives).encode()
        return Calm(CoordinatorExchange(line, key=key, nonce=nonce), self.settle)

    def settle(self) -> None:
        """Return when nothing is being committed."""
        with self._changed:
            assert self._changed.wait_for(self._is_calm, PATIENCE_S)

    def _is_calm(self) -> bool:
        state, _ = self._coordinator._threaded_service.look()
        return all(round.phase is not Phase.CLOSING for round in state.rounds)

    def _tell(self, event: object) -> None:
        with self._changed:
            self._changed.notify_all()


def asking(
    coordinator: Served,
    line: str,
    body: bytes = b"",
    *,
    role: Role | None = Role.ISLAND,
    **headers: Any,
) -> Heard:
    """Ask by hand, on a connection of its own; underscores stand for hyphens."""
    with Dialogue(address_of(coordinator.url)) as dialogue:
        dialogue.say(request(coordinator, line, body, role=role, **headers) + body)
        return dialogue.hear()


def request(
    coordinator: Served,
    line: str,
    body: bytes = b"",
    *,
    role: Role | None = Role.ISLAND,
    **headers: Any,
) -> bytes:
    """Return the head of a request that lacks nothing, but for what is given.

    It speaks for the first life of the island that its target names, if it names one,
    and an island's key is its name. A header that is None is not sent.
    """
    given = {name.replace("_", "-").lower(): value for name, value in headers.items()}
    said = {"atoll-protocol": str(PROTOCOL), "content-type": "application/json"}
    if "atoll-island-proof" not in given:
        given["atoll-island-proof"] = _first_life_proof(coordinator, line)
    if role is not None:
        said["authorization"] = bearer(coordinator.directory, role)
    said["content-length"] = str(len(body))
    sent = {name: value for name, value in (said | given).items() if value is not None}
    return head(line, **sent)


def _first_life_proof(coordinator: Served, line: str) -> str | None:
    named = re.search(r"/(?:updates|offers|islands)/(\w+)|island=(\w+)", line)
    if named is None:
        return None
    identity = Identity(named[1] or named[2], 1)
    key = blake3_digest(identity.island.encode())
    return proof_text(identity, key, run=coordinator.run)


def calling(
    coordinator: Served,
    call: Call,
    *,
    run: str | None = None,
    body: bytes | None = None,
    key: bytes | None = None,
    **headers: Any,
) -> Heard:
    """Ask what an island asks, with another body or other headers.

    An island's key is its name, unless one is given.
    """
    sent = to_request(call, run=run, proof=proof_of(call, coordinator.run, key=key))
    data = b"".join(view_of(part).tobytes() for part in sent.body)
    return asking(
        coordinator,
        f"{sent.method} {sent.target}",
        data if body is None else body,
        **{**sent.headers, **headers},
    )


def proof_of(call: Call, run: str, *, key: bytes | None = None) -> str | None:
    """Return the proof of the island that a call speaks for; None if it only reads."""
    for identity in identities_of(call):
        shown = identity.island.encode() if key is None else key
        return proof_text(identity, blake3_digest(shown), run=run)
    return None


def picture(coordinator: Coordinator) -> dict[str, Any]:
    """Return all that a bad request must leave as it is."""
    state, _ = coordinator._threaded_service.look()
    return {
        "members": {
            name: (each.incarnation, each.slot, each.key, each.nonce, each.has_left)
            for name, each in state.members.known.items()
        },
        "rounds": [
            (each.number, each.phase, each.base, dict(each.staged), dict(each.ahead))
            for each in state.rounds
        ],
        "run": (state.epoch, state.is_paused, state.last_round, state.settings),
        "model": state.model,
        "counted": state.counted,
        "status": _steady(coordinator.status()),
        "journal": journal_digest(coordinator.directory),
    }


def journal_digest(directory: Path) -> str:
    """Return the digest of every byte that a run has on its disk.

    Where its log ends is left out: that is written a moment after the log itself.
    """
    digest = hashlib.sha256()
    for path in sorted((directory / JOURNAL).rglob("*")):
        if path.is_file() and path.suffix != ".end":
            digest.update(str(path.relative_to(directory)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _steady(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _steady(each) for key, each in value.items() if key not in VOLATILE
        }
    return [_steady(each) for each in value] if isinstance(value, list) else value
