"""Owns files that survive a power cut. Does not know what is in them.

Start reading at `port.Disk`, then `system`; `whole` writes the files that are large.
"""

from atoll.disk.port import (
    LOCK,
    MAX_NAME_BYTES,
    MAX_PART_BYTES,
    TEMPORARY,
    Data,
    Disk,
    check_name,
)
from atoll.disk.system import SystemDisk
from atoll.disk.whole import sync_directory, write_all

__all__ = [
    "LOCK",
    "MAX_NAME_BYTES",
    "MAX_PART_BYTES",
    "TEMPORARY",
    "Data",
    "Disk",
    "SystemDisk",
    "check_name",
    "sync_directory",
    "write_all",
]
