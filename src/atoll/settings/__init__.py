"""Owns what every island of a run must share: values, ranges, fingerprint.

Does not know what a setting does, nor how a run is reached.
Start reading at `sections`, then `run_settings.RunSettings`.
"""

from atoll.settings.fingerprint import EPOCH_KEYS, SCHEMA_VERSION
from atoll.settings.run_file import MAX_RUN_FILE_BYTES, parse_assignment
from atoll.settings.run_settings import RunSettings
from atoll.settings.sections import (
    AsyncSection,
    LimitsSection,
    OuterSection,
    RunSection,
    StoreSection,
    SyncSection,
    WireSection,
)

__all__ = [
    "EPOCH_KEYS",
    "MAX_RUN_FILE_BYTES",
    "SCHEMA_VERSION",
    "AsyncSection",
    "LimitsSection",
    "OuterSection",
    "RunSection",
    "RunSettings",
    "StoreSection",
    "SyncSection",
    "WireSection",
    "parse_assignment",
]
