"""A Hub on loopback that runs jobs as local processes, by the documented HTTP calls."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from huggingface_hub import constants

from tests.launch.containers import Container
from tests.launch.host_names import HostNames
from tests.launch.loopback import answering, send

FLAVORS = {"cpu-basic", "l40sx1", "a100x4"}
USER, TOKEN = "reef", "hf_loopback"
KILL_AFTER_S = 5.0
JOB = re.compile(r"/api/jobs/(?P<owner>[^/]+)(/(?P<job>[^/]+))?(/(?P<what>\w+))?")


@dataclass
class Hub:
    """What the Hub knows. A test may read it, forget a job, or name a stage."""

    place: Path
    url: str = ""
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    containers: dict[str, Container] = field(default_factory=dict)
    stages: dict[str, str] = field(default_factory=dict)
    is_slow: bool = False
    """Whether no job is in a list yet."""

    answer: tuple[int, str] | None = None
    """What every request is answered with, if it is to be refused."""

    def __post_init__(self) -> None:
        self._ids = itertools.count(1)
        self._names = HostNames(self.place / "names")

    def start(self, owner: str, asked: dict[str, Any]) -> dict[str, Any]:
        """Run a job; the secrets' values are in its environment and in no answer."""
        job = f"{next(self._ids):024x}"
        secrets = asked.pop("secrets", {})
        words = [*asked["command"], *asked["arguments"]]
        around = {**asked["environment"], **secrets, **self._network(asked)}
        self.containers[job] = Container(words, around, self.place / job)
        self.jobs[job] = {
            **asked,
            "id": job,
            "createdAt": time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime()),
            "secrets": dict.fromkeys(secrets, "***"),
            "owner": {"id": "1", "name": owner, "type": "user"},
        }
        return self.told(job)

    def _network(self, asked: dict[str, Any]) -> dict[str, str]:
        """Let a job be reached in its group, and say how it reaches others there."""
        if "network" not in asked:
            return {}
        group, prefix = asked["network"]["group"], f"net-{asked['network']['group']}-"
        for alias in asked["network"].get("aliases", ()):
            assert re.fullmatch(r"[a-z0-9-]{1,34}", alias), alias
            self._names.add(f"{prefix}{alias}")
        told = {"HF_NETWORK_GROUP_HOSTNAME": group, "HF_NETWORK_GROUP_PREFIX": prefix}
        return {**told, **self._names.around}

    def told(self, job: str) -> dict[str, Any]:
        """Return a job as the Hub tells it."""
        container = self.containers[job]
        code, message = container.exit_code(), None
        if code is None:
            stage = "RUNNING"
        elif container.was_stopped:
            stage = "CANCELED"
        elif code == 0:
            stage = "COMPLETED"
        else:
            stage, message = (
                "ERROR",
                f"Job failed with exit code: {code}. Reason: Error",
            )
        stage = self.stages.get(job, stage)
        return {**self.jobs[job], "status": {"stage": stage, "message": message}}

    def with_labels(self, labels: list[str]) -> list[dict[str, Any]]:
        """Return the jobs that have all the labels, each `key=value`."""
        if self.is_slow:
            return []
        pairs = [each.split("=", 1) for each in labels]
        return [
            self.told(job)
            for job, asked in self.jobs.items()
            if all(asked.get("labels", {}).get(key) == value for key, value in pairs)
        ]


def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a Hub asked, whatever other tests have said of the real one."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@contextmanager
def served(place: Path) -> Iterator[Hub]:
    """Serve a Hub until the end, and leave no process."""
    hub = Hub(place)

    class Answers(_Answers):
        known = hub

    with answering(Answers, hub.containers) as hub.url:
        yield hub


class _Answers(BaseHTTPRequestHandler):
    known: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self._is_refused():
            return
        address = urlsplit(self.path)
        if address.path == "/api/whoami-v2":
            self._send(200, {"type": "user", "name": USER})
            return
        found = JOB.fullmatch(address.path)
        if found is None:
            self._send(404, {"error": "no such page"})
        elif found["job"] is None:
            labels = parse_qs(address.query).get("label", [])
            self._send(200, self.known.with_labels(labels))
        elif found["job"] not in self.known.jobs:
            self._send(404, {"error": "Job not found"})
        elif found["what"] == "logs":
            self._send_log(self.known.containers[found["job"]])
        else:
            self._send(200, self.known.told(found["job"]))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self._is_refused():
            return
        found = JOB.fullmatch(self.path)
        assert found is not None, self.path
        if found["what"] == "cancel":
            if found["job"] not in self.known.jobs:
                self._send(404, {"error": "Job not found"})
                return
            self.known.containers[found["job"]].stop(kill_after_s=KILL_AFTER_S)
            self._send(200, self.known.told(found["job"]))
            return
        asked = json.loads(body)
        if asked["flavor"] not in FLAVORS:
            self._send(400, {"error": f"Invalid flavor {asked['flavor']!r}"})
            return
        self._send(200, self.known.start(found["owner"], asked))

    def _is_refused(self) -> bool:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._send(401, {"error": "Invalid user token."})
            return True
        if self.known.answer is not None:
            status, said = self.known.answer
            self._send(status, {"error": said} if said else None)
            return True
        return False

    def _send(self, status: int, form: Any) -> None:
        data = b"<html>Log in</html>" if form is None else json.dumps(form).encode()
        send(self, status, data, kind="application/json")

    def _send_log(self, container: Container) -> None:
        """Send what is there. The Hub would stay until the SDK is tired of it."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        now = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
        for line in ["===== Job started at now =====", *container.lines()]:
            event = json.dumps({"data": line, "timestamp": now})
            self.wfile.write(f"data: {event}\n\n".encode())
