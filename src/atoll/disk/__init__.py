"""Owns files that survive a power cut. Does not know what is in them.

Start reading at `port.Disk`, then `system`; `whole` writes the files that are large.
"""

from atoll.disk.abilities import Abilities, require_able
from atoll.disk.nameless import open_nameless, sweep_nameless
from atoll.disk.port import (
    LOCK,
    MAX_NAME_BYTES,
    MAX_PART_BYTES,
    TEMPORARY,
    Data,
    Disk,
    check_name,
)
from atoll.disk.room import Claim, Room
from atoll.disk.system import SystemDisk
from atoll.disk.whole import sync_directory, write_all

__all__ = [
    "LOCK",
    "MAX_NAME_BYTES",
    "MAX_PART_BYTES",
    "TEMPORARY",
    "Abilities",
    "Claim",
    "Data",
    "Disk",
    "Room",
    "SystemDisk",
    "check_name",
    "open_nameless",
    "require_able",
    "sweep_nameless",
    "sync_directory",
    "write_all",
]
