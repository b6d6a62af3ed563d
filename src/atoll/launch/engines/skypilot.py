"""Islands as managed jobs of SkyPilot, one each.

Start reading at `SkyPilotLauncher`, then `tasks`: an island as a task in SkyPilot's
YAML. The calls of the SDK come last, and turn its errors into ours. Most calls return
the id of a request, whose result `sky.get` waits for. The server continues it even if
no process waits any more.

A managed job is named by its launch, and found again in SkyPilot's queue by that name;
until it is there, a handle has the request for it.
In each a leader restarts the command by the restart policy; SkyPilot itself replaces a
lost machine.
"""

from __future__ import annotations

import copy
import io
import math
import re
import shlex
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import sky
import yaml
from sky import exceptions as faults

from atoll.errors import Refused, Unreachable, UsageError
from atoll.launch.base import (
    GRACE_S,
    Handle,
    Keep,
    Launcher,
    LaunchOrder,
    LaunchPlan,
    Report,
    State,
    Traits,
    read_options,
)
from atoll.launch.job_leader import EXIT_CANCELLED, leader_argv
from atoll.launch.spec import IslandSpec, Resources, in_engine
from atoll.security import Secret

CANCELLING = "CANCELLING"
STATES = {
    "PENDING": State.PENDING,
    "SUBMITTED": State.PENDING,
    "STARTING": State.PENDING,
    "RUNNING": State.RUNNING,
    "WINDING_DOWN": State.RUNNING,
    "RECOVERING": State.RESTARTING,
    CANCELLING: State.RUNNING,
    "SUCCEEDED": State.FINISHED,
    "CANCELLED": State.CANCELLED,
    "FAILED": State.FAILED,
    "FAILED_SETUP": State.FAILED,
    "FAILED_PRECHECKS": State.FAILED,
    "FAILED_NO_RESOURCE": State.FAILED,
    "FAILED_CONTROLLER": State.FAILED,
}

_EXIT_CODE = re.compile(r"exit code (\d+)")


def open_launcher(options: Mapping[str, str]) -> Launcher:
    """Return the launcher of whoever SkyPilot's server takes this user for."""
    return SkyPilotLauncher(
        read_options(SkyPilotOptions, options, engine=ENGINE), options
    )


class SkyPilotLauncher:
    """Starts managed jobs; what it knows is at SkyPilot's server and in handles."""

    def __init__(self, read: SkyPilotOptions, options: Mapping[str, str]) -> None:
        self._read, self._options = read, dict(options)

    @property
    def traits(self) -> Traits:
        return Traits()

    def plan(self, order: LaunchOrder) -> LaunchPlan:
        data = tasks(order, self._read)
        written = [yaml.safe_dump(each, sort_keys=False) for each in data]
        return LaunchPlan(data, "---\n".join(written))

    def launch(self, order: LaunchOrder, *, keep: Keep) -> Handle:
        asked = tasks(order, self._read)
        handle = order.handle(ENGINE, {}, options=self._options, begun_at_s=time.time())
        if _records(handle):
            raise UsageError(
                f"{order.id!r} was launched on SkyPilot already. Launch under "
                "another name."
            )
        keep(handle)
        for index, task in zip(order.indexes, asked, strict=True):
            request = request_job(task, order.values)
            # Whoever is interrupted while it waits withdraws it by what was kept.
            keep(replace(handle, reference={"requests": {str(index): request}}))
            await_start(task["name"], request)
        keep(handle)
        return handle

    def poll(self, handle: Handle) -> tuple[Report, ...]:
        found = _records(handle)
        return tuple(_report(handle, each, found.get(each)) for each in handle.indexes)

    def logs(self, handle: Handle, index: int, *, after: int = 0) -> list[str]:
        record = _records(handle).get(index)
        if record is None:
            return []
        is_live = not STATES[_status(record)].is_over
        return log_lines(int(record.job_id), is_live=is_live)[after:]

    def cancel(
        self,
        handle: Handle,
        *,
        indexes: Collection[int] | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        wanted = handle.indexes if indexes is None else indexes
        asked = handle.reference.get("requests", {})
        if going := [each for index, each in asked.items() if int(index) in wanted]:
            withdraw_requests(
                going
            )  # first: what has come of them is in the queue then
        ids = [
            int(record.job_id)
            for index, record in _records(handle).items()
            if index in wanted and _is_to_be_told(record)
        ]
        if ids:
            cancel_jobs(ids, grace_s=grace_s)


def _records(handle: Handle) -> dict[int, Any]:
    """Return what SkyPilot knows of each island, by index."""
    names = {job_name(handle.id, index): index for index in handle.indexes}
    found = find_jobs(handle.id, names)
    return {names[name]: record for name, record in found.items()}


def _is_to_be_told(record: Any) -> bool:
    return _status(record) != CANCELLING and not STATES[_status(record)].is_over


def _status(record: Any) -> str:
    status = str(getattr(record.status, "value", record.status))
    if status not in STATES:
        raise UsageError(
            f"SkyPilot says that {record.job_name} is {status!r}, which is not known "
            "here. Look with `sky jobs queue`, and take a newer Atoll."
        )
    return status


def _report(handle: Handle, index: int, record: Any) -> Report:
    name = handle.island(index)
    if record is None:
        return Report(index=index, name=name, state=State.LOST)
    status = _status(record)
    state, said = STATES[status], record.failure_reason or ""
    code = _EXIT_CODE.search(said) if state is State.FAILED else None
    return Report(
        index=index,
        name=name,
        state=state,
        restarts=record.recovery_count or 0,
        exit_code=None if code is None else int(code[1]),
        reason=_why(status, said),
        host=record.infra or f"job {record.job_id}",
    )


def _why(status: str, said: str) -> str:
    if STATES[status] is State.FAILED:
        return f"{status}: {said}" if said else status
    return status if status in (CANCELLING, "RECOVERING") else ""


ENGINE = "skypilot"
DOCKER = "docker:"
KEPT = "secrets:"
"""Before the name of a secret that SkyPilot keeps itself."""

GIB = 2**30


@dataclass(frozen=True)
class SkyPilotOptions:
    """What `--option` takes."""

    infra: str | None = None
    """Where islands run, in SkyPilot's words: `aws`, `gcp/us-east1`, `k8s/context`."""

    use_spot: bool = False
    """Whether they take machines that may be preempted."""


def job_name(launch: str, index: int) -> str:
    """Return the name of an island's managed job."""
    return f"{launch}-{index}"


def tasks(order: LaunchOrder, options: SkyPilotOptions) -> list[dict[str, Any]]:
    """Return every island's task. Values of secrets are null, and given at launch.

    Raises:
        UsageError: a managed job cannot be what the spec asks for.
    """
    spec = order.spec
    resources, setup = _resources(spec, options), _setup(spec)
    return [
        {
            "name": job_name(order.id, index),
            "resources": resources,
            "envs": dict(spec.environment),
            "secrets": _secrets(order),
            **setup,
            "run": _run(spec, index),
        }
        for index in order.indexes
    ]


def _run(spec: IslandSpec, index: int) -> str:
    # The leader takes the shell's place, so that it hears what the shell would.
    return f"exec {shlex.join(leader_argv(spec, index, limit_s=math.inf))}"


def _setup(spec: IslandSpec) -> dict[str, str]:
    if spec.image is None and not spec.requirements:
        raise UsageError(
            "SkyPilot has nothing to run an island in. Give --image with Atoll in it, "
            "or say how pip gets it: --requirement atoll."
        )
    if not spec.requirements:
        return {}
    return {"setup": f"python -m pip install --quiet {shlex.join(spec.requirements)}"}


def _resources(spec: IslandSpec, options: SkyPilotOptions) -> dict[str, Any]:
    asked = spec.resources
    if asked.time_limit_s is not None:
        raise UsageError(
            f"time_limit_s={asked.time_limit_s:g} is given, and SkyPilot ends nothing "
            "by time. Leave it out, and use `atoll cancel`."
        )
    said = {
        "infra": options.infra,
        "use_spot": options.use_spot,
        "cpus": None if asked.cpus is None else f"{asked.cpus:g}+",
        "memory": _memory(asked),
        "accelerators": _accelerators(asked),
        "image_id": None if spec.image is None else _image_id(spec.image),
        # A failed command is the leader's to start again; a leader that was told to go
        # and not by a cancel was on a machine that goes away.
        "job_recovery": {
            "max_restarts_on_errors": 0,
            "recover_on_exit_codes": [int(EXIT_CANCELLED)],
        },
    }
    return {key: each for key, each in said.items() if each is not None}


def _image_id(image: str) -> str:
    return image if image.startswith(DOCKER) else f"{DOCKER}{image}"


def _memory(asked: Resources) -> str | None:
    if asked.memory_bytes is None:
        return None
    return f"{math.ceil(asked.memory_bytes / GIB * 100) / 100:g}+"


def _accelerators(asked: Resources) -> dict[str, int] | None:
    if asked.accelerators == 0:
        return None
    if asked.accelerator is None:
        raise UsageError(
            f"accelerators={asked.accelerators} of which kind? SkyPilot wants its "
            "name: --accelerator A100."
        )
    return {asked.accelerator: asked.accelerators}


def _secrets(order: LaunchOrder) -> dict[str, None]:
    """Return the secrets by name: those given at launch, and those SkyPilot keeps."""
    of_engine, kept = in_engine(order.spec.secrets), []
    for variable, named in of_engine.items():
        if named.rpartition(".")[2] != variable:
            raise UsageError(
                f"The secret {variable} is to be SkyPilot's {named!r}, which sets its "
                f"variables under their own names. Give {variable}=engine:{variable}."
            )
        kept.append(f"{KEPT}{named}")
    # A plan that is only looked at has no values yet, and names them all the same.
    given = (order.spec.secrets.keys() - of_engine.keys()) | order.values.keys()
    return dict.fromkeys([*sorted(given), *kept])


FIELDS = ("job_id", "job_name", "status", "recovery_count", "failure_reason", "infra")

_MAY_NOT = (
    faults.ApiServerAuthenticationError,
    faults.CloudUserIdentityError,
    faults.InvalidCloudCredentials,
    faults.NoCloudAccessError,
    faults.PermissionDeniedError,
    faults.UserRequestRejectedByPolicy,
)
_WRONG = (
    ValueError,
    faults.APINotSupportedError,
    faults.APIVersionMismatchError,
    faults.InvalidClusterNameError,
    faults.NotSupportedError,
    faults.ProvisionPrechecksError,
    faults.ResourcesMismatchError,
    faults.ResourcesUnavailableError,
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_SAID = re.compile(r"\([^()]*\bpid=\d+[^()]*\) ?(.*)")
"""A line of the island; what is without such a beginning is SkyPilot's own."""


def request_job(task: Mapping[str, Any], values: Mapping[str, Secret]) -> str:
    """Ask for a managed job, and return the id of that request."""
    name = str(task["name"])
    with sdk_errors(f"start {name}"):
        given = [(key, each.reveal()) for key, each in values.items()]
        # The parser takes things out of what it is given.
        parsed = sky.Task.from_yaml_config(
            copy.deepcopy(dict(task)), secrets_overrides=given
        )
        return str(sky.jobs.launch(parsed, name=name))


def await_start(name: str, request: str) -> None:
    """Return when SkyPilot has a managed job that was asked for."""
    with sdk_errors(f"start {name}"):
        sky.get(request)


def withdraw_requests(requests: Sequence[str]) -> None:
    """Have requests left undone; nothing happens to those that were answered."""
    with sdk_errors("withdraw what was asked for"):
        sky.get(sky.api_cancel(list(requests), silent=True))


def find_jobs(launch: str, names: Iterable[str]) -> dict[str, Any]:
    """Return the records of a launch's managed jobs that SkyPilot has, by name."""
    wanted = set(names)
    with sdk_errors(f"find {launch}"):
        found = _queue(launch)
    known = sorted(found, key=lambda record: int(record.job_id))
    return {each.job_name: each for each in known if each.job_name in wanted}


def _queue(name: str) -> list[Any]:
    try:
        # A controller that has fallen asleep knows what has ended: it is woken.
        request = sky.jobs.queue_v2(refresh=True, name_match=name, fields=FIELDS)
        records, *_ = sky.get(request)
    except faults.ClusterNotUpError:
        return []  # there is no controller, and never was a managed job
    return list(records)


def log_lines(job_id: int, *, is_live: bool) -> list[str]:
    """Return the lines an island has said, without what SkyPilot says itself.

    Of one that is live, a line that is still being said is left out.
    """
    said = io.StringIO()
    with sdk_errors("read a log"):
        sky.jobs.tail_logs(job_id=job_id, follow=False, output_stream=said)
    texts = said.getvalue().split("\n")
    if is_live:
        del texts[-1]
    plain = (_COLOUR.sub("", each).rstrip("\r") for each in texts)
    return [found[1] for found in map(_SAID.fullmatch, plain) if found is not None]


def cancel_jobs(job_ids: Sequence[int], *, grace_s: float) -> None:
    """Have managed jobs told to go, and ended."""
    with sdk_errors("cancel"):
        request = sky.jobs.cancel(
            job_ids=list(job_ids), graceful=True, graceful_timeout=math.ceil(grace_s)
        )
        sky.get(request)


@contextmanager
def sdk_errors(what: str) -> Iterator[None]:
    """Let errors of the SDK become ours."""
    try:
        yield
    except _MAY_NOT as exc:
        raise Refused(
            f"SkyPilot does not let you {what}: {exc}. Run `sky check`, or `sky api "
            "login` if its server is elsewhere."
        ) from exc
    except _WRONG as exc:
        raise UsageError(f"SkyPilot cannot {what}: {exc}.") from exc
    except Exception as exc:  # its errors have no common class
        raise Unreachable(f"SkyPilot did not answer to {what}: {exc}.") from exc
