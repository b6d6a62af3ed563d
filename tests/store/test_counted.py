"""Requests are counted as a cloud does, with their price."""

from __future__ import annotations

import random

import pytest

from atoll.errors import NoSuchObject, Unreachable
from atoll.store import (
    CountedStore,
    MemoryStore,
    RequestCounts,
    RetryingStore,
)
from atoll.testing.store_contract import STORE_CLAIMS, Claim
from tests.store.test_retries import Failing


@pytest.mark.parametrize("claim", STORE_CLAIMS, ids=lambda each: each.__name__)
def test_it_is_a_store(claim: Claim) -> None:
    """Counting changes nothing."""
    claim(lambda: CountedStore(MemoryStore()))


def test_every_request_counts_in_its_class() -> None:
    """Also one that finds nothing, or that somebody else was before."""
    store = CountedStore(MemoryStore())
    store.put_new("a", [b"12", b"345"])
    store.put_new("a", [b"67"])
    store.put("b", [b"8"])
    store.get("a")
    store.get("a", 1, 2)
    with pytest.raises(NoSuchObject):
        store.get("c")
    store.items("")
    store.remove(["a", "b"])
    store.remove([])

    # Up 5 + 2 + 1 bytes, down 5 + 2.
    found = RequestCounts(puts=3, lists=1, gets=3, removes=1, bytes_up=8, bytes_down=7)
    assert store.requests == found
    assert (found.writes, found.reads, found.total) == (4, 3, 8)


def test_a_long_list_is_several_requests() -> None:
    """A thousand objects come in one, and go in one."""
    store = CountedStore(MemoryStore())
    keys = [f"key/{number}" for number in range(2001)]
    for key in keys:
        store.put(key, [b""])
    before = store.requests
    store.items("key/")
    store.remove(keys)
    assert store.requests.since(before) == RequestCounts(lists=3, removes=3)


def test_what_is_asked_again_costs_again() -> None:
    """Counted is below Patient."""
    store = CountedStore(Failing("lost", "lost"))
    RetryingStore(store, sleep=lambda _: None, rng=random.Random(1)).put_new(
        "key", [b"123"]
    )
    assert store.requests == RequestCounts(puts=3, bytes_up=9)


def test_a_request_that_fails_is_counted() -> None:
    """The cloud may have done it."""
    store = CountedStore(Failing("lost"))
    with pytest.raises(Unreachable):
        store.put_new("key", [b"123"])
    assert store.requests.puts == 1


def test_the_price_is_that_of_s3() -> None:
    """2000 puts and lists at 0.005 USD and 5000 gets at 0.0004 USD per thousand."""
    asked = RequestCounts(puts=1500, lists=500, gets=5000, removes=10**6)
    assert asked.usd == pytest.approx(0.010 + 0.002)
