"""A bucket that was removed, and objects in it that are not ours."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import obstore
import pytest

from atoll.errors import RemoteError, Unreachable
from atoll.store import FileStore, Item, Store
from atoll.store.files import TEMPORARY
from atoll.store.fsspec import FsspecStore
from atoll.store.obstore import ObstoreStore
from tests.store.buckets import (
    Settings,
    as_without,
    ask_azure,
    ask_s3,
    azure_store,
    s3_store,
)

READS: dict[str, Callable[[Store], object]] = {
    "get": lambda store: store.get("there"),
    "part": lambda store: store.get("there", 1, 2),
    "list": lambda store: store.items(""),
    "list below": lambda store: store.items("some/"),
}
WRITES: dict[str, Callable[[Store], object]] = {
    "put new": lambda store: store.put_new("new", [b"1"]),
    "put": lambda store: store.put("own", [b"1"]),
}


def test_a_bucket_of_s3_that_vanishes_is_told(s3: Settings) -> None:
    """While a store is open; an object that is not there is something else."""
    where = s3 | {"bucket": "vanishing"}
    ask_s3("PUT", where)
    store = s3_store(where | as_without("nothing"))
    store.put("there", [b"123"])
    store.remove(["there"])
    ask_s3("DELETE", where)

    for act in (*READS.values(), _remove):
        with pytest.raises(Unreachable, match=r"s3://vanishing/.* Create the bucket"):
            act(store)
    for act in WRITES.values():  # SeaweedFS would make a bucket, and says who may not
        with pytest.raises(RemoteError, match="s3://vanishing/"):
            act(store)


def _remove(store: Store) -> None:
    store.remove(["there"])


def test_a_container_of_azure_that_vanishes_is_told(azure: Settings) -> None:
    """Another cloud, other codes, the same words."""
    port = urlsplit(azure["endpoint"]).port or 0
    ask_azure("PUT", port, "vanishing")
    store = azure_store(azure | {"container_name": "vanishing"})
    store.put("there", [b"123"])
    ask_azure("DELETE", port, "vanishing")

    for act in (*READS.values(), *WRITES.values()):
        with pytest.raises(Unreachable, match=r"az://vanishing/.* Create the bucket"):
            act(store)


@pytest.mark.parametrize("act", [*READS, *WRITES])
def test_a_directory_that_vanishes_is_told(act: str, tmp_path: Path) -> None:
    """An empty list would say that nobody is there, and a get that nobody was."""
    store = FileStore(tmp_path / "store")
    store.put("there", [b"123"])
    shutil.rmtree(tmp_path / "store")

    with pytest.raises(Unreachable, match=r"/store.* mount it again"):
        (READS | WRITES)[act](store)


@pytest.mark.parametrize("act", [*READS, *WRITES])
def test_a_share_that_is_no_longer_mounted_is_told(act: str, tmp_path: Path) -> None:
    """What is left is an empty directory: where it was mounted."""
    store = FileStore(tmp_path / "store")
    store.put("there", [b"123"])
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "store").mkdir()

    with pytest.raises(Unreachable, match="mount it again"):
        (READS | WRITES)[act](store)
    assert not (tmp_path / "store" / TEMPORARY).exists()


FOREIGN = ("Notes.TXT", "run/a b", "run/UP/x", "run/~lock")


def test_objects_of_others_are_not_listed(tmp_path: Path) -> None:
    """What no key of ours can name is left alone, in every kind of store."""
    bucket = obstore.store.MemoryStore()
    for name in FOREIGN:
        obstore.put(bucket, name, b"theirs")
        place = tmp_path / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(b"theirs")
    stores: list[Store] = [
        ObstoreStore(bucket, name="memory"),
        FileStore(tmp_path),
        FsspecStore(f"file://{tmp_path}"),
    ]
    for store in stores:
        store.put("run/ours", [b"1"])

        assert store.items("") == store.items("run/") == [Item("run/ours", 1)]


def test_objects_of_others_in_a_bucket_are_not_listed(s3: Settings) -> None:
    """Also what a cloud's console leaves: an empty object that plays a directory."""
    store = s3_store(s3, prefix="foreign")
    other = s3_store(s3, prefix="foreign/run")
    obstore.put(other._store, "Notes.TXT", b"theirs")
    obstore.put(other._store, "sub folder/", b"")
    store.put("run/ours", [b"1"])

    assert store.items("run/") == [Item("run/ours", 1)]
