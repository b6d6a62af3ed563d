"""AWS on loopback: SageMaker, Secrets Manager and CloudWatch Logs, as boto3 calls them.

A training job is a local process. What the real service would refuse of a request by
its published model is refused here too: names, lengths, patterns.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import botocore.session
from botocore.model import Shape
from botocore.validate import ParamValidator

from tests.launch.containers import Container
from tests.launch.loopback import answering, send

KILL_AFTER_S = 5.0
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "reef",
    "AWS_SECRET_ACCESS_KEY": "reef-key",
    "AWS_DEFAULT_REGION": "eu-reef-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
MODEL = botocore.session.get_session().get_service_model("sagemaker")


class Fault(Exception):
    """What a service answers instead."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status


@dataclass
class Cloud:
    """What AWS knows. A test may read it, forget a job, or name a status."""

    place: Path
    url: str = ""
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    containers: dict[str, Container] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    statuses: dict[str, tuple[str, str]] = field(default_factory=dict)
    fault: Fault | None = None

    def answer(self, operation: str, asked: dict[str, Any]) -> dict[str, Any]:
        """Answer one call, by the name of its operation."""
        if self.fault is not None:
            raise self.fault
        answers = {
            "CreateTrainingJob": self._create,
            "DescribeTrainingJob": lambda asked: self._told(asked["TrainingJobName"]),
            "ListTrainingJobs": self._list,
            "StopTrainingJob": self._stop,
            "CreateSecret": self._keep,
            "GetSecretValue": self._reveal,
            "DeleteSecret": self._forget,
            "DescribeLogStreams": self._streams,
            "GetLogEvents": self._events,
        }
        return answers[operation](asked)

    def _create(self, asked: dict[str, Any]) -> dict[str, Any]:
        name = asked["TrainingJobName"]
        if name in self.jobs:
            raise Fault("ResourceInUse", f"{name} is there already")
        for wrong in faults(asked, MODEL.operation_model("CreateTrainingJob")):
            raise Fault("ValidationException", wrong)
        how = asked["AlgorithmSpecification"]
        words = [*how["ContainerEntrypoint"], *how["ContainerArguments"]]
        around = {**CREDENTIALS, **asked["Environment"]}  # as the role would give
        self.containers[name] = Container(words, around, self.place / name)
        self.jobs[name] = {**asked, "CreationTime": time.time()}
        return {"TrainingJobArn": f"arn:aws:sagemaker:eu-reef-1:1:training-job/{name}"}

    def _told(self, name: str) -> dict[str, Any]:
        if name not in self.jobs:
            raise Fault("ValidationException", "Requested resource not found.")
        container = self.containers[name]
        code = container.exit_code()
        if code is None:
            status = ("Stopping",) * 2 if container.was_stopped else _TRAINING
        elif container.was_stopped:
            status = ("Stopped", "Stopped")
        else:
            status = ("Failed", "Failed") if code else ("Completed", "Completed")
        status = self.statuses.get(name, status)
        told = {**self.jobs[name], "TrainingJobArn": f"arn:aws:sagemaker:{name:_<20}"}
        told |= {"TrainingJobStatus": status[0], "SecondaryStatus": status[1]}
        if status[0] == "Failed":
            told["FailureReason"] = f"AlgorithmError: , exit code: {code}"
        return told

    def _list(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return two at a time, so that whoever asks has to go on."""
        named = [each for each in self.jobs if asked["NameContains"] in each]
        at = int(asked.get("NextToken", "0"))
        kept: tuple[str, ...] = ("TrainingJobName", "TrainingJobArn", "CreationTime")
        kept += ("TrainingJobStatus", "SecondaryStatus")
        found = [
            {key: value for key, value in self._told(name).items() if key in kept}
            for name in named[at : at + 2]
        ]
        more = {"NextToken": str(at + 2)} if at + 2 < len(named) else {}
        return {"TrainingJobSummaries": found, **more}

    def _stop(self, asked: dict[str, Any]) -> dict[str, Any]:
        told = self._told(asked["TrainingJobName"])
        if told["TrainingJobStatus"] != "InProgress":
            raise Fault("ValidationException", "it cannot be stopped in that status")
        self.containers[asked["TrainingJobName"]].stop(kill_after_s=KILL_AFTER_S)
        return {}

    def _keep(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["Name"] in self.secrets:
            raise Fault("ResourceExistsException", "it exists")
        self.secrets[asked["Name"]] = asked["SecretString"]
        return {"Name": asked["Name"]}

    def _reveal(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["SecretId"] not in self.secrets:
            raise Fault("ResourceNotFoundException", "no such secret")
        return {"SecretString": self.secrets[asked["SecretId"]]}

    def _forget(self, asked: dict[str, Any]) -> dict[str, Any]:
        if self.secrets.pop(asked["SecretId"], None) is None:
            raise Fault("ResourceNotFoundException", "no such secret")
        return {}

    def _streams(self, asked: dict[str, Any]) -> dict[str, Any]:
        prefix = asked["logStreamNamePrefix"]
        found = [each for each in self.jobs if f"{each}/algo-1-0".startswith(prefix)]
        streams = [
            {"logStreamName": f"{name}/algo-1-0", "creationTime": 1} for name in found
        ]
        return {"logStreams": streams}

    def _events(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return two lines at a time; the last token comes again."""
        lines = self.containers[asked["logStreamName"].split("/")[0]].lines()
        at = int(asked.get("nextToken", "f/0").split("/")[1])
        some = lines[at : at + 2]
        events = [{"timestamp": 1, "message": each} for each in some]
        return {"events": events, "nextForwardToken": f"f/{at + len(some)}"}


_TRAINING = ("InProgress", "Training")


def faults(asked: dict[str, Any], operation: Any) -> list[str]:
    """Return what is wrong with a request by the model that AWS publishes."""
    said = ParamValidator().validate(asked, operation.input_shape)
    found = [said.generate_report()] if said.has_errors() else []
    return found + list(_wrong(asked, operation.input_shape))


def _wrong(value: Any, shape: Shape) -> Iterator[str]:
    if shape.type_name == "structure":
        for key, each in value.items():
            yield from _wrong(each, shape.members[key])
    elif shape.type_name == "list":
        if len(value) > shape.metadata.get("max", len(value)):
            yield f"{shape.name} has {len(value)} members"
        for each in value:
            yield from _wrong(each, shape.member)
    elif shape.type_name == "map":
        for key, each in value.items():
            yield from _wrong(key, shape.key)
            yield from _wrong(each, shape.value)
    elif shape.type_name == "string":
        if len(value) > shape.metadata.get("max", len(value)):
            yield f"{shape.name} has {len(value)} characters"
        if not re.fullmatch(_pattern(shape), value):
            yield f"{shape.name} cannot be {value!r}"
        if value not in (shape.metadata.get("enum") or [value]):
            yield f"{shape.name} has no {value!r}"


def _pattern(shape: Shape) -> str:
    """Return a published pattern in Python's words: those know no letters by kind."""
    said = str(shape.metadata.get("pattern", r"[\S\s]*"))
    return said.replace(r"\p{L}\p{Z}\p{N}", r"\w\s")


@contextmanager
def served(place: Path) -> Iterator[Cloud]:
    """Serve a cloud until the end, and leave no process."""
    cloud = Cloud(place)

    class Answers(_Answers):
        known = cloud

    with answering(Answers, cloud.containers) as cloud.url:
        yield cloud


class _Answers(BaseHTTPRequestHandler):
    known: Cloud

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        operation = self.headers["X-Amz-Target"].split(".")[1]
        try:
            self._send(200, self.known.answer(operation, asked))
        except Fault as exc:
            self._send(exc.status, {"__type": exc.code, "message": str(exc)})

    def _send(self, status: int, form: dict[str, Any]) -> None:
        data = json.dumps(form).encode()
        send(self, status, data, kind="application/x-amz-json-1.1")
