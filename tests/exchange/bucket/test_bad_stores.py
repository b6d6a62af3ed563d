"""What does not belong into a run, and stores that go: on real ones, with a remedy."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from atoll.errors import CorruptError, Unreachable
from atoll.exchange.bucket import keys
from atoll.exchange.bucket.create import make_run
from atoll.retry import RetryPolicy
from atoll.store import (
    FileStore,
    Item,
    MemoryStore,
    ProbedStore,
    RangedStore,
    RetryingStore,
    Store,
)
from tests.exchange.bucket.test_bad_input import (
    URL,
    put_strange_objects,
    settings,
    trained,
)
from tests.store.buckets import Settings, ask_azure, azure_store, s3_store

Opened = Callable[[], Store]


@pytest.fixture(params=["s3", "azure", "file"])
def real(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A store as an island has it, of each kind that people have."""
    kinds: dict[str, Opened] = {
        "s3": lambda: s3_store(request.getfixturevalue("s3")),
        "azure": lambda: azure_store(request.getfixturevalue("azure")),
        "file": lambda: FileStore(tmp_path / "store"),
    }
    return RangedStore(ProbedStore(RetryingStore(kinds[request.param]())))


def test_a_run_goes_on_beside_what_is_not_its_own(
    real: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """Foreign, cut off, empty, of another run or life: each is told by its key."""
    make_run(real, settings(), url=URL)
    put_strange_objects(real)
    with caplog.at_level(logging.WARNING, logger="atoll"):
        found = trained(real, "a", "b")

    assert found["a"] == found["b"]
    told = " ".join(each.getMessage() for each in caplog.records)
    for key in (
        "members/zz-0123456789ab.7",
        "rounds/0/1/up/zz-0123456789ab.1",
        "rounds/0/2/up/zz-0123456789ab.1",
        "rounds/0/3/up/zz-0123456789ab.2",
        "rounds/1/2/up/zz-0123456789ab.3",
    ):
        assert key in told


@pytest.mark.parametrize(
    "prefix", ["rounds/0/4/roster", "founding/", keys.RUN, keys.SETTINGS]
)
def test_half_of_what_a_run_cannot_go_on_without_is_named(prefix: str) -> None:
    """A copy that was interrupted: its key, and that a copy is needed."""
    whole, half = MemoryStore(), MemoryStore()
    make_run(whole, settings(), url=URL)
    trained(whole, "a", "b")
    for item in whole.items(""):
        data = whole.get(item.key)
        is_cut = item.key.startswith(prefix)
        half.put(item.key, [data[: len(data) // 2] if is_cut else data])
    for item in half.items("states/"):
        half.remove([item.key])

    with pytest.raises(CorruptError) as told:
        trained(half, "c")
    assert prefix in str(told.value)
    assert "estore" in str(told.value) or "remove it" in str(told.value)


class Vanishing:
    """Lets a store vanish when a prefix is listed. Implements `Store`."""

    def __init__(self, store: Store, vanish: Callable[[], object], at: str) -> None:
        self._store, self._vanish, self._at = store, vanish, at
        self.traits, self.get = store.traits, store.get
        self.put_new, self.put = store.put_new, store.put
        self.remove = store.remove

    def items(self, prefix: str) -> list[Item]:
        if prefix == self._at:
            self._vanish()
            self._at = ""
        return self._store.items(prefix)


def trained_until_it_vanishes(store: Store, vanish: Callable[[], object]) -> str:
    """Return what an island is told whose store goes in the second round."""
    brief = RetryingStore(store, policy=RetryPolicy(max_tries=2, first_s=0.01))
    make_run(store, settings(1), url=URL)
    second = keys.round_prefix(0, 2)
    with pytest.raises(Unreachable) as told:
        trained(RangedStore(Vanishing(ProbedStore(brief), vanish, second)), "a")
    return str(told.value)


def test_a_bucket_that_vanishes_under_a_run_is_told(azure: Settings) -> None:
    """By its name, and that somebody has to make it again, with what was in it."""
    port = urlsplit(azure["endpoint"]).port or 0
    ask_azure("PUT", port, "vanishing-run")
    store = azure_store(azure | {"container_name": "vanishing-run"}, prefix="run")
    told = trained_until_it_vanishes(
        store, lambda: ask_azure("DELETE", port, "vanishing-run")
    )
    assert "az://vanishing-run/run does not exist" in told
    assert "Create the bucket" in told


def test_a_directory_that_vanishes_under_a_run_is_told(tmp_path: Path) -> None:
    """By its path, and that a share may have to be mounted again."""
    place = tmp_path / "store"
    told = trained_until_it_vanishes(FileStore(place), lambda: shutil.rmtree(place))
    assert f"{place}" in told
    assert "mount it again" in told
