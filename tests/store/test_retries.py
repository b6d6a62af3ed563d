"""A store that fails for a moment gets the request again, and no object twice."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import StoreDenied, Unreachable
from atoll.retry import STORE_REQUEST
from atoll.store import (
    Data,
    MemoryStore,
    RetryingStore,
)


class Failing(MemoryStore):
    """Fails as a plan says: before or after it has done what was asked."""

    def __init__(self, *plan: str) -> None:
        super().__init__()
        self.plan, self.asked = list(plan), 0

    def put_new(self, key: str, parts: Sequence[Data]) -> bool:
        self.asked += 1
        what = self.plan.pop(0) if self.plan else "works"
        if what == "denied":
            raise StoreDenied("No.")
        if what == "lost":
            raise Unreachable("Nobody answered.")
        is_first = super().put_new(key, parts)
        if what == "answer lost":
            raise Unreachable("Nobody answered.")
        return is_first


def patient(store: MemoryStore, pauses_s: list[float]) -> RetryingStore:
    return RetryingStore(store, sleep=pauses_s.append, rng=random.Random(1))


def test_what_fails_for_a_moment_is_asked_again() -> None:
    """With pauses that grow, and a part of chance."""
    pauses_s: list[float] = []
    store = Failing("lost", "lost", "lost")

    assert patient(store, pauses_s).put_new("key", [b"1"])
    assert pauses_s == list(STORE_REQUEST.pauses_s(random.Random(1)))[:3]


def test_a_put_whose_answer_was_lost_is_ours() -> None:
    """The object is there when we ask again, with our bytes: we put it."""
    store = Failing("answer lost")
    assert patient(store, []).put_new("key", [b"ours", b"", b" too"])
    assert bytes(store.get("key")) == b"ours too"


@pytest.mark.parametrize("other", [b"theirs", b"our", b"ours and more", b""])
def test_a_put_that_somebody_else_has_made_is_not_ours(other: bytes) -> None:
    """After a failure, too: the bytes tell whose it is."""
    store = Failing()
    MemoryStore.put_new(store, "key", [other])
    store.plan = ["lost"]
    assert not patient(store, []).put_new("key", [b"ours"])


def test_equal_bytes_are_not_ours_if_nothing_was_lost() -> None:
    """A clear answer stands: somebody was first."""
    store = Failing()
    MemoryStore.put_new(store, "key", [b"same"])
    assert not patient(store, []).put_new("key", [b"same"])


def test_tries_end() -> None:
    """Then the last failure is told."""
    store = Failing(*["lost"] * 99)
    with pytest.raises(Unreachable):
        patient(store, []).put_new("key", [b"1"])
    assert store.asked == STORE_REQUEST.max_tries


def test_a_permission_is_not_asked_for_again() -> None:
    """Somebody has to give it first."""
    store = Failing("denied")
    with pytest.raises(StoreDenied):
        patient(store, []).put_new("key", [b"1"])
    assert store.asked == 1


@given(st.integers(1, 12), st.integers(0, 2**32))
def test_waits_are_bounded(tries: int, seed: int) -> None:
    """One fewer than tries, none above the longest, none below half of its turn."""
    bounds = replace(STORE_REQUEST, max_tries=tries)
    waits_s = list(bounds.pauses_s(random.Random(seed)))
    assert len(waits_s) == tries - 1
    for number, wait_s in enumerate(waits_s):
        longest_s = min(bounds.first_s * 2**number, bounds.longest_s)
        assert longest_s / 2 <= wait_s <= longest_s
