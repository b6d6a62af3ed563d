"""`obstore`, which our store uses, beside `s3fs`: the same calls in turns."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from _timing import Row, medians, report

from atoll.store import open_store

NO_S3FS = "s3fs is left out, for it is not here: make setup"
SMALL_BYTES, LISTED = 1000, 100


class Calls(Protocol):
    """What both are asked."""

    def put(self, key: str, data: bytes) -> object: ...

    def get(self, key: str) -> object: ...

    def list(self, prefix: str) -> object: ...


Call = Callable[[str, Calls], object]


class WithObstore:
    """Our adapter. Implements `Calls`."""

    def __init__(self, url: str) -> None:
        self._store = open_store(url)

    def put(self, key: str, data: bytes) -> None:
        self._store.put(key, [data])

    def get(self, key: str) -> int:
        return len(self._store.get(key))

    def list(self, prefix: str) -> int:
        return len(self._store.items(prefix))


class WithS3fs:
    """The file system that fsspec has for S3, without its cache. Implements `Calls`."""

    def __init__(self, url: str) -> None:
        import s3fs  # type: ignore[import-not-found,unused-ignore]  # may be there

        self._root = url.partition("://")[2]
        self._files: Any = s3fs.S3FileSystem(
            key=os.environ["AWS_ACCESS_KEY_ID"],
            secret=os.environ["AWS_SECRET_ACCESS_KEY"],
            endpoint_url=os.environ["AWS_ENDPOINT_URL"],
            use_listings_cache=False,
        )

    def put(self, key: str, data: bytes) -> None:
        self._files.pipe_file(f"{self._root}/{key}", data)

    def get(self, key: str) -> int:
        return len(self._files.cat_file(f"{self._root}/{key}"))

    def list(self, prefix: str) -> int:
        return len(self._files.find(f"{self._root}/{prefix}", detail=True))


def tell_calls(url: str, *, size_bytes: int, turns: int) -> None:
    """Print how long each call takes, and the ratio."""
    if importlib.util.find_spec("s3fs") is None:
        print(NO_S3FS)
        return
    both: dict[str, Calls] = {"obstore": WithObstore(url), "s3fs": WithS3fs(url)}
    large, small = os.urandom(size_bytes), os.urandom(SMALL_BYTES)
    for number in range(LISTED):
        both["obstore"].put(f"listed/{number}", small)
    wanted: dict[str, Call] = {
        f"put {size_bytes / 1e6:g} MB": lambda name, calls: calls.put(name, large),
        f"get {size_bytes / 1e6:g} MB": lambda name, calls: calls.get(name),
        f"put {SMALL_BYTES} bytes": lambda name, calls: calls.put(f"{name}.s", small),
        f"get {SMALL_BYTES} bytes": lambda name, calls: calls.get(f"{name}.s"),
        f"list {LISTED} objects": lambda name, calls: calls.list("listed/"),
    }
    rows = [row(what, call, both, turns) for what, call in wanted.items()]
    report(f"obstore beside s3fs, median of {turns} turns", rows)


def row(what: str, call: Call, both: Mapping[str, Calls], turns: int) -> Row:
    """Return the medians of one call."""
    acts = {name: partial(call, name, calls) for name, calls in both.items()}
    took = medians(acts, turns=turns)
    ours_s, peer_s = took["obstore"], took["s3fs"]
    return Row(what=what, ours_s=ours_s, peer_s=peer_s, ratio=peer_s / ours_s)
