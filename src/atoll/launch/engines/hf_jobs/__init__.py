"""Islands as jobs of Hugging Face, one job each.

Start reading at `HfJobsLauncher`, then `calls`.

Jobs are found by labels, so a launch of which no answer came back can be ended too. In
each a leader starts the command again by the restart policy; the Hub itself starts a
job again only if the option `attempts` says so.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from huggingface_hub import HfApi, JobInfo, get_token
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from atoll.errors import Refused, Unreachable, UsageError
from atoll.launch.base import GRACE_S, Keep, Launcher, Order, Plan, Serving, Traits
from atoll.launch.engines.hf_jobs.calls import (
    ENGINE,
    INDEX,
    LAUNCH,
    HfJobsOptions,
    job_calls,
    url,
)
from atoll.launch.handle import Handle
from atoll.launch.leading import TOLD_TO_GO
from atoll.launch.options import read_options
from atoll.launch.states import Report, State

_STATES = {
    "SCHEDULING": State.PENDING,
    "RUNNING": State.RUNNING,
    "COMPLETED": State.FINISHED,
    "ERROR": State.FAILED,
    "CANCELED": State.CANCELLED,
    "DELETED": State.CANCELLED,
}
_EXIT_CODE = re.compile(r"exit code:? *(\d+)", re.IGNORECASE)


def open_launcher(options: Mapping[str, str]) -> Launcher:
    """Return the launcher of whoever is logged in at the Hub."""
    read = read_options(HfJobsOptions, options, engine=ENGINE)
    if get_token() is None:
        raise UsageError(
            "Nobody is logged in at Hugging Face. Run `hf auth login`, or set HF_TOKEN "
            "to a token that may start jobs."
        )
    return HfJobsLauncher(HfApi(endpoint=read.endpoint), read, options)


class HfJobsLauncher:
    """Starts jobs and asks for them; what it knows is at the Hub and in handles."""

    def __init__(
        self, hub: HfApi, read: HfJobsOptions, options: Mapping[str, str]
    ) -> None:
        self._hub, self._read, self._options = hub, read, dict(options)

    @property
    def traits(self) -> Traits:
        # A job that is started again elsewhere would begin its run anew.
        kept = {key: it for key, it in self._options.items() if key != "attempts"}
        serving = Serving(
            is_in_sight=False,
            port=self._read.port,
            options={**kept, "flavor": self._read.coordinator_flavor},
        )
        return Traits(serving=serving)

    def plan(self, order: Order) -> Plan:
        calls = job_calls(order, self._read)
        secrets = sorted(order.values)
        data = [{"run_job": {**each, "secrets": secrets}} for each in calls]
        where = url(order, self._read) if order.is_coordinator else None
        return Plan(data, json.dumps(data, indent=2) + "\n", where)

    def launch(self, order: Order, *, keep: Keep) -> Handle:
        calls, where = job_calls(order, self._read), self.plan(order).url
        namespace = self._namespace()
        reference = {"namespace": namespace, "jobs": {}}
        handle = order.handle(
            ENGINE,
            reference,
            options=self._options,
            begun_at_s=time.time(),
            run=where,
        )
        if self._jobs(handle):
            raise UsageError(
                f"{order.id!r} was launched at Hugging Face already. Launch under "
                "another name."
            )
        keep(handle)
        secrets = {name: value.reveal() for name, value in order.values.items()}
        jobs: dict[str, str] = {}
        for index, call in zip(order.indexes, calls, strict=True):
            given = {**call, "namespace": namespace, "secrets": secrets or None}
            jobs[str(index)] = self._start(order.spec.island(index), given)
            # Each by itself: what has just begun need not be in a list yet.
            handle = replace(handle, reference={**reference, "jobs": dict(jobs)})
            keep(handle)
        return handle

    def poll(self, handle: Handle) -> tuple[Report, ...]:
        jobs = self._jobs(handle)
        return tuple(
            _report(handle, index, jobs.get(index)) for index in handle.indexes
        )

    def logs(self, handle: Handle, index: int, *, after: int = 0) -> list[str]:
        job = self._jobs(handle).get(index)
        if job is None:
            return []
        with _told(f"read the log of {handle.island(index)}", absent_is_fine=True):
            said = self._hub.fetch_job_logs(
                job_id=job.id, namespace=handle.reference["namespace"]
            )
            return [line for each in said for line in each.splitlines()][after:]
        return []

    def cancel(
        self,
        handle: Handle,
        *,
        indexes: Collection[int] | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        jobs = self._jobs(handle)
        going = handle.indexes if indexes is None else sorted(indexes)
        for index in going:
            job = jobs.get(index)
            if job is None or _report(handle, index, job).state.is_over:
                continue
            with _told(f"cancel {handle.island(index)}", absent_is_fine=True):
                self._hub.cancel_job(
                    job_id=job.id, namespace=handle.reference["namespace"]
                )

    def _start(self, island: str, given: Mapping[str, Any]) -> str:
        """Start a job, and return its id."""
        try:
            with _told(f"start {island}"):
                return str(self._hub.run_job(**given).id)
        except ValueError as exc:  # what the SDK itself refuses to send
            raise UsageError(f"Hugging Face cannot start {island}: {exc}.") from exc

    def _namespace(self) -> str:
        if self._read.namespace is not None:
            return self._read.namespace
        with _told("ask who you are"):
            return str(self._hub.whoami()["name"])

    def _jobs(self, handle: Handle) -> dict[int, JobInfo]:
        """Return the jobs of a launch that the Hub knows, by their islands' indexes."""
        namespace = handle.reference["namespace"]
        with _told("list jobs"):
            listed = self._hub.list_jobs(
                labels={LAUNCH: handle.id}, namespace=namespace
            )
            found = {_index(each): each for each in listed if _is_of(handle, each)}
        for index, known in handle.reference["jobs"].items():
            if int(index) not in found:  # a list need not go back to all that was
                with _told("ask for a job", absent_is_fine=True):
                    job = self._hub.inspect_job(job_id=known, namespace=namespace)
                    found[int(index)] = job
        return found


def _index(job: JobInfo) -> int:
    said = (job.labels or {}).get(INDEX, "")
    return int(said) if said.isdecimal() else -1


def _is_of(handle: Handle, job: JobInfo) -> bool:
    """Return whether a job is an island, and no copy of one: copies have its labels."""
    known = handle.reference["jobs"].get(str(_index(job)))
    return _index(job) in handle.indexes and known in (None, job.id)


def _report(handle: Handle, index: int, job: JobInfo | None) -> Report:
    name = handle.island(index)
    if job is None:
        return Report(index=index, name=name, state=State.LOST)
    stage, why = str(getattr(job.status.stage, "value", job.status.stage)), ""
    state = _STATES.get(stage)
    said = job.status.message or ""
    code = _EXIT_CODE.search(said)
    if state is None:
        # It is more likely on its way than over, and whoever waits can read why.
        state, why = State.PENDING, f"its stage is {stage!r}, which is not known here"
    elif state is State.FAILED:
        why = said or "ERROR"
        if code is not None and int(code[1]) == TOLD_TO_GO:
            state = State.CANCELLED
    elif state is State.FINISHED:
        code = None
    return Report(
        index=index,
        name=name,
        state=state,
        exit_code=0 if state is State.FINISHED else int(code[1]) if code else None,
        why=why,
        place=f"job {job.id}",
    )


@contextmanager
def _told(what: str, *, absent_is_fine: bool = False) -> Iterator[None]:
    """Let errors of the SDK become ours."""
    try:
        yield
    except HfHubHTTPError as exc:
        status = exc.response.status_code
        said = exc.server_message or str(exc)
        if status == 404 and absent_is_fine:
            return
        if status in (401, 402, 403):
            raise Refused(
                f"Hugging Face does not let you {what} ({status}): {said}. The token "
                "needs the right to start jobs there, and its owner a way to pay."
            ) from exc
        if 400 <= status < 500 and status != 429:
            raise UsageError(f"Hugging Face cannot {what} ({status}): {said}.") from exc
        raise Unreachable(f"Hugging Face could not {what} ({status}): {said}.") from exc
    except OfflineModeIsEnabled as exc:
        raise UsageError(
            f"Hugging Face cannot be asked to {what}: HF_HUB_OFFLINE is set. Unset it."
        ) from exc
    except json.JSONDecodeError as exc:  # a proxy or a portal has answered
        raise Unreachable(f"Hugging Face did not answer to {what}: {exc}.") from exc
    except Exception as exc:
        if not type(exc).__module__.startswith("httpx"):
            raise
        raise Unreachable(f"Hugging Face did not answer to {what}: {exc}.") from exc
