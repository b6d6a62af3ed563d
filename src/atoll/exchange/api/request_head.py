"""The head of a request to a coordinator: its values, its headers and its proof.

The head of a request is judged before its body is read; a name that is invalid in a
frame is refused before it is looked up.

Rule 1: `Route.proof` decides for every route whether its requests need a proof of the
        island's identity.
Rule 2: a claim is read from the head, so that it can be judged before the body.
Rule 3: the identity in the body must be the claimed one: `require_claimed`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import unquote

from atoll.errors import Unreachable, UsageError
from atoll.exchange import calls
from atoll.exchange.api.bodies import (
    SEE,
    hexed,
    load,
    require_target_name,
    wrong,
)
from atoll.exchange.api.messages import BEAT
from atoll.fields import U64_MAX, shown
from atoll.protocol import Heartbeat, JoinReply
from atoll.protocol.model import is_digest
from atoll.routes import BodyKind, ProofRule, Route, RouteMatch
from atoll.wire import Header, blake3_digest
from atoll.wire.frame import PROOF_BYTES, RECEIPT_BYTES, island_proof
from atoll.wire.header import MAX_FRAGMENT

PROTOCOL = 2
"""The version of the API; both sides must have the same."""

PROTOCOL_HEADER, RUN_HEADER = "Atoll-Protocol", "Atoll-Run"
BEAT_HEADER = "Atoll-Beat"
MAX_BEAT_BYTES = 16 * 1024
"""Limit of a beat in a header."""

STATE_RECEIPT_HEADER = "Atoll-State-Receipt"
"""The run's receipt for a state, or for the state after an outcome, in hex."""

OUTCOME_RECEIPT_HEADER = "Atoll-Outcome-Receipt"
"""The run's receipt for an outcome; a recovery has one for each, with commas."""

MAX_WAIT_S = 60.0
"""The longest wait of a poll for an outcome."""

_RECEIPT = hexed(RECEIPT_BYTES, RECEIPT_BYTES)
_DECIMAL = re.compile("0|[1-9][0-9]{0,19}")
_SECONDS = re.compile(r"[0-9]{1,2}(\.[0-9]{1,20})?(e-[0-9]{1,3})?")


@dataclass(frozen=True, kw_only=True)
class RequestHead:
    """The parsed head of a request; its properties check names and numbers."""

    route: Route
    path_values: Mapping[str, str]
    query: Mapping[str, str]
    headers: Mapping[str, str]
    """By lower-case name."""

    @property
    def island(self) -> str:
        return require_target_name(self._value("island"), "island")

    @property
    def incarnation(self) -> int:
        return whole_text(self._value("incarnation"), "incarnation")

    @property
    def fragment(self) -> int:
        return whole_text(self._value("fragment"), "fragment", high=MAX_FRAGMENT)

    @property
    def round(self) -> int:
        return whole_text(self._value("round"), "round")

    @property
    def digest(self) -> str:
        digest = self._value("digest")
        if not is_digest(digest):
            raise wrong("digest", digest, "64 hex digits in lower case")
        return digest

    @property
    def first(self) -> int:
        return whole_text(self._value("first"), "first")

    @property
    def wait_s(self) -> float:
        return seconds_text(self.query.get("wait_s", "0"), "wait_s")

    @property
    def has_body(self) -> bool:
        """Whether the reply is to have its body; the default."""
        return whole_text(self.query.get("body", "1"), "body", high=1) == 1

    @cached_property
    def beat(self) -> Heartbeat | None:
        """The heartbeat in a header of the request."""
        text = self.headers.get(BEAT_HEADER.lower())
        if text is None:
            return None
        data = text.encode(errors="replace")
        return BEAT.read(load(data, name=BEAT_HEADER, max_bytes=MAX_BEAT_BYTES), "beat")

    @cached_property
    def claim(self) -> IdentityClaim | None:
        """The identity that the request claims; None if it only reads.

        Every other identity in the head must be the same.
        """
        island, proof = None, self.route.proof
        if proof is ProofRule.ALWAYS:
            island = self.island
        elif proof is ProofRule.WITH_BEAT and self.beat is not None:
            island = self.beat.island
        if island is None:
            return None
        claim = read_claim(island, self.headers.get(PROOF_HEADER.lower()))
        if "incarnation" in self.route.query:
            require_claimed(claim, Identity(island, self.incarnation))
        return claim

    def _value(self, key: str) -> str:
        text = self.path_values.get(key, self.query.get(key))
        if text is None:
            raise UsageError(f"The query must have {key!r}. {SEE}")
        return text


def read_head(
    match: RouteMatch, query: Mapping[str, str], headers: Mapping[str, str]
) -> RequestHead:
    """Return the checked head of a request.

    Raises:
        UsageError: the query, the protocol or the content type is wrong.
    """
    route = match.route
    for key in query.keys() - route.query:
        raise UsageError(f"{shown(key)} is unknown in this query. {SEE}")
    if route.is_call:
        _require_protocol(headers)
        _require_type(route, headers)
    return RequestHead(
        route=route, path_values=match.values, query=query, headers=headers
    )


def whole_text(text: str, path: str, *, high: int = U64_MAX) -> int:
    """Return a whole number; each number has one valid spelling."""
    if not _DECIMAL.fullmatch(text) or int(text) > high:
        raise wrong(path, text, f"a whole number from 0 to {high}, in decimal")
    return int(text)


def seconds_text(text: str, path: str) -> float:
    """Return the number of seconds that a poll may wait."""
    if not _SECONDS.fullmatch(text) or float(text) > MAX_WAIT_S:
        raise wrong(path, text, f"a number of seconds from 0 to {MAX_WAIT_S}")
    return float(text)


def read_receipt(headers: Mapping[str, str], name: str) -> bytes:
    """Return the receipt in a header, by lower-case name; empty: there is none.

    Raises:
        UsageError: the header holds something else.
    """
    text = headers.get(name.lower())
    return b"" if text is None else _RECEIPT.read(text, name)


def read_receipts(
    headers: Mapping[str, str], name: str, *, max_receipts: int
) -> list[bytes]:
    """Return the receipts of a header, in order.

    Raises:
        UsageError: the header holds something else, or more than `max_receipts`.
    """
    text = headers.get(name.lower())
    entries = text.split(",", max_receipts) if text else []
    if len(entries) > max_receipts:
        raise wrong(name, text, f"at most {max_receipts} receipts")
    return [_RECEIPT.read(entry.strip(), name) for entry in entries]


def _require_protocol(headers: Mapping[str, str]) -> None:
    protocol = headers.get(PROTOCOL_HEADER.lower(), "")
    if protocol != str(PROTOCOL):
        raise UsageError(
            f"The caller speaks protocol {shown(protocol)}, and this coordinator "
            f"{PROTOCOL}. Run the same version of Atoll on both sides."
        )


def _require_type(route: Route, headers: Mapping[str, str]) -> None:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if route.body is not BodyKind.EMPTY and kind != route.body.value:
        raise UsageError(
            f"Content-Type {shown(kind)} must be {route.body.value!r} here. {SEE}"
        )


def require_run(headers: Mapping[str, str], run: str) -> None:
    """Return if a call is meant for this run, or names none.

    Raises:
        Unreachable: another run was meant. Its coordinator may come back at this
            address, so the island keeps its work and asks again.
    """
    name = headers.get(RUN_HEADER.lower())
    if name is not None and unquote(name) != run:
        raise Unreachable(
            f"This call is for run {shown(unquote(name))}, and this coordinator has "
            f"run {run!r}. Check the address, or wait for that run's coordinator."
        )


PROOF_HEADER = "Atoll-Island-Proof"
_FORM = re.compile(f"(0|[1-9][0-9]{{0,19}}) ([0-9a-f]{{{2 * PROOF_BYTES}}})")


@dataclass(frozen=True)
class Identity:
    """One incarnation of one island."""

    island: str
    incarnation: int


@dataclass(frozen=True)
class IdentityClaim:
    """An identity that a request claims, with its proof."""

    identity: Identity
    proof: bytes


def identities_of(call: calls.Call) -> tuple[Identity, ...]:
    """Return every identity that a call names as its own; none for a read."""
    match call:
        case calls.HeartbeatCall(beat):
            return (identity_of(beat),)
        case calls.OfferCall(header):
            return (identity_of(header),)
        case calls.PublishCall(frame, beat):
            return (identity_of(frame.header), *([identity_of(beat)] if beat else []))
        case calls.OutcomeCall(beat=Heartbeat() as beat):
            return (identity_of(beat),)
        case (
            calls.AgreedCall()
            | calls.FoundCall()
            | calls.KeepCall()
            | calls.RecoverCall()
            | calls.DataCall()
            | calls.ClaimCall()
            | calls.LeaveCall()
        ):
            return (Identity(call.island, call.incarnation),)
        case _:
            return ()


def proof_text(identity: Identity, key: bytes, *, run: str) -> str:
    """Return the header's value for the island whose key has this digest."""
    island, incarnation = identity.island, identity.incarnation
    proof = island_proof(key, run=run, island=island, incarnation=incarnation)
    return f"{incarnation} {proof.hex()}"


class Proofs:
    """The proofs of the incarnations that have joined over one connection."""

    def __init__(self) -> None:
        self._proofs: dict[Identity, str] = {}

    def learn(self, call: calls.Call, reply: calls.Reply) -> None:
        """Store the proof of an incarnation that joins, for its later calls."""
        if isinstance(call, calls.JoinCall) and isinstance(reply, JoinReply):
            identity = Identity(reply.island, reply.incarnation)
            key = blake3_digest(call.key)
            self._proofs[identity] = proof_text(identity, key, run=reply.run)

    def of(self, call: calls.Call) -> str | None:
        """Return the proof that a call needs; None for a read or unknown identity."""
        for identity in identities_of(call):
            return self._proofs.get(identity)
        return None


def read_claim(island: str, text: str | None) -> IdentityClaim:
    """Return the claim of a request to an island's identity.

    Raises:
        UsageError: the header is missing or malformed; the proof is never shown.
    """
    match = _FORM.fullmatch(text or "")
    if not match or int(match[1]) > U64_MAX:
        fault = "is missing" if text is None else "is malformed"
        raise UsageError(
            f"The header {PROOF_HEADER} {fault}, and this call needs the proof of "
            f"island {shown(island)}. Send its incarnation, a blank, and the proof "
            f"of its key as {2 * PROOF_BYTES} hex digits. {SEE}"
        )
    return IdentityClaim(Identity(island, int(match[1])), bytes.fromhex(match[2]))


def require_claimed(claim: IdentityClaim | None, *named: Identity) -> None:
    """Return if a request names no other identity than the one it claims.

    Raises:
        UsageError: it names another island, or another incarnation.
    """
    for identity in named:
        if claim is None or identity != claim.identity:
            name = f"incarnation {identity.incarnation} of {shown(identity.island)}"
            raise UsageError(
                f"This call names {name}, and its {PROOF_HEADER} is for another. "
                f"An island speaks only for itself. {SEE}"
            )


def identity_of(named: Heartbeat | Header) -> Identity:
    """Return the identity in a beat, or in the header of an update."""
    return Identity(named.island, named.incarnation)
