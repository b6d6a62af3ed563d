"""Islands as processes of this machine, led by a supervisor that outlives a terminal.

Start reading at `LocalLauncher`, then `life` and `supervisor`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atoll.errors import RemoteError, UsageError
from atoll.island.environment import surroundings_from_environment
from atoll.launch.base import GRACE_S, Keep, Launcher, Order, Plan, Traits
from atoll.launch.bootstrap import bootstrap_words, told_to
from atoll.launch.command import is_python, python_words, spelt_out
from atoll.launch.engines.local import places
from atoll.launch.engines.local.files import Known, LaunchFiles, send, started
from atoll.launch.engines.local.supervisor import MODULE, Start, written
from atoll.launch.handle import Handle
from atoll.launch.options import read_options
from atoll.launch.references import in_engine
from atoll.launch.states import Report, State
from atoll.launch.written import as_json

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
    places.require_room(order)
    shares = places.shares(order, places.devices(os.environ))
    told = {**places.threads(order, os.environ), **spec.environment}
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
    return Report(index=index, name=handle.island(index), state=State.LOST, why=why)


def _is_live(known: Known) -> bool:
    return known.pid is not None and started(known.pid) == known.started


def _unled(known: Known) -> Known:
    """Return what is true of an island whose supervisor is gone."""
    if known.report.state.is_over:
        return known
    state = State.RUNNING if _is_live(known) else State.LOST
    return replace(known, report=replace(known.report, state=state, why=UNLED))


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
