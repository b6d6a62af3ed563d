"""Owns files that survive a power cut. Does not know their content.

Start reading at `base.Disk`, then `system`; `files` writes the files that are large.
"""

from atoll.disk.base import (
    LOCK,
    MAX_NAME_BYTES,
    MAX_PART_BYTES,
    TEMPORARY,
    Data,
    Disk,
    check_name,
)
from atoll.disk.space import (
    DiskSpace,
    SpaceReservation,
)
from atoll.disk.system import (
    Abilities,
    SystemDisk,
    open_nameless,
    require_able,
    sweep_nameless,
    sync_directory,
    write_all,
)

__all__ = [
    "LOCK",
    "MAX_NAME_BYTES",
    "MAX_PART_BYTES",
    "TEMPORARY",
    "Abilities",
    "Data",
    "Disk",
    "DiskSpace",
    "SpaceReservation",
    "SystemDisk",
    "check_name",
    "open_nameless",
    "require_able",
    "sweep_nameless",
    "sync_directory",
    "write_all",
]
