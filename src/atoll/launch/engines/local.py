"""Islands as processes of this machine, led by a supervisor that outlives a terminal.

    python -m atoll.launch.engines.local DIRECTORY < COMMANDS

is that supervisor. Its input is JSON: argv, environments and the restart policy. It may
contain secrets, so it is on no disk and no command line. The first process exits as
soon as it has read it; the second, in a separate session, ends with its islands.

Start reading at `LocalLauncher`, then `_Supervised`: they meet in the `LaunchFiles` of
`launch.supervise`. The islands share the machine's devices and cores.
Rule 1: island i of k accelerators has the devices from i * k on, after every restart.
Rule 2: without a number, the visible devices are divided evenly, if there are enough
for one each; otherwise every island sees all of them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from atoll.errors import DiskError, RemoteError, UsageError
from atoll.launch import base
from atoll.launch.bootstrap import bootstrap_argv, island_variables
from atoll.launch.spec import (
    IslandSpec,
    Restarts,
    full_argv,
    is_python,
    python_argv,
    refuse_fields,
    refuse_stored_secrets,
)
from atoll.launch.supervise import (
    EndRequest,
    IslandCommand,
    IslandRecord,
    IslandSupervisor,
    LaunchFiles,
    process_identity,
    received_signals,
    send,
    supervise,
)

ENGINE = "local"
MODULE = "atoll.launch.engines.local"
STARTS_S = 60.0
LOOK_S = 0.05
UNLED = "its supervisor has ended"


@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """The options of `--option`."""

    directory: str | None = None
    """The directory of logs and states. Default: among the user's own files."""


def open_launcher(options: Mapping[str, str]) -> base.Launcher:
    """Return the launcher of this machine."""
    parsed = base.read_options(LocalOptions, options, engine=ENGINE)
    # Loads the exchanges, which a supervisor does not need.
    from atoll.island.environment import credentials_from_environment

    default = credentials_from_environment().credentials.parent / "local"
    directory = (
        default if parsed.directory is None else Path(parsed.directory).absolute()
    )
    return LocalLauncher(directory, options)


class LocalLauncher:
    """Starts islands on this machine; its state is in files, for any process."""

    def __init__(self, directory: Path, options: Mapping[str, str]) -> None:
        self._directory, self._options = directory, dict(options)
        self._read: dict[tuple[str, int], tuple[int, int]] = {}
        """Lines of a log that were returned, and their end, to skip them next time."""

    @property
    def traits(self) -> base.Traits:
        return base.Traits(is_elsewhere=False)

    def plan(self, order: base.LaunchOrder) -> base.LaunchPlan:
        commands = _commands(order, has_secrets=False)
        data = [_shown(command, order) for command in commands]
        return base.as_json(data)

    def launch(self, order: base.LaunchOrder, *, keep: base.Keep) -> base.Handle:
        commands = _commands(order, has_secrets=True)
        files = self._files(order.id)
        files.make()
        handle = order.handle(
            ENGINE,
            {"directory": str(files.directory)},
            options=self._options,
            begun_at_s=time.time(),
        )
        keep(handle)
        form = {
            "islands": [vars(command) for command in commands],
            "restarts": order.spec.restarts.to_dict(),
        }
        _begin(files, json.dumps(form).encode())
        return handle

    def poll(self, handle: base.Handle) -> tuple[base.Report, ...]:
        records = {record.report.index: record for record in self._records(handle)}
        return tuple(
            records[index].report if index in records else _lost(handle, index)
            for index in handle.indexes
        )

    def logs(self, handle: base.Handle, index: int, *, after: int = 0) -> list[str]:
        num_read, offset = self._read.get((handle.id, index), (0, 0))
        if num_read > after:
            num_read, offset = 0, 0
        lines, end = self._files(handle.id).lines(index, after - num_read, offset)
        if lines:
            self._read[handle.id, index] = after + len(lines), end
        return lines

    def cancel(
        self,
        handle: base.Handle,
        *,
        indexes: Collection[int] | None = None,
        grace_s: float = base.GRACE_S,
    ) -> None:
        files = self._files(handle.id)
        if not files.directory.is_dir():
            return
        cancelled = set(handle.indexes if indexes is None else indexes)
        # A supervisor that starts only now finds the request, and starts nothing.
        files.write_request(cancelled, grace_s)
        if not files.has_supervisor():
            _end_without_supervisor(
                [record for record in files.read_state() or () if _is_live(record)],
                cancelled,
                grace_s,
            )

    def _files(self, launch: str) -> LaunchFiles:
        return LaunchFiles(self._directory / launch)

    def _records(self, handle: base.Handle) -> list[IslandRecord]:
        """Return the stored records, corrected if the supervisor has ended."""
        files = self._files(handle.id)
        # In this order: a supervisor that ends in between has written the final state.
        is_led = files.has_supervisor()
        records = files.read_state() or []
        return records if is_led else [_corrected(record) for record in records]


def _commands(order: base.LaunchOrder, *, has_secrets: bool) -> list[IslandCommand]:
    """Return the command of each island.

    Raises:
        UsageError: this machine cannot fulfil the spec.
    """
    spec = order.spec
    _require_possible(spec)
    require_room(order)
    shares = device_shares(order, visible_devices(os.environ))
    environment = {**thread_limits(order, os.environ), **spec.environment}
    if has_secrets:
        environment |= {name: value.reveal() for name, value in order.values.items()}
    return [
        IslandCommand(
            index,
            spec.island(index),
            _argv(order, index),
            {
                **environment,
                **shares[index],
                **island_variables(spec.run, spec.island(index), index),
            },
            None if spec.code else str(Path(spec.directory or ".").absolute()),
            is_python(spec.command),
        )
        for index in order.indexes
    ]


def _argv(order: base.LaunchOrder, index: int) -> list[str]:
    """Return the argv of the command, or of the bootstrap if code has to be fetched."""
    spec = order.spec
    if spec.code:
        return bootstrap_argv(spec, index=index, python=sys.executable)
    return full_argv(spec.command, processes=spec.processes, python=sys.executable)


_NO_MEANING = (
    "{} has no meaning on this machine, where islands run in the Python that launches "
    "them. Leave it out."
)
_REFUSALS = {
    "image": _NO_MEANING,
    "requirements": _NO_MEANING,
    "time_limit_s": "{} is for engines that have limits, and this machine has none. "
    "Leave it out.",
}


def _require_possible(spec: IslandSpec) -> None:
    refuse_fields(spec, _REFUSALS)
    refuse_stored_secrets(spec, "this machine")
    if spec.code is None:
        _require_command(spec.command, Path(spec.directory or "."))


def _require_command(command: tuple[str, ...], directory: Path) -> None:
    """Check that the command can be run, before three crashes in a row show it."""
    argv = python_argv(command)
    if argv is not None and argv[0] != "-m" and not (directory / argv[0]).is_file():
        raise UsageError(
            f"There is no script {argv[0]!r} in {directory.absolute()}. Give its path "
            "as seen from there."
        )
    program = full_argv(command, processes=1, python=sys.executable)[0]
    path = str(directory / program) if "/" in program else program
    if argv is None and shutil.which(path) is None:
        raise UsageError(
            f"{program!r} cannot be run: there is no such program. Write the command "
            "after --, for example: -- python train.py"
        )


def _shown(command: IslandCommand, order: base.LaunchOrder) -> dict[str, Any]:
    return {
        "island": command.name,
        "words": list(command.argv),
        "directory": command.directory,
        "environment": dict(command.environment),
        "secrets": dict(order.spec.secrets),
    }


def _begin(files: LaunchFiles, commands: bytes) -> None:
    """Start the supervisor, and return when it has written its first state."""
    with files.supervisor_log.open("wb") as output:
        done = subprocess.run(
            [sys.executable, "-m", MODULE, str(files.directory)],
            input=commands,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    until_s = time.monotonic() + STARTS_S
    while done.returncode == 0 and time.monotonic() < until_s:
        if files.state.exists():
            return
        time.sleep(LOOK_S)
    last_output = files.supervisor_log.read_text(errors="replace").strip()[-1000:]
    raise RemoteError(
        f"The supervisor of {files.directory.name} did not start: "
        f"{last_output or 'it printed nothing'}. Its log is {files.supervisor_log}."
    )


def _lost(handle: base.Handle, index: int) -> base.Report:
    reason = "this machine has no record of it"
    return base.Report(
        index=index, name=handle.island(index), state=base.State.LOST, reason=reason
    )


def _is_live(record: IslandRecord) -> bool:
    return record.pid is not None and process_identity(record.pid) == record.identity


def _corrected(record: IslandRecord) -> IslandRecord:
    """Return the record of an island whose supervisor has ended."""
    if record.report.state.is_over:
        return record
    state = base.State.RUNNING if _is_live(record) else base.State.LOST
    return replace(record, report=replace(record.report, state=state, reason=UNLED))


def _end_without_supervisor(
    records: list[IslandRecord], cancelled: set[int], grace_s: float
) -> None:
    """End islands without a supervisor: SIGTERM, and SIGKILL after `grace_s`."""
    remaining = [
        record for record in records if record.report.index in cancelled and record.pid
    ]
    for record in remaining:
        send(record.pid or 0, signal.SIGTERM, is_for_one=True)
    until_s = time.monotonic() + grace_s
    while any(_is_live(record) for record in remaining) and time.monotonic() < until_s:
        time.sleep(LOOK_S)
    for record in remaining:
        if _is_live(record):
            send(record.pid or 0, signal.SIGKILL)


VISIBLE = "CUDA_VISIBLE_DEVICES"
THREADS = "OMP_NUM_THREADS"
_DEVICE = re.compile(r"nvidia(\d+)")


def visible_devices(
    environment: Mapping[str, str], *, dev: Path = Path("/dev")
) -> list[str]:
    """Return the accelerators that can be seen, as CUDA_VISIBLE_DEVICES names them."""
    value = environment.get(VISIBLE)
    if value is not None:
        return [device.strip() for device in value.split(",") if device.strip()]
    matches = (_DEVICE.fullmatch(device.name) for device in dev.glob("nvidia*"))
    return sorted((match[1] for match in matches if match), key=int)


def device_shares(
    order: base.LaunchOrder, visible: Sequence[str]
) -> dict[int, dict[str, str]]:
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
    num_devices = wanted or len(visible) // count
    if not num_devices:
        return {index: {} for index in order.indexes}
    return {
        index: {
            VISIBLE: ",".join(visible[index * num_devices : (index + 1) * num_devices])
        }
        for index in order.indexes
    }


def thread_limits(
    order: base.LaunchOrder, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return a limit of threads per process, unless the user has set one.

    By default every library uses all cores: four islands on two would be slower than
    one.
    """
    if THREADS in environment or THREADS in order.spec.environment:
        return {}
    cores = order.spec.resources.cpus or cores_here() / order.indexes.stop
    return {THREADS: str(max(1, int(cores / order.spec.processes)))}


def cores_here() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def require_room(order: base.LaunchOrder) -> None:
    """Check that the machine has the cores and the memory of all islands.

    Raises:
        UsageError: it has less.
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


@dataclass
class _Supervised:
    """The files of a launch, and the SIGTERM of its supervisor."""

    files: LaunchFiles
    indexes: Sequence[int]
    signals: Sequence[int]
    written: list[IslandRecord] = field(default_factory=list)

    def end_requests(self, now_s: float) -> Mapping[int, EndRequest]:
        """Return the islands of a request; all of them after SIGTERM."""
        if self.signals:
            return dict.fromkeys(self.indexes, EndRequest(base.GRACE_S))
        request = None
        with suppress(DiskError):
            request = self.files.read_request()
        if request is None:
            return {}
        indexes, grace_s = request
        return dict.fromkeys(indexes, EndRequest(grace_s))

    def deliver(self, reports: Sequence[base.Report], now_s: float) -> bool:
        records = [_record(report) for report in reports]
        if records != self.written:
            with suppress(DiskError):  # the next iteration writes it again
                self.files.write_state(records)
                self.written = records
        return records == self.written


def _record(report: base.Report) -> IslandRecord:
    pid = int(report.host.split()[1]) if report.host else None
    return IslandRecord(report, pid, None if pid is None else process_identity(pid))


def main() -> None:
    """Read the commands, release the launching process, and lead the islands."""
    files = LaunchFiles(Path(sys.argv[1]))
    form = json.load(sys.stdin)
    commands = [IslandCommand(**command) for command in form["islands"]]
    restarts = Restarts.from_dict(form["restarts"])
    sys.stdout.flush()
    if os.fork():
        os._exit(0)
    os.setsid()
    supervisors = [
        IslandSupervisor(command, restarts, log=files.log(command.index))
        for command in commands
    ]
    indexes = [command.index for command in commands]
    signals = received_signals(signal.SIGTERM)
    with files.held():
        supervise(supervisors, _Supervised(files, indexes, signals))


if __name__ == "__main__":
    main()
