"""A coordinator behind the HTTP API passes the contract, without a socket."""

from __future__ import annotations

import pytest

from atoll import RunSettings
from atoll.coordinator import Service
from atoll.errors import AtollError, RunEnded
from atoll.exchange import CoordinatorExchange, Exchange
from atoll.exchange.api import (
    EncodedReply,
    EncodedRequest,
    Incoming,
    Proofs,
    error_parts,
    parse_call,
    reply_parts,
    to_request,
)
from atoll.exchange.calls import Call, Reply
from atoll.simulate import SimDisk
from atoll.testing import EXCHANGE_CLAIMS
from atoll.testing.exchange_contract import Attach, Claim
from tests.exchange.api_samples import answered, as_received, body_bytes, head_of
from tests.exchange.test_contract import Standstill


class FormsLine:
    """A line on which everything is bytes for a moment. Implements `Line`."""

    def __init__(self, service: Service) -> None:
        self._service, self._proofs = service, Proofs()
        self.runtime = Standstill()

    def call(self, call: Call) -> Reply:
        sent = to_request(call, run="run", proof=self._proofs.of(call))
        reply = answered(call, self._answer(sent))
        self._proofs.learn(call, reply)
        return reply

    def _answer(self, sent: EncodedRequest) -> EncodedReply:
        try:
            head = head_of(sent.method, sent.target, as_received(sent.headers))
            call = parse_call(head, Incoming.of(body_bytes(sent)))
            return reply_parts(self._service.handle(call, 0.0))
        except (AtollError, RunEnded) as exc:
            return error_parts(exc)


def behind_forms(settings: RunSettings) -> Attach:
    service = Service.create(SimDisk(), settings, run="run", now_s=0.0)
    lives: list[CoordinatorExchange] = []

    def attach(*, key: bytes) -> Exchange:
        nonce = str(len(lives)).encode()
        lives.append(CoordinatorExchange(FormsLine(service), key=key, nonce=nonce))
        return lives[-1]

    return attach


@pytest.mark.parametrize("claim", EXCHANGE_CLAIMS, ids=lambda claim: claim.__name__)
def test_a_coordinator_behind_forms_is_an_exchange(claim: Claim) -> None:
    """All that islands may rely on survives being written and read."""
    claim(behind_forms)
