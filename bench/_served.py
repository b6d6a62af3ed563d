"""A coordinator as people run it, `atoll serve`, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from atoll.exchange.over_http import HttpTransport
from atoll.http import Download, HttpClient, HttpReply
from atoll.security import Role, authorization, read_token, token_file

Settings = Mapping[str, Mapping[str, Any]]

SERVE = "import sys; from atoll.cli import main; sys.exit(main())"
WITHOUT_PAST = f"""
from atoll.telemetry import PastRecorder
PastRecorder.__call__ = lambda recorder, event: recorder._loaded.set()
PastRecorder.read = lambda recorder, act: None
{SERVE}
"""
"""A coordinator that does not fold its events."""

LONG_S = 600.0
"""For what moves gigabytes; nothing here takes so long unless something is wrong."""

MANY = 64
"""Connections that islands on one line keep."""

LOOK_S = 0.01
"""Between two looks at something that is waited for."""


@dataclass(frozen=True)
class Process:
    """What the system knows of a process."""

    pid: int

    def said(self, key: str) -> int:
        """Return a number of its status: sizes are in bytes."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == key:
                number, *unit = value.split()
                return int(number) * (1024 if unit else 1)
        raise KeyError(key)

    def forget_highest(self) -> None:
        """Let `VmHWM` begin anew."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    @property
    def cpu_s(self) -> float:
        """Seconds of processor that it has used, by all its threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Served:
    """A run that is served, seen from outside."""

    process: Process
    directory: Path
    url: str
    environment: Mapping[str, str]
    """What this user's other commands need to find the run."""

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    def shown(self, role: Role) -> dict[str, str]:
        """Return the header that proves a role."""
        token = read_token(token_file(self.directory, role))
        return {"Authorization": authorization(token)}

    @contextmanager
    def line(self) -> Iterator[HttpTransport]:
        """Give an island's line to the coordinator."""
        # A connection that is closed is taken for the death of who beat on it.
        caller = HttpClient(
            *self.address, timeout_s=LONG_S, connect_timeout_s=10.0, max_idle=MANY
        )
        headers = self.shown(Role.ISLAND)
        line = HttpTransport(caller, headers=headers)
        try:
            yield line
        finally:
            line.close()

    def ask(
        self,
        target: str,
        *,
        method: str = "GET",
        into: Callable[[int], memoryview] | None = None,
    ) -> HttpReply:
        """Ask the coordinator something, as an operator."""
        caller = HttpClient(*self.address, timeout_s=LONG_S, connect_timeout_s=10.0)
        try:
            headers = self.shown(Role.OPERATOR)
            return caller.call(method, target, headers=headers, fetching=Download(into))
        finally:
            caller.close()

    def status(self) -> dict[str, Any]:
        """Return the status document."""
        found: dict[str, Any] = self.ask("/status").json()
        return found

    def events(self, name: str, **fields: object) -> list[dict[str, Any]]:
        """Return the events of a name that have these values, oldest first."""
        file = self.directory / "events.jsonl"
        text = file.read_text() if file.exists() else ""
        events = [json.loads(line) for line in text.split("\n")[:-1] if line]
        wanted = {"event": name, **fields}
        return [each for each in events if wanted.items() <= each.items()]


@contextmanager
def serving(folder: Path, settings: Settings, *, code: str = SERVE) -> Iterator[Served]:
    """Serve a run until the block ends; again on its directory, if it has one."""
    run_file, directory = folder / "run.toml", folder / "run"
    run_file.write_text(as_toml(settings))
    own = {"XDG_CONFIG_HOME": str(folder / "user"), "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **own}
    command = [sys.executable, "-c", code, "serve", str(run_file)]
    with ExitStack() as stack:
        errors = stack.enter_context((folder / "coordinator.log").open("a"))
        process = stack.enter_context(
            subprocess.Popen(
                [*command, "--dir", str(directory), "--no-tls", "--json"],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
        )
        stack.callback(process.terminate)
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said, (folder / "coordinator.log").read_text()
        url = json.loads(said)["url"]
        yield Served(Process(process.pid), directory, url, environment)


def as_toml(settings: Settings) -> str:
    """Return a run file."""
    lines = []
    for table, values in settings.items():
        lines.append(f"[{table}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def until(what: str, is_true: Callable[[], Any], *, within_s: float = LONG_S) -> Any:
    """Return what a condition gives as soon as it gives anything."""
    gives_up_s = time.monotonic() + within_s
    while not (found := is_true()):
        if time.monotonic() > gives_up_s:
            raise TimeoutError(f"Not within {within_s:g} s: {what}.")
        time.sleep(LOOK_S)
    return found
