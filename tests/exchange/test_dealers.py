"""Every exchange that deals out rows passes the contract of all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from atoll import RunSettings
from atoll.coordinator import Service
from atoll.exchange import CoordinatorExchange, MemoryRun
from atoll.simulate import SimDisk
from atoll.store import MemoryStore
from atoll.testing import DEALER_CLAIMS
from atoll.testing.dealer_contract import (
    AttachDealer,
    DealingExchange,
    OpenDealingRun,
    a_row_counts_once,
)
from atoll.testing.fixtures import StoreRun, plain_settings
from tests.exchange.test_contract import DirectLine

EACH_CLAIM = pytest.mark.parametrize(
    "claim", DEALER_CLAIMS, ids=lambda claim: claim.__name__
)


def in_memory(settings: RunSettings) -> AttachDealer:
    run = MemoryRun(settings)

    def attach(*, key: bytes) -> DealingExchange:
        return run

    return attach


def at_a_coordinator(settings: RunSettings) -> AttachDealer:
    service = Service.create(SimDisk(), settings, run="run", now_s=0.0)
    lives: list[CoordinatorExchange] = []

    def attach(*, key: bytes) -> DealingExchange:
        nonce = str(len(lives)).encode()
        lives.append(CoordinatorExchange(DirectLine(service), key=key, nonce=nonce))
        return lives[-1]

    return attach


@EACH_CLAIM
def test_a_run_in_memory_is_a_dealer(claim: Callable[[OpenDealingRun], None]) -> None:
    """All that islands may rely on holds of a run in memory."""
    claim(in_memory)


@EACH_CLAIM
def test_a_coordinator_is_a_dealer(claim: Callable[[OpenDealingRun], None]) -> None:
    """And of one at a coordinator, with its journal."""
    claim(at_a_coordinator)


@EACH_CLAIM
def test_a_run_in_a_bucket_is_a_dealer(claim: Callable[[OpenDealingRun], None]) -> None:
    """And of one without an owner, whose islands decide by the log of claims."""
    claim(lambda settings: StoreRun(MemoryStore(), settings))


def test_the_contract_can_fail() -> None:
    """A run that cuts its data has no claims, which the contract finds."""

    def without_rows(settings: RunSettings) -> AttachDealer:
        return in_memory(plain_settings())

    with pytest.raises(Exception, match="does not deal out rows"):
        a_row_counts_once(without_rows)
