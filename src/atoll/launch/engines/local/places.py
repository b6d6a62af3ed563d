"""What islands of one machine share: its devices and its cores.

Rule 1: island i of k accelerators has the devices from i * k on, in every life.
Rule 2: without a number, the devices that can be seen are shared out evenly, if there
are enough for one each; otherwise everybody sees all of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from atoll.errors import UsageError
from atoll.launch.base import Order

VISIBLE = "CUDA_VISIBLE_DEVICES"
THREADS = "OMP_NUM_THREADS"
_DEVICE = re.compile(r"nvidia(\d+)")


def devices(environment: Mapping[str, str], *, dev: Path = Path("/dev")) -> list[str]:
    """Return the accelerators that can be seen, as CUDA_VISIBLE_DEVICES names them."""
    said = environment.get(VISIBLE)
    if said is not None:
        return [each.strip() for each in said.split(",") if each.strip()]
    found = (_DEVICE.fullmatch(each.name) for each in dev.glob("nvidia*"))
    return sorted((each[1] for each in found if each), key=int)


def shares(order: Order, visible: Sequence[str]) -> dict[int, dict[str, str]]:
    """Return the variables that give each island its devices.

    Raises:
        UsageError: there are not as many as the islands need.
    """
    wanted, count = order.spec.resources.accelerators, order.indexes.stop
    if wanted * count > len(visible):
        seen = ", ".join(visible) or "none"
        raise UsageError(
            f"{count} islands of {wanted} accelerators need {wanted * count}, and this "
            f"machine shows {len(visible)} ({seen}). Launch fewer."
        )
    each = wanted or len(visible) // count
    if not each:
        return {index: {} for index in order.indexes}
    return {
        index: {VISIBLE: ",".join(visible[index * each : (index + 1) * each])}
        for index in order.indexes
    }


def threads(order: Order, environment: Mapping[str, str]) -> dict[str, str]:
    """Return what keeps islands from fighting over cores, unless it was said.

    Every library takes all cores for itself: four islands on two would be slower than
    one.
    """
    if THREADS in environment or THREADS in order.spec.environment:
        return {}
    cores = order.spec.resources.cpus or cores_here() / order.indexes.stop
    return {THREADS: str(max(1, int(cores / order.spec.processes)))}


def cores_here() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def require_room(order: Order) -> None:
    """Return if the machine has what the islands are said to need.

    Raises:
        UsageError: it has not.
    """
    needs, count = order.spec.resources, order.num_islands
    if needs.cpus is not None and needs.cpus > cores_here():
        raise UsageError(
            f"cpus={needs.cpus:g} is more than this machine has: {cores_here()}."
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needs.memory_bytes is not None and needs.memory_bytes * count > memory:
        raise UsageError(
            f"{count} islands of memory_bytes={needs.memory_bytes} need "
            f"{needs.memory_bytes * count}, and this machine has {memory}."
        )
