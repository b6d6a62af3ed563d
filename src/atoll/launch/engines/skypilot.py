"""Islands as managed jobs of SkyPilot, one each.

Start reading at `ManagedJobs`, then `tasks`: an island as a task in SkyPilot's
YAML. The calls of the SDK come last, and turn its errors into ours. Most calls return
the id of a request, whose result `sky.get` waits for. The server continues it even if
no process waits for it.

A managed job is named by its launch, and found again in SkyPilot's queue by that name;
until the queue has it, a handle has the request for it.
In each a leader restarts the command by the restart policy; SkyPilot itself replaces a
lost machine.
"""

from __future__ import annotations

import copy
import io
import math
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import sky
import yaml
from sky import exceptions as faults

from atoll.errors import Refused, Unreachable, UsageError
from atoll.launch import base
from atoll.launch.job_launcher import FoundJob, JobLauncher, JobsToEnd, live_jobs
from atoll.launch.leader import EXIT_CANCELLED, leader_argv
from atoll.launch.spec import IslandSpec, Resources, in_engine
from atoll.security import Secret

CANCELLING = "CANCELLING"
STATES = {
    "PENDING": base.State.PENDING,
    "SUBMITTED": base.State.PENDING,
    "STARTING": base.State.PENDING,
    "RUNNING": base.State.RUNNING,
    "WINDING_DOWN": base.State.RUNNING,
    "RECOVERING": base.State.RESTARTING,
    CANCELLING: base.State.RUNNING,
    "SUCCEEDED": base.State.FINISHED,
    "CANCELLED": base.State.CANCELLED,
    "FAILED": base.State.FAILED,
    "FAILED_SETUP": base.State.FAILED,
    "FAILED_PRECHECKS": base.State.FAILED,
    "FAILED_NO_RESOURCE": base.State.FAILED,
    "FAILED_CONTROLLER": base.State.FAILED,
}

_EXIT_CODE = re.compile(r"exit code (\d+)")


def open_launcher(options: Mapping[str, str]) -> base.Launcher:
    """Return the launcher of this user at SkyPilot's server."""
    read = base.read_options(SkyPilotOptions, options, engine=ENGINE)
    return JobLauncher(ManagedJobs(read), engine=ENGINE, options=options)


class ManagedJobs:
    """The managed jobs of one user at SkyPilot's server."""

    def __init__(self, read: SkyPilotOptions) -> None:
        self._read = read

    def plan(self, order: base.LaunchOrder) -> base.LaunchPlan:
        data = tasks(order, self._read)
        written = [yaml.safe_dump(task, sort_keys=False) for task in data]
        return base.LaunchPlan(data, "---\n".join(written))

    def begin(self, order: base.LaunchOrder) -> dict[str, Any]:
        return {}

    def submit(
        self, order: base.LaunchOrder, plan: base.LaunchPlan, handle: base.Handle
    ) -> Iterator[base.Handle]:
        for index, task in zip(order.indexes, plan.data, strict=True):
            request = request_job(task, order.values)
            # A caller that is interrupted here withdraws it by the kept handle.
            yield replace(handle, reference={"requests": {str(index): request}})
            await_start(task["name"], request)
        yield handle

    def find(
        self, handle: base.Handle, indexes: Collection[int]
    ) -> dict[int, FoundJob]:
        names = {job_name(handle.id, index): index for index in handle.indexes}
        return {
            names[name]: FoundJob(_report(handle, names[name], record), record)
            for name, record in find_jobs(handle.id, names).items()
        }

    def lines(self, handle: base.Handle, index: int, job: Any) -> list[str]:
        is_live = not STATES[_status(job)].is_over
        return log_lines(int(job.job_id), is_live=is_live)

    def end(self, handle: base.Handle, request: JobsToEnd) -> None:
        jobs, requests = request.jobs, handle.reference.get("requests", {})
        withdrawn = [
            started
            for index, started in requests.items()
            if int(index) in request.indexes
        ]
        if withdrawn:
            # Jobs of completed requests are in the queue then.
            withdraw_requests(withdrawn)
            jobs = live_jobs(self.find(handle, request.indexes), request.indexes)
        ids = [
            int(record.job_id)
            for record in jobs.values()
            if _status(record) != CANCELLING
        ]
        if ids:
            cancel_jobs(ids, grace_s=request.grace_s)


def _status(record: Any) -> str:
    status = str(getattr(record.status, "value", record.status))
    if status not in STATES:
        raise UsageError(
            f"SkyPilot reports {record.job_name} as {status!r}, which is unknown "
            "here. Look with `sky jobs queue`, and use a newer Atoll."
        )
    return status


def _report(handle: base.Handle, index: int, record: Any) -> base.Report:
    status = _status(record)
    state, detail = STATES[status], record.failure_reason or ""
    code = _EXIT_CODE.search(detail) if state is base.State.FAILED else None
    return base.Report(
        index=index,
        name=handle.island(index),
        state=state,
        restarts=record.recovery_count or 0,
        exit_code=None if code is None else int(code[1]),
        reason=_reason(status, detail),
        host=record.infra or f"job {record.job_id}",
    )


def _reason(status: str, detail: str) -> str:
    if STATES[status] is base.State.FAILED:
        return f"{status}: {detail}" if detail else status
    return status if status in (CANCELLING, "RECOVERING") else ""


ENGINE = "skypilot"
DOCKER = "docker:"
STORED_PREFIX = "secrets:"
"""The prefix of a secret that SkyPilot stores."""

GIB = 2**30


@dataclass(frozen=True)
class SkyPilotOptions:
    """The options of `--option`."""

    infra: str | None = None
    """Where islands run, as SkyPilot names it: `aws`, `gcp/us-east1`, `k8s/context`."""

    use_spot: bool = False
    """Whether they take machines that may be preempted."""


def job_name(launch: str, index: int) -> str:
    """Return the name of an island's managed job."""
    return f"{launch}-{index}"


def tasks(order: base.LaunchOrder, options: SkyPilotOptions) -> list[dict[str, Any]]:
    """Return every island's task. Values of secrets are null, and given at launch.

    Raises:
        UsageError: a managed job cannot fulfil the spec.
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
    # Exec: the leader receives the signals that are sent to the shell.
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
    needs = spec.resources
    if needs.time_limit_s is not None:
        raise UsageError(
            f"time_limit_s={needs.time_limit_s:g} is given, and SkyPilot ends nothing "
            "by time. Leave it out, and use `atoll cancel`."
        )
    values = {
        "infra": options.infra,
        "use_spot": options.use_spot,
        "cpus": None if needs.cpus is None else f"{needs.cpus:g}+",
        "memory": _memory(needs),
        "accelerators": _accelerators(needs),
        "image_id": None if spec.image is None else _image_id(spec.image),
        # The leader restarts a failed command itself. A leader that received SIGTERM
        # without a cancel was on a machine that is being reclaimed.
        "job_recovery": {
            "max_restarts_on_errors": 0,
            "recover_on_exit_codes": [int(EXIT_CANCELLED)],
        },
    }
    return {key: value for key, value in values.items() if value is not None}


def _image_id(image: str) -> str:
    return image if image.startswith(DOCKER) else f"{DOCKER}{image}"


def _memory(needs: Resources) -> str | None:
    if needs.memory_bytes is None:
        return None
    return f"{math.ceil(needs.memory_bytes / GIB * 100) / 100:g}+"


def _accelerators(needs: Resources) -> dict[str, int] | None:
    if needs.accelerators == 0:
        return None
    if needs.accelerator is None:
        raise UsageError(
            f"accelerators={needs.accelerators} of which kind? SkyPilot wants its "
            "name: --accelerator A100."
        )
    return {needs.accelerator: needs.accelerators}


def _secrets(order: base.LaunchOrder) -> dict[str, None]:
    """Return the secrets by name: those given at launch, and those SkyPilot keeps."""
    in_skypilot, stored = in_engine(order.spec.secrets), []
    for variable, named in in_skypilot.items():
        if named.rpartition(".")[2] != variable:
            raise UsageError(
                f"The secret {variable} is to be SkyPilot's {named!r}, which sets its "
                f"variables under their own names. Give {variable}=engine:{variable}."
            )
        stored.append(f"{STORED_PREFIX}{named}")
    # A plan has no values yet, but must name all secrets.
    variables = (order.spec.secrets.keys() - in_skypilot.keys()) | order.values.keys()
    return dict.fromkeys([*sorted(variables), *stored])


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
_ISLAND_LINE = re.compile(r"\([^()]*\bpid=\d+[^()]*\) ?(.*)")
"""A line of the island; lines without this prefix are SkyPilot's own."""


def request_job(task: Mapping[str, Any], values: Mapping[str, Secret]) -> str:
    """Request a managed job, and return the id of the request."""
    name = str(task["name"])
    with sdk_errors(f"start {name}"):
        overrides = [(key, secret.reveal()) for key, secret in values.items()]
        # The parser removes keys from its argument.
        parsed = sky.Task.from_yaml_config(
            copy.deepcopy(dict(task)), secrets_overrides=overrides
        )
        return str(sky.jobs.launch(parsed, name=name))


def await_start(name: str, request: str) -> None:
    """Wait until SkyPilot has created a requested managed job."""
    with sdk_errors(f"start {name}"):
        sky.get(request)


def withdraw_requests(requests: Sequence[str]) -> None:
    """Cancel requests; completed ones do not change."""
    with sdk_errors("withdraw requests"):
        sky.get(sky.api_cancel(list(requests), silent=True))


def find_jobs(launch: str, names: Iterable[str]) -> dict[str, Any]:
    """Return the records of a launch's managed jobs that SkyPilot has, by name."""
    wanted = set(names)
    with sdk_errors(f"find {launch}"):
        queue = _queue(launch)
    records = sorted(queue, key=lambda record: int(record.job_id))
    return {record.job_name: record for record in records if record.job_name in wanted}


def _queue(name: str) -> list[Any]:
    try:
        # A stopped controller has the records of ended jobs: refresh starts it.
        request = sky.jobs.queue_v2(refresh=True, name_match=name, fields=FIELDS)
        records, *_ = sky.get(request)
    except faults.ClusterNotUpError:
        return []  # without a controller there never was a managed job
    return list(records)


def log_lines(job_id: int, *, is_live: bool) -> list[str]:
    """Return the log lines of an island, without SkyPilot's own.

    The incomplete last line of a live island is left out.
    """
    output = io.StringIO()
    with sdk_errors("read a log"):
        sky.jobs.tail_logs(job_id=job_id, follow=False, output_stream=output)
    texts = output.getvalue().split("\n")
    if is_live:
        del texts[-1]
    plain = (_COLOUR.sub("", text).rstrip("\r") for text in texts)
    return [
        match[1] for match in map(_ISLAND_LINE.fullmatch, plain) if match is not None
    ]


def cancel_jobs(job_ids: Sequence[int], *, grace_s: float) -> None:
    """Send SIGTERM to managed jobs, and end them after `grace_s`."""
    with sdk_errors("cancel"):
        request = sky.jobs.cancel(
            job_ids=list(job_ids), graceful=True, graceful_timeout=math.ceil(grace_s)
        )
        sky.get(request)


@contextmanager
def sdk_errors(action: str) -> Iterator[None]:
    """Translate errors of the SDK."""
    try:
        yield
    except _MAY_NOT as exc:
        raise Refused(
            f"SkyPilot does not let you {action}: {exc}. Run `sky check`, or `sky api "
            "login` if its server is elsewhere."
        ) from exc
    except _WRONG as exc:
        raise UsageError(f"SkyPilot cannot {action}: {exc}.") from exc
    except Exception as exc:  # its errors have no common class
        raise Unreachable(f"SkyPilot did not answer to {action}: {exc}.") from exc
