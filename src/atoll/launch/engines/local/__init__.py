"""Islands as processes of this machine, led by a supervisor that outlives a terminal.

Start reading at `LocalLauncher`, then `supervisor`.

The islands share the machine's devices and cores.
Rule 1: island i of k accelerators has the devices from i * k on, after every restart.
Rule 2: without a number, the visible devices are divided evenly, if there are enough
for one each; otherwise every island sees all of them.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atoll.errors import RemoteError, UsageError
from atoll.island.environment import surroundings_from_environment
from atoll.launch.base import (
    GRACE_S,
    Handle,
    Keep,
    Launcher,
    Order,
    Plan,
    Report,
    State,
    Traits,
    as_json,
    read_options,
)
from atoll.launch.bootstrap import bootstrap_words, told_to
from atoll.launch.engines.local.supervisor import (
    MODULE,
    Known,
    LaunchFiles,
    Start,
    send,
    started,
    written,
)
from atoll.launch.spec import in_engine, is_python, python_words, spelt_out

ENGINE = "local"
STARTS_S = 60.0
LOOK_S = 0.05
UNLED = "nobody leads it: its supervisor is gone"


@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """What `--option` takes."""

    directory: str | None = None
    """Where logs and states of launches are; among the user's own files without."""


def open_launcher(options: Mapping[str, str]) -> Launcher:
    """Return the launcher of this machine."""
    read = read_options(LocalOptions, options, engine=ENGINE)
    usual = surroundings_from_environment().credentials.parent / "local"
    directory = usual if read.directory is None else Path(read.directory).absolute()
    return LocalLauncher(directory, options)


class LocalLauncher:
    """Starts islands here; what it knows is in files, so any process may ask."""

    def __init__(self, directory: Path, options: Mapping[str, str]) -> None:
        self._directory, self._options = directory, dict(options)
        self._read: dict[tuple[str, int], tuple[int, int]] = {}
        """How many lines of a log were told, and where they end: it may be long."""

    @property
    def traits(self) -> Traits:
        return Traits(is_elsewhere=False)

    def plan(self, order: Order) -> Plan:
        data = [_shown(start, order) for start in _starts(order, has_secrets=False)]
        return as_json(data)

    def launch(self, order: Order, *, keep: Keep) -> Handle:
        starts = _starts(order, has_secrets=True)
        files = self._files(order.id)
        files.make()
        handle = order.handle(
            ENGINE,
            {"directory": str(files.directory)},
            options=self._options,
            begun_at_s=time.time(),
        )
        keep(handle)
        _begin(files, written(starts, order.spec.restarts))
        return handle

    def poll(self, handle: Handle) -> tuple[Report, ...]:
        known = {each.report.index: each for each in self._known(handle)}
        return tuple(
            known[index].report if index in known else _lost(handle, index)
            for index in handle.indexes
        )

    def logs(self, handle: Handle, index: int, *, after: int = 0) -> list[str]:
        known, at = self._read.get((handle.id, index), (0, 0))
        if known > after:
            known, at = 0, 0
        said, end = self._files(handle.id).lines(index, after - known, at)
        if said:
            self._read[handle.id, index] = after + len(said), end
        return said

    def cancel(
        self,
        handle: Handle,
        *,
        indexes: Collection[int] | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        files = self._files(handle.id)
        if not files.directory.is_dir():
            return
        going = set(handle.indexes if indexes is None else indexes)
        # A supervisor that starts only now finds the request, and starts nothing.
        files.write_request(going, grace_s)
        if not files.has_supervisor():
            _end_unled(
                [each for each in files.read_state() or () if _is_live(each)],
                going,
                grace_s,
            )

    def _files(self, launch: str) -> LaunchFiles:
        return LaunchFiles(self._directory / launch)

    def _known(self, handle: Handle) -> list[Known]:
        """Return what is known, corrected where nobody has kept it up to date."""
        files = self._files(handle.id)
        # In this order: a supervisor that ends now has written its last word before.
        is_led = files.has_supervisor()
        known = files.read_state() or []
        return known if is_led else [_unled(each) for each in known]


def _starts(order: Order, *, has_secrets: bool) -> list[Start]:
    """Return what is executed for each island.

    Raises:
        UsageError: this machine cannot.
    """
    spec = order.spec
    _require_possible(order)
    require_room(order)
    shares = device_shares(order, visible_devices(os.environ))
    told = {**thread_limits(order, os.environ), **spec.environment}
    if has_secrets:
        told |= {name: value.reveal() for name, value in order.values.items()}
    return [
        Start(
            index,
            spec.island(index),
            _words(order, index),
            {**told, **shares[index], **told_to(spec.run, spec.island(index), index)},
            None if spec.code else str(Path(spec.directory or ".").absolute()),
            is_python(spec.command),
        )
        for index in order.indexes
    ]


def _words(order: Order, index: int) -> list[str]:
    """Return the command itself, unless there is something to do before."""
    spec = order.spec
    if spec.code:
        return bootstrap_words(spec, index=index, python=sys.executable)
    return spelt_out(spec.command, processes=spec.processes, python=sys.executable)


def _require_possible(order: Order) -> None:
    spec = order.spec
    for name in ("image", "requirements"):
        if getattr(spec, name):
            raise UsageError(
                f"{name}={getattr(spec, name)!r} has no meaning on this machine, where "
                "islands run in the Python that launches them. Leave it out."
            )
    if spec.resources.time_limit_s is not None:
        raise UsageError(
            f"time_limit_s={spec.resources.time_limit_s:g} is for engines that have "
            "limits, and this machine has none. Leave it out."
        )
    if kept := in_engine(spec.secrets):
        name = next(iter(kept))
        raise UsageError(
            f"The secret {name} is to come from the engine, and this machine keeps "
            f"none. Give {name}=env:NAME or {name}=file:PATH."
        )
    if spec.code is None:
        _require_command(spec.command, Path(spec.directory or "."))


def _require_command(command: tuple[str, ...], directory: Path) -> None:
    """Return if there is something to run: nobody waits for three deaths to learn."""
    words = python_words(command)
    if words is not None and words[0] != "-m" and not (directory / words[0]).is_file():
        raise UsageError(
            f"There is no script {words[0]!r} in {directory.absolute()}. Give its path "
            "as seen from there."
        )
    program = spelt_out(command, processes=1, python=sys.executable)[0]
    path = str(directory / program) if "/" in program else program
    if words is None and shutil.which(path) is None:
        raise UsageError(
            f"{program!r} cannot be run: there is no such program. Write the command "
            "after --, for example: -- python train.py"
        )


def _shown(start: Start, order: Order) -> dict[str, Any]:
    return {
        "island": start.name,
        "words": list(start.words),
        "directory": start.directory,
        "environment": dict(start.environment),
        "secrets": dict(order.spec.secrets),
    }


def _begin(files: LaunchFiles, starts: bytes) -> None:
    """Start the supervisor, and return when it leads."""
    with files.supervisor_log.open("wb") as said:
        done = subprocess.run(
            [sys.executable, "-m", MODULE, str(files.directory)],
            input=starts,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    until_s = time.monotonic() + STARTS_S
    while done.returncode == 0 and time.monotonic() < until_s:
        if files.state.exists():
            return
        time.sleep(LOOK_S)
    said_last = files.supervisor_log.read_text(errors="replace").strip()[-1000:]
    raise RemoteError(
        f"The supervisor of {files.directory.name} did not start: "
        f"{said_last or 'it said nothing'}. Its log is {files.supervisor_log}."
    )


def _lost(handle: Handle, index: int) -> Report:
    why = "this machine knows nothing of it"
    return Report(index=index, name=handle.island(index), state=State.LOST, reason=why)


def _is_live(known: Known) -> bool:
    return known.pid is not None and started(known.pid) == known.started


def _unled(known: Known) -> Known:
    """Return what is true of an island whose supervisor is gone."""
    if known.report.state.is_over:
        return known
    state = State.RUNNING if _is_live(known) else State.LOST
    return replace(known, report=replace(known.report, state=state, reason=UNLED))


def _end_unled(live: list[Known], going: set[int], grace_s: float) -> None:
    """End islands that nobody leads, in the time that they have."""
    left = [each for each in live if each.report.index in going and each.pid]
    for each in left:
        send(each.pid or 0, signal.SIGTERM, is_for_one=True)
    until_s = time.monotonic() + grace_s
    while any(_is_live(each) for each in left) and time.monotonic() < until_s:
        time.sleep(LOOK_S)
    for each in left:
        if _is_live(each):
            send(each.pid or 0, signal.SIGKILL)


VISIBLE = "CUDA_VISIBLE_DEVICES"
THREADS = "OMP_NUM_THREADS"
_DEVICE = re.compile(r"nvidia(\d+)")


def visible_devices(
    environment: Mapping[str, str], *, dev: Path = Path("/dev")
) -> list[str]:
    """Return the accelerators that can be seen, as CUDA_VISIBLE_DEVICES names them."""
    said = environment.get(VISIBLE)
    if said is not None:
        return [each.strip() for each in said.split(",") if each.strip()]
    found = (_DEVICE.fullmatch(each.name) for each in dev.glob("nvidia*"))
    return sorted((each[1] for each in found if each), key=int)


def device_shares(order: Order, visible: Sequence[str]) -> dict[int, dict[str, str]]:
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


def thread_limits(order: Order, environment: Mapping[str, str]) -> dict[str, str]:
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
