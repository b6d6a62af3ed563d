"""Islands as training jobs of SageMaker, one job each.

Start reading at `TrainingJobs`, then `job_requests`: the request of
`CreateTrainingJob`, as data; `entrypoint` runs in the container.

Jobs are named by their launch, so one without a response can be ended too. A job's
environment can be read with the permission to describe it, so secrets go through AWS
Secrets Manager: one secret per launch, which is deleted when its islands are over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    NoCredentialsError,
    ParamValidationError,
    ProfileNotFound,
    SSOError,
    TokenRetrievalError,
)

from atoll.errors import Refused, Unreachable, UsageError
from atoll.launch import base
from atoll.launch.engines.sagemaker.entrypoint import MAX_ARGUMENT, MODULE, folded
from atoll.launch.job_launcher import FoundJob, JobLauncher, JobsToEnd
from atoll.launch.leader import EXIT_CANCELLED, leader_argv
from atoll.launch.spec import IslandSpec, Resources, in_engine, refuse_fields

LOGS = "/aws/sagemaker/TrainingJobs"
_STATES = {
    "Completed": base.State.FINISHED,
    "Failed": base.State.FAILED,
    "Stopped": base.State.CANCELLED,
    "Deleting": base.State.CANCELLED,
    "Stopping": base.State.RUNNING,
}
_IN_PROGRESS = {
    "Training": base.State.RUNNING,
    "Uploading": base.State.RUNNING,
    "Updating": base.State.RUNNING,
    "Interrupted": base.State.RESTARTING,
    "Restarting": base.State.RESTARTING,
}
_EXIT_CODE = re.compile(r"exit code:? *(\d+)", re.IGNORECASE)


def open_launcher(options: Mapping[str, str]) -> base.Launcher:
    """Return the launcher of the AWS account that is configured here."""
    read = base.read_options(SageMakerOptions, options, engine=ENGINE)
    return JobLauncher(TrainingJobs(Aws(read), read), engine=ENGINE, options=options)


class TrainingJobs:
    """The training jobs of one user, and the secrets of their launches."""

    def __init__(self, aws: Aws, read: SageMakerOptions) -> None:
        self._aws, self._read = aws, read

    def plan(self, order: base.LaunchOrder) -> base.LaunchPlan:
        data = job_requests(order, self._read, region=self._aws.region)
        return base.LaunchPlan(data, json.dumps(data, indent=2))

    def begin(self, order: base.LaunchOrder) -> dict[str, Any]:
        return {"region": self._aws.region, "has_secrets": bool(order.values)}

    def submit(
        self, order: base.LaunchOrder, plan: base.LaunchPlan, handle: base.Handle
    ) -> Iterator[base.Handle]:
        if order.values:
            self._keep_secrets(order)
        for request in plan.data:
            with sdk_errors(f"create {request['TrainingJobName']}"):
                self._aws.jobs.create_training_job(**request)
        yield handle

    def find(
        self, handle: base.Handle, indexes: Collection[int]
    ) -> dict[int, FoundJob]:
        listed = self._listed(handle)
        jobs = {}
        for index in indexes:
            name = job_name(handle.id, index)
            # A list need not have the newest jobs yet.
            job = listed.get(name) or self._described(name)
            if job is not None:
                jobs[index] = FoundJob(self._report(handle, index, job), name)
        # Without any job, one may be about to be created, and needs them.
        reports = [job.report for job in jobs.values()]
        is_over = reports and all(report.state.is_over for report in reports)
        if is_over and set(indexes) >= set(handle.indexes):
            self._forget_secrets(handle)
        return jobs

    def lines(self, handle: base.Handle, index: int, job: Any) -> list[str]:
        lines: list[str] = []
        with sdk_errors(f"read the log of {handle.island(index)}", is_fine=ABSENT):
            pages = self._aws.logs.get_paginator("describe_log_streams").paginate(
                logGroupName=LOGS, logStreamNamePrefix=f"{job}/"
            )
            streams = [stream for page in pages for stream in page["logStreams"]]
            for stream in sorted(
                streams, key=lambda stream: stream.get("creationTime", 0)
            ):
                lines += self._events(stream["logStreamName"])
        return lines

    def end(self, handle: base.Handle, request: JobsToEnd) -> None:
        for name in request.jobs.values():
            # AWS refuses to stop a job that ended a moment ago.
            with sdk_errors(f"stop {name}", is_fine=ABSENT):
                self._aws.jobs.stop_training_job(TrainingJobName=name)
        if set(request.indexes) >= set(handle.indexes):
            self._forget_secrets(handle)

    def _keep_secrets(self, order: base.LaunchOrder) -> None:
        values = {name: value.reveal() for name, value in order.values.items()}
        with sdk_errors("keep the launch's secrets in Secrets Manager"):
            self._aws.secrets.create_secret(
                Name=secrets_name(order.id),
                SecretString=json.dumps(values),
                Tags=[{"Key": "atoll-launch", "Value": order.id}],
            )

    def _forget_secrets(self, handle: base.Handle) -> None:
        if handle.reference["has_secrets"]:
            with sdk_errors("delete the launch's secrets", is_fine=ABSENT):
                self._aws.secrets.delete_secret(
                    SecretId=secrets_name(handle.id), ForceDeleteWithoutRecovery=True
                )

    def _listed(self, handle: base.Handle) -> dict[str, dict[str, Any]]:
        """Return the jobs of a launch that SageMaker lists."""
        wanted = {job_name(handle.id, index) for index in handle.indexes}
        with sdk_errors("list training jobs"):
            pages = self._aws.jobs.get_paginator("list_training_jobs").paginate(
                NameContains=f"{handle.id}-"
            )
            listed = [job for page in pages for job in page["TrainingJobSummaries"]]
        named = {str(job["TrainingJobName"]): job for job in listed}
        return {name: job for name, job in named.items() if name in wanted}

    def _events(self, stream: str) -> list[str]:
        lines: list[str] = []
        token: dict[str, str] = {}
        while True:
            page = self._aws.logs.get_log_events(
                logGroupName=LOGS, logStreamName=stream, startFromHead=True, **token
            )
            lines += [event["message"] for event in page["events"]]
            if page["nextForwardToken"] == token.get("nextToken"):
                return lines
            token = {"nextToken": page["nextForwardToken"]}

    def _report(
        self, handle: base.Handle, index: int, job: Mapping[str, Any]
    ) -> base.Report:
        state, reason = _state(job)
        code = 0 if state is base.State.FINISHED else None
        if state is base.State.FAILED:
            # A list has no reasons.
            described = self._described(str(job["TrainingJobName"])) or job
            reason = str(described.get("FailureReason") or "Failed")
            if (match := _EXIT_CODE.search(reason)) is not None:
                code = int(match[1])
            if code == EXIT_CANCELLED:
                state = base.State.CANCELLED
        host = str(job["TrainingJobName"])
        return base.Report(
            index=index,
            name=handle.island(index),
            state=state,
            exit_code=code,
            reason=reason,
            host=host,
        )

    def _described(self, job: str) -> Mapping[str, Any] | None:
        with sdk_errors(f"describe {job}", is_fine=ABSENT):
            description = self._aws.jobs.describe_training_job(TrainingJobName=job)
            return dict(description)
        return None


def _state(job: Mapping[str, Any]) -> tuple[base.State, str]:
    status, second = job["TrainingJobStatus"], job.get("SecondaryStatus", "")
    if status == "InProgress":
        return _IN_PROGRESS.get(second, base.State.PENDING), ""
    if status in _STATES:
        return _STATES[status], second if second.startswith("Max") else ""
    # It is more likely pending than over, and the user can read the reason.
    return base.State.PENDING, f"its status is {status!r}, which is unknown here"


ENGINE = "sagemaker"
DEFAULT_LIMIT_S = 5 * 24 * 3600.0
"""The largest default quota of an account; SageMaker's default limit is one day."""

MAX_VALUE = 512
MAX_ARGUMENTS = 100
DEFAULT_INSTANCE = "ml.m5.large"
INSTANCES = {
    ("t4", 1): "ml.g4dn.xlarge",
    ("t4", 4): "ml.g4dn.12xlarge",
    ("a10g", 1): "ml.g5.xlarge",
    ("a10g", 4): "ml.g5.12xlarge",
    ("a10g", 8): "ml.g5.48xlarge",
    ("l4", 1): "ml.g6.xlarge",
    ("l4", 4): "ml.g6.12xlarge",
    ("l4", 8): "ml.g6.48xlarge",
    ("l40s", 1): "ml.g6e.xlarge",
    ("l40s", 4): "ml.g6e.12xlarge",
    ("l40s", 8): "ml.g6e.48xlarge",
    ("a100", 8): "ml.p4d.24xlarge",
    ("h100", 1): "ml.p5.4xlarge",
    ("h100", 8): "ml.p5.48xlarge",
    ("h200", 8): "ml.p5en.48xlarge",
    ("b200", 8): "ml.p6-b200.48xlarge",
}
"""The smallest instance with a number of accelerators, by model and number."""


@dataclass(frozen=True)
class SageMakerOptions:
    """The options of `--option`."""

    role: str | None = None
    """The ARN of the role that jobs run as."""

    output: str | None = None
    """`s3://BUCKET/PREFIX`: SageMaker requires it; islands write nothing there."""

    instance_type: str | None = None
    """Of one island: `ml.g5.xlarge`. Default: by `--accelerator`."""

    volume_gb: int = 50
    """The size of an island's disk."""

    spot: bool = False
    """Whether islands use spot instances: interrupted ones are restarted."""

    region: str | None = None
    profile: str | None = None
    """A profile of the user's AWS configuration."""

    endpoint_url: str | None = None
    """The URL of AWS. Default: that of boto3."""


def job_name(launch: str, index: int) -> str:
    """Return the name of an island's job."""
    return f"{launch}-{index}"


def secrets_name(launch: str) -> str:
    """Return the name of a launch's own secrets in Secrets Manager."""
    return f"atoll/{launch}"


def job_requests(
    order: base.LaunchOrder, options: SageMakerOptions, *, region: str
) -> list[dict[str, Any]]:
    """Return the request of every island. No value of a secret is in it.

    Raises:
        UsageError: a training job cannot fulfil the spec.
    """
    spec = order.spec
    _require_possible(spec)
    if not (options.role and options.output):
        raise UsageError(
            "SageMaker needs a role and a place for a job's output. Give --option "
            "role=ARN and --option output=s3://BUCKET/PREFIX."
        )
    limit_s = spec.resources.time_limit_s or DEFAULT_LIMIT_S
    ends = {"MaxRuntimeInSeconds": max(1, int(limit_s))}
    if options.spot:
        ends["MaxWaitTimeInSeconds"] = ends["MaxRuntimeInSeconds"]
    alike = {
        "RoleArn": options.role,
        "OutputDataConfig": {"S3OutputPath": options.output},
        "ResourceConfig": {
            "InstanceType": instance_type(spec.resources, options),
            "InstanceCount": 1,
            "VolumeSizeInGB": options.volume_gb,
        },
        "StoppingCondition": ends,
        "EnableManagedSpotTraining": options.spot,
        "Environment": dict(spec.environment),
        "Tags": [{"Key": "atoll-launch", "Value": order.id}],
    }
    return [
        {
            "TrainingJobName": job_name(order.id, index),
            "AlgorithmSpecification": {
                "TrainingImage": spec.image,
                "TrainingInputMode": "File",
                "ContainerEntrypoint": ["python", "-m", MODULE],
                "ContainerArguments": _arguments(
                    order, index, options, region=region, limit_s=limit_s
                ),
            },
            **alike,
        }
        for index in order.indexes
    ]


def instance_type(resources: Resources, options: SageMakerOptions) -> str:
    """Return the instance type of an island.

    Raises:
        UsageError: none fits, or it was given twice.
    """
    if resources.accelerators == 0:
        return options.instance_type or DEFAULT_INSTANCE
    if options.instance_type is not None:
        raise UsageError(
            f"instance_type={options.instance_type!r} and accelerators="
            f"{resources.accelerators} both choose the hardware. Leave one out."
        )
    wanted = (resources.accelerator or "", resources.accelerators)
    if wanted not in INSTANCES:
        choices = ", ".join(f"{num} {kind}" for kind, num in INSTANCES)
        raise UsageError(
            f"No instance is known with accelerator={wanted[0]!r}, accelerators="
            f"{wanted[1]}. Known are {choices}; or give --option instance_type=NAME."
        )
    return INSTANCES[wanted]


def _arguments(
    order: base.LaunchOrder,
    index: int,
    options: SageMakerOptions,
    *,
    region: str,
    limit_s: float,
) -> list[str]:
    arguments = ["--region", region]
    arguments += ["--endpoint", options.endpoint_url] if options.endpoint_url else []
    for variable, named in in_engine(order.spec.secrets).items():
        arguments += ["--secret", f"{variable}={named}"]
    arguments += ["--secrets", secrets_name(order.id)] if order.values else []
    arguments += ["--", *folded(leader_argv(order.spec, index, limit_s=limit_s))]
    if len(arguments) > MAX_ARGUMENTS or any(
        len(argument) > MAX_ARGUMENT for argument in arguments
    ):
        raise UsageError(
            f"The command of an island is {len(arguments)} arguments for SageMaker, "
            f"which takes {MAX_ARGUMENTS} of {MAX_ARGUMENT} characters. Use a script."
        )
    return arguments


def _require_possible(spec: IslandSpec) -> None:
    if spec.image is None:
        raise UsageError(
            "SageMaker runs an island in an image of a registry, and requirements="
            f"{spec.requirements} cannot take its place. Give --image with "
            "atoll[sagemaker] in it: ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG."
        )
    refuse_fields(spec, dict.fromkeys(("cpus", "memory_bytes"), _HAS_INSTANCES))
    for variable, text in spec.environment.items():
        if len(text) > MAX_VALUE:
            raise UsageError(
                f"{variable} has {len(text)} characters, and SageMaker's environment "
                f"takes {MAX_VALUE}. Put it into a file of the image or of the code."
            )


_HAS_INSTANCES = (
    "{} cannot be requested of sagemaker, which has instances. Choose one: --option "
    "instance_type=NAME."
)

ABSENT = ("ResourceNotFound", "ResourceNotFoundException", "ValidationException")
"""Codes for a missing object, or one in the wrong state. SageMaker sends the last for
an unknown job, and for one that cannot be stopped because it is over."""

_MAY_NOT = (
    "AccessDenied",
    "AccessDeniedException",
    "ExpiredTokenException",
    "InvalidSignatureException",
    "MissingAuthenticationTokenException",
    "UnrecognizedClientException",
)
_AGAIN = (
    "InternalFailure",
    "RequestTimeout",
    "ServiceUnavailable",
    "Throttling",
    "ThrottlingException",
    "TooManyRequestsException",
)
_NO_LOGIN = (
    CredentialRetrievalError,
    SSOError,
    TokenRetrievalError,
)
"""Errors of fetching the user's credentials."""


class Aws:
    """The services that a launch needs, for one user in one region.

    Credentials are read with the first client of a service: a plan needs none.
    """

    def __init__(self, options: SageMakerOptions) -> None:
        self._endpoint = options.endpoint_url
        try:
            self._session = boto3.Session(
                profile_name=options.profile, region_name=options.region
            )
        except ProfileNotFound as exc:
            raise UsageError(f"{exc}. Run `aws configure`.") from exc
        if self._session.region_name is None:
            raise UsageError("No region of AWS is set. Give --option region=NAME.")
        self.region: str = self._session.region_name

    @cached_property
    def jobs(self) -> Any:
        return self._client("sagemaker")

    @cached_property
    def secrets(self) -> Any:
        return self._client("secretsmanager")

    @cached_property
    def logs(self) -> Any:
        return self._client("logs")

    def _client(self, service: str) -> Any:
        with sdk_errors("read your credentials"):
            credentials = self._session.get_credentials()
        if credentials is None:
            raise UsageError(
                "There are no credentials for AWS here. Run `aws configure`, or set "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or --option profile=NAME."
            )
        retries = Config(retries={"mode": "standard", "total_max_attempts": 3})
        return self._session.client(
            service, endpoint_url=self._endpoint, config=retries
        )


@contextmanager
def sdk_errors(action: str, *, is_fine: Collection[str] = ()) -> Iterator[None]:
    """Translate errors of the SDK; the codes of `is_fine` are no error here."""
    try:
        yield
    except ClientError as exc:
        code, message = exc.response["Error"]["Code"], exc.response["Error"]["Message"]
        status = exc.response["ResponseMetadata"]["HTTPStatusCode"]
        if code in is_fine:
            return
        if code in _MAY_NOT:
            raise Refused(
                f"AWS does not let you {action} ({code}): {message}. An administrator "
                "must give your user, or the role of the jobs, that permission."
            ) from exc
        if status < 500 and code not in _AGAIN:
            raise UsageError(f"AWS cannot {action} ({code}): {message}.") from exc
        raise Unreachable(f"AWS could not {action} ({code}): {message}.") from exc
    except (ParamValidationError, NoCredentialsError) as exc:
        raise UsageError(f"AWS cannot {action}: {exc}.") from exc
    except _NO_LOGIN as exc:
        raise Refused(
            f"AWS does not know you, to {action}: {exc} Log in again: `aws sso login`, "
            "or `aws configure`."
        ) from exc
    except BotoCoreError as exc:
        raise Unreachable(f"AWS did not answer to {action}: {exc}.") from exc
