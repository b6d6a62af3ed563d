"""Every exchange passes the contract of all exchanges."""

from __future__ import annotations

import pytest

from atoll import RunSettings
from atoll.coordinator import Service
from atoll.exchange import CoordinatorExchange, Exchange, MemoryRun
from atoll.exchange.calls import Call, Reply
from atoll.simulate import SimDisk
from atoll.testing import EXCHANGE_CLAIMS
from atoll.testing.exchange_contract import (
    Attach,
    Claim,
    a_round_closes_when_every_member_has_published,
)
from atoll.testing.fixtures import WaitingTime, plain_settings

EACH_CLAIM = pytest.mark.parametrize(
    "claim", EXCHANGE_CLAIMS, ids=lambda claim: claim.__name__
)


class Standstill(WaitingTime):
    """No time passes, so no heartbeat is due."""

    def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing can change while one waits in the only thread")


class DirectLine:
    """A line to a coordinator in the same thread. Implements `Line`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.runtime = Standstill()

    def call(self, call: Call) -> Reply:
        return self._service.handle(call, 0.0)


def in_memory(settings: RunSettings) -> Attach:
    run = MemoryRun(settings)

    def attach(*, key: bytes) -> Exchange:
        return run

    return attach


def at_a_coordinator(settings: RunSettings) -> Attach:
    service = Service.create(SimDisk(), settings, run="run", now_s=0.0)
    lives: list[CoordinatorExchange] = []

    def attach(*, key: bytes) -> Exchange:
        nonce = str(len(lives)).encode()
        lives.append(CoordinatorExchange(DirectLine(service), key=key, nonce=nonce))
        return lives[-1]

    return attach


@EACH_CLAIM
def test_a_run_in_memory_is_an_exchange(claim: Claim) -> None:
    """All that islands may rely on holds of a run in memory."""
    claim(in_memory)


@EACH_CLAIM
def test_a_coordinator_is_an_exchange(claim: Claim) -> None:
    """And of one at a coordinator, with its journal."""
    claim(at_a_coordinator)


def test_the_contract_can_fail() -> None:
    """A run that does not wait for its islands is found."""

    def too_soon(settings: RunSettings) -> Attach:
        return in_memory(plain_settings(start_islands=1))

    with pytest.raises(AssertionError):
        a_round_closes_when_every_member_has_published(too_soon)
