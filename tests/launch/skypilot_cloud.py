"""SkyPilot without a cloud: its SDK's calls, bound to the real signatures, run here.

Tasks are parsed, written and read by SkyPilot itself, and so are bodies of requests and
the answers of its queue. What needs a server is stood in for. Every call is bound to
the signature of what it stands for, so that a renamed argument is an error here.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sky
from sky import exceptions as faults
from sky.server.requests import payloads
from sky.server.requests.serializers import decoders
from sky.utils import dag_utils

from tests.launch.containers import Container

REAL = SimpleNamespace(
    get=sky.get,
    launch=sky.jobs.launch,
    queue_v2=sky.jobs.queue_v2,
    cancel=sky.jobs.cancel,
    tail_logs=sky.jobs.tail_logs,
    api_cancel=sky.api_cancel,
)


def bound(real: Callable[..., Any], *args: Any, **given: Any) -> dict[str, Any]:
    """Return the arguments of a call by name, if the real function takes it."""
    return dict(inspect.signature(real).bind(*args, **given).arguments)


class Job:
    """One managed job: a container, and what the queue says of it."""

    def __init__(self, job_id: int, task: Any, place: Path) -> None:
        self.job_id, self.task, self.name = job_id, task, str(task.name)
        self.says: dict[str, Any] = {}
        self.has_half_a_line = False
        secrets = {key: each.get_secret_value() for key, each in task.secrets.items()}
        around = {"PYTHONPATH": os.environ["PYTHONPATH"]}  # Atoll is in the image
        self.container = Container(
            ["bash", "-c", task.run],
            {**around, **task.envs, **secrets},
            place / str(job_id),
        )

    def record(self) -> dict[str, Any]:
        status, why = self._status()
        return {
            "job_id": self.job_id,
            "job_name": self.name,
            "status": status,
            "recovery_count": 0,
            "failure_reason": why,
            "infra": None,
            **self.says,
        }

    def _status(self) -> tuple[str, str | None]:
        code, was_stopped = self.container.exit_code(), self.container.was_stopped
        if code is None:
            return "CANCELLING" if was_stopped else "RUNNING", None
        if was_stopped:
            return "CANCELLED", None
        if code == 0:
            return "SUCCEEDED", None
        why = f"Job exited with exit code {code} (user program failure). See the log."
        return "FAILED", why


@dataclass
class Cloud:
    """What SkyPilot knows. A test may read it, forget a job, or set a fault."""

    place: Path
    jobs: list[Job] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)
    answers: dict[str, Callable[[], Any]] = field(default_factory=dict)
    fault: Exception | None = None
    interrupts: str | None = None
    """The managed job during whose request whoever waits for it is interrupted."""

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take the place of what the SDK would ask its server for."""
        monkeypatch.setattr(sky, "get", self._get)
        monkeypatch.setattr(sky, "api_cancel", self._api_cancel)
        monkeypatch.setattr(sky.jobs, "launch", self._launch)
        monkeypatch.setattr(sky.jobs, "queue_v2", self._queue)
        monkeypatch.setattr(sky.jobs, "cancel", self._cancel)
        monkeypatch.setattr(sky.jobs, "tail_logs", self._tail_logs)

    def _get(self, *args: Any, **given: Any) -> Any:
        name = bound(REAL.get, *args, **given)["request_id"]
        if self.interrupts is not None and name.endswith(self.interrupts):
            raise KeyboardInterrupt
        return self.answers.pop(name)()

    def go_on(self) -> None:
        """Let the server do all that it was asked for and not told to leave."""
        for name in list(self.answers):
            self.answers.pop(name)()

    def _api_cancel(self, *args: Any, **given: Any) -> str:
        body = payloads.RequestCancelBody(
            request_ids=bound(REAL.api_cancel, *args, **given)["request_ids"]
        )
        return self._request(lambda: self._withdraw(body))

    def _withdraw(self, body: Any) -> list[str]:
        return [each for each in body.request_ids if self.answers.pop(each, None)]

    def _request(self, answer: Callable[[], Any], name: str = "") -> str:
        name = f"request-{len(self.bodies)}-{len(self.answers)}-{name}"
        self.answers[name] = answer
        return name

    def _launch(self, *args: Any, **given: Any) -> str:
        said = bound(REAL.launch, *args, **given)
        assert isinstance(said["task"], sky.Task)
        dag = dag_utils.convert_entrypoint_to_dag(said["task"])
        dag.name = said["name"]
        text = dag_utils.dump_dag_to_yaml_str(dag)
        body = payloads.JobsLaunchBody(task=text, name=said["name"])
        self.bodies.append(body)
        return self._request(lambda: self._start(body), said["name"])

    def _start(self, body: Any) -> tuple[list[int], None]:
        if self.fault is not None:
            raise self.fault
        (task,) = dag_utils.load_dag_from_yaml_str(body.task).tasks
        assert task.name == body.name
        job = Job(len(self.jobs) + 1, task, self.place)
        self.jobs.append(job)
        return [job.job_id], None

    def _queue(self, *args: Any, **given: Any) -> str:
        said = bound(REAL.queue_v2, *args, **given)
        body = payloads.JobsQueueV2Body(**{**said, "fields": list(said["fields"])})
        return self._request(lambda: self._records(body))

    def _records(self, body: Any) -> Any:
        if not self.jobs:
            raise faults.ClusterNotUpError("no controller", None, None)
        found = [each.record() for each in self.jobs if body.name_match in each.name]
        shown = [{key: each[key] for key in body.fields} for each in found]
        return decoders.decode_jobs_queue_v2({"jobs": shown, "total": len(shown)})

    def _cancel(self, *args: Any, **given: Any) -> str:
        body = payloads.JobsCancelBody(**bound(REAL.cancel, *args, **given))
        self.bodies.append(body)
        return self._request(lambda: self._stop(body))

    def _stop(self, body: Any) -> None:
        for job in self.jobs:
            if job.job_id in body.job_ids:
                job.container.stop(kill_after_s=float(body.graceful_timeout))

    def _tail_logs(self, *args: Any, **given: Any) -> None:
        said = bound(REAL.tail_logs, *args, **given)
        assert said["follow"] is False
        stream = said.pop("output_stream")
        payloads.JobsLogsBody(**said)
        (job,) = [each for each in self.jobs if each.job_id == said["job_id"]]
        stream.write("├── Waiting for task resources on 1 node.\n")
        lines = [
            f"\x1b[36m({job.name}, pid=7)\x1b[0m {line}\n"
            for line in job.container.lines()
        ]
        if job.has_half_a_line:
            lines[-1] = lines[-1][:-3]
        stream.write("".join(lines))
        if job.container.exit_code() is not None:
            stream.write("\n" if job.has_half_a_line else "")
            stream.write("✓ Job finished (status: SUCCEEDED).\n")
