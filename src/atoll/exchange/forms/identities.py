"""The island that a call speaks for, and its proof in the header of a request.

Rule 1: `Route.proof` says for every route whether its requests need a proof.
Rule 2: a claim is read from the head, so that it can be judged before the body.
Rule 3: what the body names must be what was claimed: `require_claimed`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from atoll.errors import UsageError
from atoll.exchange.calls import (
    AgreedCall,
    Call,
    FoundCall,
    HeartbeatCall,
    JoinCall,
    KeepCall,
    LeaveCall,
    OfferCall,
    OutcomeCall,
    PublishCall,
    RecoverCall,
    Reply,
)
from atoll.exchange.forms.fields import U64_MAX
from atoll.exchange.forms.text import SEE
from atoll.protocol import Beat, JoinReply
from atoll.settings.rules import shown
from atoll.wire import Header, blake3_digest
from atoll.wire.proof import PROOF_BYTES, island_proof

PROOF_HEADER = "Atoll-Island-Proof"
_FORM = re.compile(f"(0|[1-9][0-9]{{0,19}}) ([0-9a-f]{{{2 * PROOF_BYTES}}})")


@dataclass(frozen=True)
class Identity:
    """One life of one island."""

    island: str
    incarnation: int


@dataclass(frozen=True)
class Claim:
    """An identity that a request claims, with the proof that it shows."""

    identity: Identity
    proof: bytes


def identities_of(call: Call) -> tuple[Identity, ...]:
    """Return every identity that a call names as its own; none for a read."""
    match call:
        case HeartbeatCall(beat):
            return (identity_of(beat),)
        case OfferCall(header):
            return (identity_of(header),)
        case PublishCall(frame, beat):
            return (identity_of(frame.header), *([identity_of(beat)] if beat else []))
        case OutcomeCall(beat=Beat() as beat):
            return (identity_of(beat),)
        case AgreedCall() | FoundCall() | KeepCall() | RecoverCall() | LeaveCall():
            return (Identity(call.island, call.incarnation),)
        case _:
            return ()


def proof_text(identity: Identity, key: bytes, *, run: str) -> str:
    """Return the header's value for the island whose key has this digest."""
    island, incarnation = identity.island, identity.incarnation
    proof = island_proof(key, run=run, island=island, incarnation=incarnation)
    return f"{incarnation} {proof.hex()}"


class Proofs:
    """The proofs of the lives that have joined over one line."""

    def __init__(self) -> None:
        self._known: dict[Identity, str] = {}

    def learn(self, call: Call, reply: Reply) -> None:
        """Keep the proof of a life that joins, for its later calls."""
        if isinstance(call, JoinCall) and isinstance(reply, JoinReply):
            identity = Identity(reply.island, reply.incarnation)
            key = blake3_digest(call.key)
            self._known[identity] = proof_text(identity, key, run=reply.run)

    def of(self, call: Call) -> str | None:
        """Return the proof that a call needs; None for a read, or an unknown life."""
        for identity in identities_of(call):
            return self._known.get(identity)
        return None


def read_claim(island: str, text: str | None) -> Claim:
    """Return the claim to speak for an island.

    Raises:
        UsageError: the header is missing or malformed; the proof is never shown.
    """
    found = _FORM.fullmatch(text or "")
    if not found or int(found[1]) > U64_MAX:
        fault = "is missing" if text is None else "is malformed"
        raise UsageError(
            f"The header {PROOF_HEADER} {fault}, and this call speaks for island "
            f"{shown(island)}. Send its incarnation, a blank, and the proof of its key "
            f"as {2 * PROOF_BYTES} hex digits. {SEE}"
        )
    return Claim(Identity(island, int(found[1])), bytes.fromhex(found[2]))


def require_claimed(claim: Claim | None, *named: Identity) -> None:
    """Return when a request names no other identity than the one it claims.

    Raises:
        UsageError: it speaks for another island, or another life.
    """
    for identity in named:
        if claim is None or identity != claim.identity:
            said = f"incarnation {identity.incarnation} of {shown(identity.island)}"
            raise UsageError(
                f"This call names {said}, and its {PROOF_HEADER} is for another. "
                f"An island speaks only for itself. {SEE}"
            )


def identity_of(named: Beat | Header) -> Identity:
    """Return the life that a beat, or the header of an update, is of."""
    return Identity(named.island, named.incarnation)
