"""Real buckets keep the contract, or say what of it they cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.store import Patient, Probed, Store, Traits, probe
from atoll.testing.store_contract import (
    STORE_CLAIMS,
    WEAK_STORE_CLAIMS,
    Claim,
    what_was_put_new_stays,
)
from tests.store.buckets import rclone, s3_store, seaweedfs

Settings = dict[str, str]


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """A bucket of SeaweedFS."""
    with seaweedfs(_home(tmp_path_factory)) as where:
        yield where


@pytest.fixture(scope="module")
def weak(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """A bucket of rclone, which puts over what is there."""
    with rclone(_home(tmp_path_factory)) as where:
        yield where


@pytest.mark.parametrize("claim", STORE_CLAIMS, ids=lambda each: each.__name__)
def test_a_bucket_of_s3_is_a_store(s3: Settings, claim: Claim) -> None:
    """A real S3, with signatures, conditional puts and ranges."""
    claim(lambda: s3_store(s3))


@pytest.mark.parametrize(
    "claim",
    [each for each in WEAK_STORE_CLAIMS if each is not what_was_put_new_stays],
    ids=lambda each: each.__name__,
)
def test_a_weak_bucket_is_a_store_but_for_what_it_lacks(
    weak: Settings, claim: Claim
) -> None:
    """Whole objects are read where parts cannot be, and a torn read is repeated."""
    claim(_weak_store(weak))


def test_what_a_weak_bucket_lacks_is_found(weak: Settings) -> None:
    """It replaces what must stay, and has no ranges; the probe says both."""
    store = s3_store(weak)
    assert probe(store) == Traits(has_put_new=False, has_ranges=False)
    assert store.items("") == []


def _weak_store(where: Settings) -> Callable[[], Store]:
    return lambda: Patient(Probed(s3_store(where)))


def _home(factory: pytest.TempPathFactory) -> Path:
    return factory.mktemp("bucket") / "home"
