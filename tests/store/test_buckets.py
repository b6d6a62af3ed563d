"""Real buckets pass the contract, or report which part they cannot."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from atoll.errors import UsageError
from atoll.store import (
    ProbedStore,
    RetryingStore,
    Store,
    StoreTraits,
    probe,
    require_put_new,
)
from atoll.testing.store_contract import (
    STORE_CLAIMS,
    WEAK_STORE_CLAIMS,
    Claim,
    what_was_put_new_stays,
)
from tests.store.buckets import Settings, azure_store, s3_store


@pytest.mark.parametrize("claim", STORE_CLAIMS, ids=lambda each: each.__name__)
def test_a_bucket_of_s3_is_a_store(s3: Settings, claim: Claim) -> None:
    """A real S3, with signatures, conditional puts and ranges."""
    claim(lambda: s3_store(s3))


@pytest.mark.parametrize("claim", STORE_CLAIMS, ids=lambda each: each.__name__)
def test_a_container_of_azure_is_a_store(azure: Settings, claim: Claim) -> None:
    """The same claims, with another cloud's requests."""
    claim(lambda: azure_store(azure))


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
    assert probe(store) == StoreTraits(has_put_new=False, has_ranges=False)
    assert store.items("") == []


def test_whoever_needs_put_if_absent_refuses_a_weak_bucket(weak: Settings) -> None:
    """With its name, and which ones can."""
    with pytest.raises(
        UsageError, match=r"s3://atoll/x overwrites .* Use a store that has it"
    ):
        require_put_new(probe(s3_store(weak)), store="s3://atoll/x")


def _weak_store(where: Settings) -> Callable[[], Store]:
    return lambda: RetryingStore(ProbedStore(s3_store(where)))
