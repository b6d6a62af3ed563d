"""Owns objects by key: memory, files, and any bucket. Does not know what they mean.

Start reading at `base.Store`, then `memory`; `urls.open_store` finds the adapter of a
URL. Around it, from the outside in: `RangedStore`, `ProbedStore`, `RetryingStore`,
`CountedStore`, all in `client`.
"""

from atoll.store.base import (
    MAX_KEY_BYTES,
    Data,
    Item,
    Store,
    StoreTraits,
    check_key,
)
from atoll.store.client import (
    CountedStore,
    ProbedStore,
    RangedStore,
    RequestCounts,
    RetryingStore,
    probe,
    require_put_new,
)
from atoll.store.files import FileStore
from atoll.store.memory import MemoryStore
from atoll.store.urls import open_store

__all__ = [
    "MAX_KEY_BYTES",
    "CountedStore",
    "Data",
    "FileStore",
    "Item",
    "MemoryStore",
    "ProbedStore",
    "RangedStore",
    "RequestCounts",
    "RetryingStore",
    "Store",
    "StoreTraits",
    "check_key",
    "open_store",
    "probe",
    "require_put_new",
]
