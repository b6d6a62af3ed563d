"""Owns objects by key: memory, files, and any bucket. Does not know what they mean.

Start reading at `port.Store`, then `memory`; `opening.open_store` finds the adapter of
a URL.
"""

from atoll.store.files import FileStore
from atoll.store.memory import MemoryStore
from atoll.store.opening import open_store
from atoll.store.patient import Patience, Patient
from atoll.store.port import (
    MAX_KEY_BYTES,
    Data,
    Item,
    Store,
    Traits,
    check_key,
)
from atoll.store.probe import Probed, probe

__all__ = [
    "MAX_KEY_BYTES",
    "Data",
    "FileStore",
    "Item",
    "MemoryStore",
    "Patience",
    "Patient",
    "Probed",
    "Store",
    "Traits",
    "check_key",
    "open_store",
    "probe",
]
