"""Islands as jobs of Hugging Face, one job each.

Start reading at `HubJobs`, then `job_calls`: the arguments of `HfApi.run_job`.

Jobs are found by labels, so a launch without a response can be ended too. In each job a
leader restarts the command by the restart policy; the Hub itself restarts a job only
with the option `attempts`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from huggingface_hub import HfApi, JobHardware, JobInfo, get_token
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from atoll.errors import Refused, Unreachable, UsageError
from atoll.launch import base
from atoll.launch.job_launcher import FoundJob, JobLauncher, JobsToEnd
from atoll.launch.leader import EXIT_CANCELLED, leader_argv, with_requirements
from atoll.launch.spec import (
    IslandSpec,
    Resources,
    refuse_fields,
    refuse_stored_secrets,
)

_STATES = {
    "SCHEDULING": base.State.PENDING,
    "RUNNING": base.State.RUNNING,
    "COMPLETED": base.State.FINISHED,
    "ERROR": base.State.FAILED,
    "CANCELED": base.State.CANCELLED,
    "DELETED": base.State.CANCELLED,
}
_EXIT_CODE = re.compile(r"exit code:? *(\d+)", re.IGNORECASE)


def open_launcher(options: Mapping[str, str]) -> base.Launcher:
    """Return the launcher of the user who is logged in at the Hub, if one is."""
    read = base.read_options(HfJobsOptions, options, engine=ENGINE)
    # A restarted job has no directory, and would found the run again.
    alike = {key: value for key, value in options.items() if key != "attempts"}
    serving = base.CoordinatorPlacement(
        is_reachable=False,
        port=read.port,
        options={**alike, "flavor": read.coordinator_flavor},
    )
    return JobLauncher(
        HubJobs(HfApi(endpoint=read.endpoint), read),
        engine=ENGINE,
        options=options,
        traits=base.Traits(serving=serving),
    )


class HubJobs:
    """The jobs of one user at the Hub."""

    def __init__(self, hub: HfApi, read: HfJobsOptions) -> None:
        self._api, self._read = hub, read

    @property
    def _hub(self) -> HfApi:
        if get_token() is None:
            raise UsageError(
                "No user is logged in at Hugging Face. Run `hf auth login`, or set "
                "HF_TOKEN to a token that may start jobs."
            )
        return self._api

    def plan(self, order: base.LaunchOrder) -> base.LaunchPlan:
        calls = job_calls(order, self._read)
        secrets = sorted(order.values)
        data = [{"run_job": {**call, "secrets": secrets}} for call in calls]
        run_url = url(order, self._read) if order.is_coordinator else None
        return base.LaunchPlan(data, json.dumps(data, indent=2) + "\n", run_url)

    def begin(self, order: base.LaunchOrder) -> dict[str, Any]:
        return {"namespace": self._namespace(), "jobs": {}}

    def submit(
        self, order: base.LaunchOrder, plan: base.LaunchPlan, handle: base.Handle
    ) -> Iterator[base.Handle]:
        values = {name: value.reveal() for name, value in order.values.items()}
        common = {"namespace": handle.reference["namespace"], "secrets": values or None}
        jobs: dict[str, str] = {}
        for index, call in zip(order.indexes, plan.data, strict=True):
            arguments = {**call["run_job"], **common}
            jobs[str(index)] = self._start(order.spec.island(index), arguments)
            # After each job: a list need not have the newest jobs yet.
            yield replace(handle, reference={**handle.reference, "jobs": dict(jobs)})

    def find(
        self, handle: base.Handle, indexes: Collection[int]
    ) -> dict[int, FoundJob]:
        jobs = self._jobs(handle).items()
        return {
            index: FoundJob(_report(handle, index, job), job) for index, job in jobs
        }

    def lines(self, handle: base.Handle, index: int, job: Any) -> list[str]:
        with _sdk_errors(
            f"read the log of {handle.island(index)}", absent_is_fine=True
        ):
            chunks = self._hub.fetch_job_logs(
                job_id=job.id, namespace=handle.reference["namespace"]
            )
            return [line for chunk in chunks for line in chunk.splitlines()]
        return []

    def end(self, handle: base.Handle, request: JobsToEnd) -> None:
        for index, job in request.jobs.items():
            with _sdk_errors(f"cancel {handle.island(index)}", absent_is_fine=True):
                self._hub.cancel_job(
                    job_id=job.id, namespace=handle.reference["namespace"]
                )

    def _start(self, island: str, arguments: Mapping[str, Any]) -> str:
        """Start a job, and return its id."""
        try:
            with _sdk_errors(f"start {island}"):
                return str(self._hub.run_job(**arguments).id)
        except ValueError as exc:  # the SDK itself refuses to send it
            raise UsageError(f"Hugging Face cannot start {island}: {exc}.") from exc

    def _namespace(self) -> str:
        if self._read.namespace is not None:
            return self._read.namespace
        with _sdk_errors("read your name"):
            return str(self._hub.whoami()["name"])

    def _jobs(self, handle: base.Handle) -> dict[int, JobInfo]:
        """Return the jobs of a launch that the Hub knows, by their islands' indexes."""
        namespace = handle.reference["namespace"]
        with _sdk_errors("list jobs"):
            listed = self._hub.list_jobs(
                labels={LAUNCH: handle.id}, namespace=namespace
            )
            jobs = {_index(job): job for job in listed if _is_of(handle, job)}
        for index, job_id in handle.reference["jobs"].items():
            if int(index) not in jobs:  # a list need not have the oldest jobs
                with _sdk_errors("read a job", absent_is_fine=True):
                    job = self._hub.inspect_job(job_id=job_id, namespace=namespace)
                    jobs[int(index)] = job
        return jobs


def _index(job: JobInfo) -> int:
    label = (job.labels or {}).get(INDEX, "")
    return int(label) if label.isdecimal() else -1


def _is_of(handle: base.Handle, job: JobInfo) -> bool:
    """Return whether a job is an island, and not a copy, which has the same labels."""
    job_id = handle.reference["jobs"].get(str(_index(job)))
    return _index(job) in handle.indexes and job_id in (None, job.id)


def _report(handle: base.Handle, index: int, job: JobInfo) -> base.Report:
    stage, reason = str(getattr(job.status.stage, "value", job.status.stage)), ""
    state = _STATES.get(stage)
    message = job.status.message or ""
    code = _EXIT_CODE.search(message)
    if state is None:
        # It is more likely pending than over, and the user can read the reason.
        state, reason = (
            base.State.PENDING,
            f"its stage is {stage!r}, which is unknown here",
        )
    elif state is base.State.FAILED:
        reason = message or "ERROR"
        if code is not None and int(code[1]) == EXIT_CANCELLED:
            state = base.State.CANCELLED
    elif state is base.State.FINISHED:
        code = None
    return base.Report(
        index=index,
        name=handle.island(index),
        state=state,
        exit_code=0 if state is base.State.FINISHED else int(code[1]) if code else None,
        reason=reason,
        host=f"job {job.id}",
    )


@contextmanager
def _sdk_errors(action: str, *, absent_is_fine: bool = False) -> Iterator[None]:
    """Translate errors of the SDK."""
    try:
        yield
    except HfHubHTTPError as exc:
        status = exc.response.status_code
        message = exc.server_message or str(exc)
        if status == 404 and absent_is_fine:
            return
        if status in (401, 402, 403):
            raise Refused(
                f"Hugging Face does not let you {action} ({status}): {message}. The "
                "token needs the right to start jobs there, and its owner a way to pay."
            ) from exc
        if 400 <= status < 500 and status != 429:
            raise UsageError(
                f"Hugging Face cannot {action} ({status}): {message}."
            ) from exc
        raise Unreachable(
            f"Hugging Face could not {action} ({status}): {message}."
        ) from exc
    except OfflineModeIsEnabled as exc:
        raise UsageError(
            f"Hugging Face cannot {action}: HF_HUB_OFFLINE is set. Unset it."
        ) from exc
    except json.JSONDecodeError as exc:  # the response of a proxy or a portal
        raise Unreachable(f"Hugging Face did not answer to {action}: {exc}.") from exc
    except Exception as exc:
        if not type(exc).__module__.startswith("httpx"):
            raise
        raise Unreachable(f"Hugging Face did not answer to {action}: {exc}.") from exc


ENGINE = "hf_jobs"
LAUNCH, INDEX = "atoll-launch", "atoll-index"
"""The labels of jobs, by which they are found."""

DEFAULT_LIMIT_S = 7 * 24 * 3600.0
"""The Hub's default is half an hour, which would end a training early."""

PREFIX = "HF_NETWORK_GROUP_PREFIX"
"""The variable of a job with the prefix of every alias."""

_INSIDE = re.compile(r"https://atoll-coordinator-[0-9a-f]{8}:\d+")
_FLAVOR = re.compile(r"(?P<kind>[a-z0-9-]+?)(-small|-medium|-large)?(x(?P<num>\d+))?")


@dataclass(frozen=True)
class HfJobsOptions:
    """The options of `--option`."""

    flavor: str | None = None
    """The hardware of one island: `l40sx1`, `a100x8`. Default: by `--accelerator`."""

    namespace: str | None = None
    """The owner of the jobs, who pays. Default: the owner of the token."""

    endpoint: str | None = None
    """The URL of the Hub. Default: that of `huggingface_hub`."""

    base_image: str = "python:3.12"
    """The image in which `--requirement` is installed, without `--image`."""

    attempts: int | None = None
    """Starts of a job by the Hub, at most. Default: one."""

    network_group: str | None = None
    """Jobs of one group reach each other: each island by its name as an alias."""

    coordinator_flavor: str = JobHardware.CPU_BASIC.value
    """The hardware of a coordinator that is a job of the group."""

    port: int = 4711
    """The port of that coordinator."""

    def __post_init__(self) -> None:
        if self.attempts is not None and self.attempts < 1:
            raise UsageError(
                f"attempts={self.attempts}: a job is started 1 time or more."
            )


def job_calls(order: base.LaunchOrder, options: HfJobsOptions) -> list[dict[str, Any]]:
    """Return the arguments of every island's `run_job`, except the secrets' values.

    Raises:
        UsageError: a job cannot fulfil the spec.
    """
    spec = order.spec
    _require_possible(spec)
    limit_s = spec.resources.time_limit_s or DEFAULT_LIMIT_S
    alike = {
        "image": spec.image or options.base_image,
        "env": dict(spec.environment),
        "flavor": flavor(spec.resources, options),
        "timeout": int(limit_s),
        "attempts": options.attempts,
        "namespace": options.namespace,
        "network_group": options.network_group,
    }
    prefix_from = PREFIX if is_of_group(spec.run) else None
    return [
        {
            **alike,
            "name": spec.island(index),
            "labels": {LAUNCH: order.id, INDEX: str(index)},
            "command": with_requirements(
                leader_argv(spec, index, limit_s=limit_s, prefix_from=prefix_from),
                spec.requirements,
            ),
            "network_aliases": _aliases(order, index, options),
        }
        for index in order.indexes
    ]


def url(order: base.LaunchOrder, options: HfJobsOptions) -> str:
    """Return the URL of a coordinator, without the prefix that a job has to add.

    Raises:
        UsageError: jobs do not reach each other.
    """
    if options.network_group is None:
        raise UsageError(
            "Jobs of Hugging Face reach each other in a network group, and none is "
            "named for this coordinator. Give --option network_group=NAME."
        )
    return f"https://{order.id}:{options.port}"


def is_of_group(run: str) -> bool:
    """Return whether a run's coordinator is a job, known here by its alias."""
    return _INSIDE.fullmatch(run) is not None


def _aliases(
    order: base.LaunchOrder, index: int, options: HfJobsOptions
) -> list[str] | None:
    if options.network_group is None:
        return None
    # Several jobs may have one alias, and coordinators of two runs may not.
    return [order.id if order.is_coordinator else order.spec.island(index)]


def flavor(resources: Resources, options: HfJobsOptions) -> str:
    """Return the hardware of one island.

    Raises:
        UsageError: none fits, or it was given twice.
    """
    if options.flavor is not None and resources.accelerators == 0:
        return options.flavor
    if options.flavor is not None:
        raise UsageError(
            f"flavor={options.flavor!r} and accelerators={resources.accelerators} both "
            "choose the hardware. Leave one out."
        )
    if resources.accelerators == 0:
        return JobHardware.CPU_BASIC.value
    wanted = (resources.accelerator, resources.accelerators)
    flavors = {hardware.value: _kind(hardware.value) for hardware in JobHardware}
    for name, has in flavors.items():
        if has == wanted:
            return name
    raise UsageError(
        f"Hugging Face has no flavor with accelerator={wanted[0]!r}, accelerators="
        f"{wanted[1]}. There are {', '.join(flavors)}; or give --option flavor=NAME."
    )


def _kind(name: str) -> tuple[str, int] | None:
    """Return the accelerator of a flavor and their number, from its name."""
    match = _FLAVOR.fullmatch(name)
    if match is None or name.startswith("cpu-"):
        return None
    return match["kind"], int(match["num"] or 1)


def _require_possible(spec: IslandSpec) -> None:
    if spec.image is None and not spec.requirements:
        raise UsageError(
            "hf_jobs has nothing to run an island in. Give --image with Atoll in it, "
            "or say how pip gets it: --requirement atoll."
        )
    refuse_fields(spec, dict.fromkeys(("cpus", "memory_bytes"), _HAS_FLAVORS))
    refuse_stored_secrets(spec, "hf_jobs")


_HAS_FLAVORS = (
    "{} cannot be requested of hf_jobs, which has flavors. Choose one: --option "
    "flavor=NAME."
)
