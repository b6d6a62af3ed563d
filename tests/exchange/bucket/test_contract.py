"""A run in a bucket is an exchange like the others, whichever store it is in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.store import FileStore, MemoryStore
from atoll.testing import DEALER_CLAIMS, EXCHANGE_CLAIMS
from atoll.testing.dealer_contract import OpenDealingRun
from atoll.testing.exchange_contract import Claim
from atoll.testing.fixtures import StoreRun
from tests.store.buckets import Settings, azure_store, s3_store

every_claim = pytest.mark.parametrize(
    "claim", EXCHANGE_CLAIMS, ids=lambda claim: claim.__name__
)

every_dealer_claim = pytest.mark.parametrize(
    "claim", DEALER_CLAIMS, ids=lambda claim: claim.__name__
)


@every_claim
def test_a_run_in_memory_is_an_exchange(claim: Claim) -> None:
    """Every claim holds, without a thread."""
    claim(lambda settings: StoreRun(MemoryStore(), settings))


@every_claim
def test_a_run_in_a_directory_is_an_exchange(claim: Claim, tmp_path: Path) -> None:
    """As on a file system that machines share."""
    numbers = iter(range(10))
    claim(lambda given: StoreRun(FileStore(tmp_path / str(next(numbers))), given))


@every_claim
def test_a_run_in_s3_is_an_exchange(claim: Claim, s3: Settings) -> None:
    """With a real server's conditional puts."""
    claim(lambda settings: StoreRun(s3_store(s3), settings))


@every_claim
def test_a_run_in_azure_is_an_exchange(claim: Claim, azure: Settings) -> None:
    """With another cloud's."""
    claim(lambda settings: StoreRun(azure_store(azure), settings))


@every_dealer_claim
def test_a_run_in_a_directory_is_a_dealer(
    claim: Callable[[OpenDealingRun], None], tmp_path: Path
) -> None:
    """Rows are dealt once on a file system that machines share."""
    numbers = iter(range(10))
    claim(lambda given: StoreRun(FileStore(tmp_path / str(next(numbers))), given))


@every_dealer_claim
def test_a_run_in_s3_is_a_dealer(
    claim: Callable[[OpenDealingRun], None], s3: Settings
) -> None:
    """And by a real server's conditional puts."""
    claim(lambda settings: StoreRun(s3_store(s3), settings))
