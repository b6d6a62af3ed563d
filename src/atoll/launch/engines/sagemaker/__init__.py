"""Islands as training jobs of SageMaker, one job each.

Start reading at `SageMakerLauncher`, then `requests` and `inside`.

Jobs are named by their launch, so one of which no answer came back can be ended too.
A job's environment can be read by whoever may describe it, so secrets go through AWS
Secrets Manager: one secret per launch, which is deleted when its islands are over.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Mapping
from typing import Any

from atoll.errors import UsageError
from atoll.launch.base import GRACE_S, Keep, Launcher, Order, Plan, Traits
from atoll.launch.engines.sagemaker.aws import ABSENT, Aws, told
from atoll.launch.engines.sagemaker.requests import (
    ENGINE,
    SageMakerOptions,
    job_name,
    job_requests,
    secrets_name,
)
from atoll.launch.handle import Handle
from atoll.launch.leading import TOLD_TO_GO
from atoll.launch.options import read_options
from atoll.launch.states import Report, State

LOGS = "/aws/sagemaker/TrainingJobs"
_STATES = {
    "Completed": State.FINISHED,
    "Failed": State.FAILED,
    "Stopped": State.CANCELLED,
    "Deleting": State.CANCELLED,
    "Stopping": State.RUNNING,
}
_IN_PROGRESS = {
    "Training": State.RUNNING,
    "Uploading": State.RUNNING,
    "Updating": State.RUNNING,
    "Interrupted": State.RESTARTING,
    "Restarting": State.RESTARTING,
}
_EXIT_CODE = re.compile(r"exit code:? *(\d+)", re.IGNORECASE)


def open_launcher(options: Mapping[str, str]) -> Launcher:
    """Return the launcher of the AWS account that is configured here."""
    read = read_options(SageMakerOptions, options, engine=ENGINE)
    return SageMakerLauncher(Aws(read), read, options)


class SageMakerLauncher:
    """Creates training jobs; what it knows is at AWS and in handles."""

    def __init__(
        self, aws: Aws, read: SageMakerOptions, options: Mapping[str, str]
    ) -> None:
        self._aws, self._read, self._options = aws, read, dict(options)

    @property
    def traits(self) -> Traits:
        return Traits()

    def plan(self, order: Order) -> Plan:
        data = job_requests(order, self._read, region=self._aws.region)
        return Plan(data, json.dumps(data, indent=2))

    def launch(self, order: Order, *, keep: Keep) -> Handle:
        requests = job_requests(order, self._read, region=self._aws.region)
        reference = {"region": self._aws.region, "has_secrets": bool(order.values)}
        handle = order.handle(
            ENGINE, reference, options=self._options, begun_at_s=time.time()
        )
        if self._listed(handle):
            raise UsageError(
                f"{order.id!r} was launched on SageMaker already. Launch under another "
                "name."
            )
        keep(handle)
        if order.values:
            self._keep_secrets(order)
        for request in requests:
            with told(f"create {request['TrainingJobName']}"):
                self._aws.jobs.create_training_job(**request)
        return handle

    def poll(self, handle: Handle) -> tuple[Report, ...]:
        jobs = self._jobs(handle)
        reports = tuple(
            self._report(handle, index, jobs.get(job_name(handle.id, index)))
            for index in handle.indexes
        )
        # Where no job is known, one may be about to be created, and needs them.
        if jobs and all(each.state.is_over for each in reports):
            self._forget_secrets(handle)
        return reports

    def logs(self, handle: Handle, index: int, *, after: int = 0) -> list[str]:
        prefix = f"{job_name(handle.id, index)}/"
        lines: list[str] = []
        with told(f"read the log of {handle.island(index)}", is_fine=ABSENT):
            found = self._aws.logs.get_paginator("describe_log_streams").paginate(
                logGroupName=LOGS, logStreamNamePrefix=prefix
            )
            streams = [each for page in found for each in page["logStreams"]]
            for each in sorted(streams, key=lambda each: each.get("creationTime", 0)):
                lines += self._said(each["logStreamName"])
        return lines[after:]

    def cancel(
        self,
        handle: Handle,
        *,
        indexes: Collection[int] | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        jobs = self._jobs(handle)
        for index in handle.indexes if indexes is None else sorted(indexes):
            name = job_name(handle.id, index)
            if jobs.get(name, {}).get("TrainingJobStatus") != "InProgress":
                continue
            # A job that ended a moment ago is refused as what cannot be stopped.
            with told(f"stop {name}", is_fine=ABSENT):
                self._aws.jobs.stop_training_job(TrainingJobName=name)
        if indexes is None:
            self._forget_secrets(handle)

    def _keep_secrets(self, order: Order) -> None:
        values = {name: value.reveal() for name, value in order.values.items()}
        with told("keep the launch's secrets in Secrets Manager"):
            self._aws.secrets.create_secret(
                Name=secrets_name(order.id),
                SecretString=json.dumps(values),
                Tags=[{"Key": "atoll-launch", "Value": order.id}],
            )

    def _forget_secrets(self, handle: Handle) -> None:
        if handle.reference["has_secrets"]:
            with told("delete the launch's secrets", is_fine=ABSENT):
                self._aws.secrets.delete_secret(
                    SecretId=secrets_name(handle.id), ForceDeleteWithoutRecovery=True
                )

    def _jobs(self, handle: Handle) -> dict[str, Mapping[str, Any]]:
        """Return the jobs of a launch, by their names."""
        jobs: dict[str, Mapping[str, Any]] = {**self._listed(handle)}
        for index in handle.indexes:
            name = job_name(handle.id, index)
            # What has just been created need not be in a list yet.
            if name not in jobs and (job := self._described(name)) is not None:
                jobs[name] = job
        return jobs

    def _listed(self, handle: Handle) -> dict[str, dict[str, Any]]:
        """Return the jobs of a launch that SageMaker lists."""
        wanted = {job_name(handle.id, index) for index in handle.indexes}
        with told("list training jobs"):
            pages = self._aws.jobs.get_paginator("list_training_jobs").paginate(
                NameContains=f"{handle.id}-"
            )
            all_ = [job for page in pages for job in page["TrainingJobSummaries"]]
        named = {str(each["TrainingJobName"]): each for each in all_}
        return {name: each for name, each in named.items() if name in wanted}

    def _said(self, stream: str) -> list[str]:
        lines: list[str] = []
        token: dict[str, str] = {}
        while True:
            page = self._aws.logs.get_log_events(
                logGroupName=LOGS, logStreamName=stream, startFromHead=True, **token
            )
            lines += [each["message"] for each in page["events"]]
            if page["nextForwardToken"] == token.get("nextToken"):
                return lines
            token = {"nextToken": page["nextForwardToken"]}

    def _report(
        self, handle: Handle, index: int, job: Mapping[str, Any] | None
    ) -> Report:
        name = handle.island(index)
        if job is None:
            return Report(index=index, name=name, state=State.LOST)
        state, why = _state(job)
        code = 0 if state is State.FINISHED else None
        if state is State.FAILED:
            # A list does not say why.
            described = self._described(str(job["TrainingJobName"])) or job
            why = str(described.get("FailureReason") or "Failed")
            if (found := _EXIT_CODE.search(why)) is not None:
                code = int(found[1])
            if code == TOLD_TO_GO:
                state = State.CANCELLED
        place = str(job["TrainingJobName"])
        return Report(
            index=index, name=name, state=state, exit_code=code, why=why, place=place
        )

    def _described(self, job: str) -> Mapping[str, Any] | None:
        with told(f"describe {job}", is_fine=ABSENT):
            said = self._aws.jobs.describe_training_job(TrainingJobName=job)
            return dict(said)
        return None


def _state(job: Mapping[str, Any]) -> tuple[State, str]:
    status, second = job["TrainingJobStatus"], job.get("SecondaryStatus", "")
    if status == "InProgress":
        return _IN_PROGRESS.get(second, State.PENDING), ""
    if status in _STATES:
        return _STATES[status], second if second.startswith("Max") else ""
    # It is more likely on its way than over, and whoever waits can read why.
    return State.PENDING, f"its status is {status!r}, which is not known here"
