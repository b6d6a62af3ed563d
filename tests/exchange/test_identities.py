"""An island's calls carry a proof of its key, and name no other island."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.data import Ask, DataSpec
from atoll.errors import UsageError
from atoll.exchange.api import (
    Incoming,
    RequestHead,
    identities_of,
    parse_call,
    proof_text,
    to_request,
)
from atoll.exchange.calls import (
    AgreedCall,
    Call,
    ClaimCall,
    DataCall,
    FoundCall,
    HeartbeatCall,
    KeepCall,
    LeaveCall,
    OfferCall,
    OutcomeCall,
    PublishCall,
    RecoverCall,
    StateCall,
)
from atoll.routes import ROUTES, ProofRule
from atoll.wire import blake3_digest
from atoll.wire.frame import PROOF_BYTES, island_proof
from tests.exchange.api_samples import (
    BEAT,
    JOIN,
    QUESTION,
    as_received,
    body_bytes,
    frame_of,
    head_of,
    proof_of,
)
from tests.wire.samples import a_state, an_update, sealed


def head_with(call: Call, proof: str | None) -> RequestHead:
    """Return the head of a call with another proof, or none."""
    sent = to_request(call, proof=proof)
    return head_of(sent.method, sent.target, as_received(sent.headers))


OWN = (
    HeartbeatCall(BEAT),
    LeaveCall("tokyo-1", 3),
    OfferCall(sealed(an_update())),
    PublishCall(frame_of(an_update())),
    AgreedCall("tokyo-1", 3, (sealed(an_update()),)),
    QUESTION,
    FoundCall("tokyo-1", 3, (frame_of(a_state()),)),
    KeepCall("tokyo-1", 3, "0" * 64, 0, b"part"),
    RecoverCall("tokyo-1", 3, frame_of(a_state()), ()),
    DataCall("tokyo-1", 3, DataSpec(rows=100)),
    ClaimCall(Ask(island="tokyo-1", incarnation=3, number=1)),
)
"""Everything that an island says of itself."""


def test_every_route_says_whether_it_needs_a_proof() -> None:
    """All routes but reads and joinings do, and a call is sent for each of those."""
    routes = [each for each in ROUTES if each.is_call]
    reads = {each.name for each in routes if each.proof is ProofRule.NEVER}
    others = {head_with(call, proof_of(call)).route.name for call in OWN}

    assert reads == {*("join", "join_unnamed", "state", "constants", "constant")}
    assert others == {each.name for each in routes} - reads
    for call in (JOIN, StateCall(0), OutcomeCall(2, 7)):
        assert head_with(call, None).claim is None


@pytest.mark.parametrize("call", OWN, ids=lambda call: type(call).__name__)
@pytest.mark.parametrize("proof", [None, "", "3", "x" * 64, "3 " + "A" * 64, "03 "])
def test_a_call_of_an_island_needs_a_proof(call: Call, proof: str | None) -> None:
    """Without a well-formed one nothing else is read, and what came is not shown."""
    with pytest.raises(UsageError, match="Atoll-Island-Proof is m") as caught:
        _ = head_with(call, proof).claim

    assert not proof or proof not in str(caught.value)


@pytest.mark.parametrize("call", OWN, ids=lambda call: type(call).__name__)
def test_what_a_call_names_is_what_it_has_proven(call: Call) -> None:
    """A proof of one life does not carry a body, a query or a beat of another."""
    (identity, *_) = identities_of(call)
    other = replace(identity, incarnation=identity.incarnation + 1)
    key = blake3_digest(b"key")
    head = head_with(call, proof_text(other, key, run="lagoon"))
    sent = to_request(call)

    with pytest.raises(UsageError, match="An island speaks only for itself"):
        parse_call(head, Incoming.of(body_bytes(sent)))


def test_a_proof_is_for_one_life_of_one_island_in_one_run() -> None:
    """Another run, name, life or key has another proof, however names are cut."""
    shown = {"key": bytes(32), "run": "ab", "island": "c", "incarnation": 1}
    others = (
        *({"key": b"1" * 32}, {"run": "a", "island": "bc"}, {"run": "abc"}),
        *({"island": "d"}, {"incarnation": 2}, {"incarnation": 256}),
    )
    proofs = {island_proof(**(shown | each)) for each in ({}, *others)}  # type: ignore[arg-type]

    assert len(proofs) == 1 + len(others)
    assert all(len(proof) == PROOF_BYTES for proof in proofs)
