"""Owns objects by key: memory, files, and any bucket. Does not know what they mean.

Start reading at `port.Store`, then `memory`; `opening.open_store` finds the adapter of
a URL. Around it, from the outside in: `Ranged`, `Probed`, `Patient`, `Counted`.
"""

from atoll.store.counted import Counted, Requests
from atoll.store.files import FileStore
from atoll.store.memory import MemoryStore
from atoll.store.opening import open_store
from atoll.store.patient import Patient, Tries
from atoll.store.port import (
    MAX_KEY_BYTES,
    Data,
    Item,
    Store,
    Traits,
    check_key,
)
from atoll.store.probe import Probed, probe, require_put_new
from atoll.store.ranged import Ranged

__all__ = [
    "MAX_KEY_BYTES",
    "Counted",
    "Data",
    "FileStore",
    "Item",
    "MemoryStore",
    "Patient",
    "Probed",
    "Ranged",
    "Requests",
    "Store",
    "Traits",
    "Tries",
    "check_key",
    "open_store",
    "probe",
    "require_put_new",
]
