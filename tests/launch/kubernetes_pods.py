"""Pods that really run: each is a process of this machine, with its environment."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.launch.containers import descendants, kill_all

Form = dict[str, Any]


class Pod:
    """One pod: it waits for its Secrets, runs its only container, and ends."""

    def __init__(self, form: Form, directory: Path, around: Mapping[str, str]) -> None:
        self.form, self._around = form, around
        self._said, self._message = directory / "log", directory / "message"
        self._home = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._killed_at_s: float | None = None
        self._stamps: list[str] = []
        self.has_rotated = self.has_proxy = False
        self.form["status"] = {"phase": "Pending"}

    @property
    def name(self) -> str:
        return str(self.form["metadata"]["name"])

    @property
    def is_terminal(self) -> bool:
        return self.form["status"]["phase"] in ("Succeeded", "Failed")

    @property
    def exit_code(self) -> int | None:
        said = self.form["status"].get("containerStatuses", [{}])[-1].get("state", {})
        code: int | None = said.get("terminated", {}).get("exitCode")
        return code

    def log(self) -> bytes | None:
        return self._said.read_bytes() if self._said.exists() else None

    def told_log(self, *, has_times: bool) -> bytes | None:
        """Return its log as a kubelet does: only the last part of one that rotates."""
        said = self.log()
        if said is None:
            return None
        lines = said.decode().splitlines(keepends=True)
        self._stamps += [_stamp()] * (len(lines) - len(self._stamps))
        if has_times:
            lines = [f"{at} {it}" for at, it in zip(self._stamps, lines, strict=True)]
        return "".join(lines[-1:] if self.has_rotated else lines).encode()

    def look(self, secrets: Mapping[str, Mapping[str, str]]) -> None:
        """Do what a kubelet would by now."""
        self.told_log(has_times=True)  # lines have the time when they were seen
        if self.is_terminal:
            return
        if self._process is None:
            self._start(secrets)
        elif (code := self._process.poll()) is not None:
            self._ended(code)
        elif self._killed_at_s is not None and time.monotonic() > self._killed_at_s:
            self._process.kill()

    def delete(self, grace_s: float) -> None:
        """Tell it to go, as the hook before its end does."""
        until_s = time.monotonic() + grace_s
        is_first = self._killed_at_s is None
        self._killed_at_s = min(until_s, self._killed_at_s or until_s)
        self.form["metadata"]["deletionTimestamp"] = now()
        if self._process is None:
            self.form["status"]["phase"] = "Failed"
        elif is_first and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it as a machine does that goes away."""
        if self._process is not None and self._process.poll() is None:
            led = descendants(self._process.pid)
            self._process.kill()
            self._process.wait()
            kill_all(led)

    def _start(self, secrets: Mapping[str, Mapping[str, str]]) -> None:
        container = self.form["spec"]["containers"][0]
        try:
            told = {it["name"]: self._value(it, secrets) for it in container["env"]}
        except LookupError as exc:
            reason = {"reason": "CreateContainerConfigError", "message": str(exc)}
            self._set_state({"waiting": reason})
            return
        path = container["terminationMessagePath"]
        words = [
            str(self._message) if it == path else it for it in container["command"]
        ]
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(
                [each.replace("$$(", "$(") for each in words],
                env={
                    "PATH": os.environ["PATH"],
                    "HOME": str(self._home),
                    **self._around,
                    **told,
                },
                cwd=self._home,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
            )
        self.form["spec"]["nodeName"] = "node-1"
        self.form["status"]["phase"] = "Running"
        self._set_state({"running": {"startedAt": now()}})

    def _value(self, variable: Form, secrets: Mapping[str, Mapping[str, str]]) -> str:
        if "value" in variable:
            return str(variable["value"].replace("$$(", "$("))
        if "fieldRef" in variable["valueFrom"]:
            path = variable["valueFrom"]["fieldRef"]["fieldPath"]
            key = path.removeprefix("metadata.labels['").removesuffix("']")
            return str(self.form["metadata"]["labels"].get(key, ""))
        place = variable["valueFrom"]["secretKeyRef"]
        if place["name"] not in secrets:
            raise LookupError(f'secret "{place["name"]}" not found')
        return secrets[place["name"]][place["key"]]

    def _ended(self, code: int) -> None:
        ended: Form = {"exitCode": code if code >= 0 else 128 - code}
        ended["reason"] = "Completed" if code == 0 else "Error"
        if self._message.exists():
            ended["message"] = self._message.read_text()[:4096]
        self._set_state({"terminated": ended})
        self.form["status"]["phase"] = "Succeeded" if code == 0 else "Failed"

    def _set_state(self, state: Form) -> None:
        beside = {"name": "a-proxy", "state": {"running": {"startedAt": now()}}}
        statuses = [{"name": "island", "state": state}]
        self.form["status"]["containerStatuses"] = [
            *([beside] if self.has_proxy else []),
            *statuses,
        ]


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _stamp() -> str:
    at_ns = time.time_ns()
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at_ns // 10**9))
    return f"{whole}.{at_ns % 10**9:09}Z"
