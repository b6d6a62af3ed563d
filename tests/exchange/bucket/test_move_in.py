"""A run moves from a coordinator into any store."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.errors import UsageError
from atoll.exchange.bucket.move import require_free
from atoll.store import FileStore, ProbedStore, Store
from atoll.testing.fixtures import anchor_of, enter, update_of
from tests.exchange.test_relocation import URL, beat, begun
from tests.store.buckets import Settings, azure_store, s3_store


def follows(store: Store) -> None:
    """Take a run of two islands to a store, in the middle of its second round."""
    require_free(store, url=URL)
    it = begun(store, start_islands=2)
    a, b = it.island("a"), it.island("b")
    first, second = enter(a, "a"), enter(b, "b")
    a.publish(update_of(a, first, 1.0))
    b.publish(update_of(b, second, 3.0))
    beat(a, first, 1)
    beat(b, second, 1)
    a.publish(update_of(a, first, 1.0, round=2))
    late = update_of(b, second, 3.0, round=2)
    it.move()
    b.publish(late)

    assert a.outcome(0, 2, wait_s=1.0) is not None
    assert anchor_of(a) == anchor_of(b) == -4.0  # twice the mean of 1 and 3


def test_a_run_comes_into_a_directory(tmp_path: Path) -> None:
    """As on a file system that machines share."""
    follows(FileStore(tmp_path))


def test_a_run_comes_into_s3(s3: Settings) -> None:
    """With a real server's conditional puts."""
    follows(ProbedStore(s3_store(s3)))


def test_a_run_comes_into_azure(azure: Settings) -> None:
    """With another cloud's."""
    follows(ProbedStore(azure_store(azure)))


def test_a_run_does_not_come_where_the_last_put_stays(weak: Settings) -> None:
    """A move could be both done and given up."""
    with pytest.raises(
        UsageError, match=r"both done and given up\. Choose another store"
    ):
        require_free(ProbedStore(s3_store(weak)), url=URL)
