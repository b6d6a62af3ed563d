"""A run of real processes: what a test starts, kills, stops and looks at."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.http import HttpClient, HttpReply
from atoll.security import (
    Credentials,
    Role,
    authorization,
    calling_context,
    credentials_directory,
    read_token,
    token_file,
)
from atoll.testing import Namespace

ROOT = Path(__file__).parents[2]
PATIENT_S = 60.0
"""No condition takes so long, unless something is wrong; the machine may be busy."""

Settings = Mapping[str, Mapping[str, object]]
QUICK: Settings = {
    "run": {"name": "stage", "end_rounds": 12},
    "sync": {"sync_every": 10, "num_fragments": 2, "overlap_steps": 2},
    "wire": {"up": "fp32", "down": "int8"},
    "outer": {"momentum": 0.5},
}


def settings_for(islands: int, rounds: int) -> Settings:
    """Return quick settings of a run that so many islands begin."""
    run = {"name": "stage", "start_islands": islands, "end_rounds": rounds}
    return {**QUICK, "run": run}


def until(what: str, is_true: Callable[[], Any], *, within_s: float = PATIENT_S) -> Any:
    """Return what a condition gives as soon as it gives anything."""
    gives_up_s = time.monotonic() + within_s
    while not (found := is_true()):
        if time.monotonic() > gives_up_s:
            raise TimeoutError(f"Not within {within_s:g} s: {what}.")
        time.sleep(0.01)
    return found


def free_port() -> int:
    """Return a port that nobody is given by chance, so that a restart finds it free."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


@dataclass
class Island:
    """One process of an island."""

    name: str
    process: subprocess.Popen[Any]
    told: Path
    log: Path

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it as a power cut would."""
        self.process.kill()
        self.process.wait()

    def wait(self, within_s: float = PATIENT_S) -> dict[str, Any]:
        """Return what it did, once it has ended well."""
        self.ends_well(within_s)
        said: dict[str, Any] = json.loads(self.told.read_text())
        return said

    def ends_well(self, within_s: float = PATIENT_S) -> None:
        """Return when it has ended, with exit status 0."""
        code = self.process.wait(within_s)
        assert code == 0, self.log.read_text()[-3000:]


@dataclass
class Stage:
    """One run, its coordinator and its islands. `close` ends all that is left."""

    folder: Path
    settings: Settings = field(default_factory=lambda: QUICK)
    host: str = "127.0.0.1"
    has_tls: bool = False
    within: Namespace | None = None
    """Where the coordinator runs."""

    port: int = field(default_factory=free_port)
    name: str = "run"
    coordinator: subprocess.Popen[Any] | None = None
    islands: list[Island] = field(default_factory=list)
    pin: str | None = None

    @property
    def directory(self) -> Path:
        return self.folder / self.name

    @property
    def num_fragments(self) -> int:
        given = self.settings["sync"]["num_fragments"]
        assert isinstance(given, int)
        return given

    @property
    def url(self) -> str:
        return self.url_at((self.host, self.port))

    def url_at(self, address: tuple[str, int]) -> str:
        """Return the run's name for islands that reach it at another address."""
        return f"{'https' if self.has_tls else 'http'}://{address[0]}:{address[1]}"

    @property
    def environment(self) -> dict[str, str]:
        places = {
            "XDG_CONFIG_HOME": str(self.folder / "user"),
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT), os.environ.get("PYTHONPATH", "")]
            ),
        }
        return {**os.environ, **places, "OMP_NUM_THREADS": "1"}

    def serve(self, *, dies_at: str | None = None) -> bool:
        """Start the coordinator, and return when it serves; False: it died before.

        Its port is the same each time.
        """
        self.start_coordinator(dies_at=dies_at)
        assert self.coordinator is not None
        assert self.coordinator.stdout is not None
        with self.coordinator.stdout as said:
            line = said.readline()
        if line:
            self.pin = json.loads(line)["pin"]
            self.know(self.url)
        return bool(line)

    def start_coordinator(self, *, dies_at: str | None = None) -> None:
        """Start the coordinator without waiting for it."""
        words = self.coordinator_words(dies_at=dies_at)
        command = [sys.executable, "-m", "tests.e2e.coordinator_process", *words]
        self.coordinator = self._start(command, self.within, f"{self.name}.log")

    def coordinator_words(self, *, dies_at: str | None = None) -> list[str]:
        """Return what the coordinator's process is told."""
        self.directory.mkdir(mode=0o700, exist_ok=True)
        settings = self.folder / f"{self.name}.settings.json"
        settings.write_text(json.dumps(self.settings))
        return [
            *(str(self.directory), "--settings", str(settings)),
            *("--host", self.host, "--port", str(self.port)),
            *(["--dies-at", dies_at] if dies_at else []),
            *(["--tls"] if self.has_tls else []),
        ]

    def know(self, url: str) -> None:
        """Give this user the credentials of the run at an address."""
        place = credentials_directory(Path(), xdg_config_home=str(self.folder / "user"))
        files = {role: token_file(self.directory, role) for role in Role}
        Credentials(place).remember(url, pin=self.pin, tokens=files)

    def kill(self) -> None:
        """End the coordinator as a power cut would."""
        assert self.coordinator is not None
        self.coordinator.kill()
        self.coordinator.wait()

    def died(self, within_s: float = PATIENT_S) -> None:
        """Return when the coordinator has died at its fault point."""
        assert self.coordinator is not None
        assert self.coordinator.wait(within_s) == -signal.SIGKILL

    def close_coordinator(self) -> None:
        """Let the coordinator end in good order."""
        assert self.coordinator is not None
        self.coordinator.terminate()
        assert self.coordinator.wait(PATIENT_S) == 0

    def island(
        self,
        name: str,
        *,
        url: str | None = None,
        within: Namespace | None = None,
        elements: int = 64,
        step_s: float = 0.005,
        module: str = "tests.e2e.island_process",
    ) -> Island:
        """Start an island of two fragments; its lives differ in what they learn."""
        if url is not None:
            self.know(url)
        command = [
            *(sys.executable, "-m", module, url or self.url),
            *(name, "--folder", str(self.folder), "--seed", str(len(self.islands))),
            *("--elements", str(elements), "--step-s", str(step_s)),
        ]
        return self._island(name, command, within)

    def plain_loop(self, name: str) -> Island:
        """Start the README's loop as an island; it tells nothing when it ends."""
        command = [sys.executable, "-m", "tests.e2e.plain_loop"]
        return self._island(name, command, None)

    def _island(
        self, name: str, command: list[str], within: Namespace | None
    ) -> Island:
        told, log = self.folder / f"{name}.json", f"{name}.log"
        told.unlink(missing_ok=True)
        given = {"ATOLL_RUN": self.url, "ATOLL_ISLAND": name}
        process = self._start(command, within, log, given)
        assert process.stdout is not None
        process.stdout.close()
        island = Island(name, process, told, self.folder / log)
        self.islands.append(island)
        return island

    def events(self, name: str, **fields: object) -> list[dict[str, Any]]:
        """Return the events of a name that have these values, oldest first."""
        file = self.directory / "events.jsonl"
        if not file.exists():
            return []
        lines = file.read_text().split("\n")[:-1]  # the last is empty or not whole
        events = [json.loads(line) for line in lines if line]
        wanted = {"event": name, **fields}
        return [each for each in events if wanted.items() <= each.items()]

    def until_event(self, name: str, *, count: int = 1, **fields: object) -> Any:
        """Return the `count`-th event of a name, when it has come."""
        found = until(
            f"{count} {name} {fields}",
            lambda: (events := self.events(name, **fields))[count - 1 :] and events,
        )
        return found[count - 1]

    def until_committed(self, round: int) -> None:
        """Return when every fragment has committed a round."""
        for fragment in range(self.num_fragments):
            self.until_event("round_committed", fragment=fragment, round=round)

    def committed(self) -> int:
        """Return the last round that every fragment has committed."""
        last = [0] * self.num_fragments
        for each in self.events("round_committed"):
            last[each["fragment"]] = each["round"]
        return min(last)

    def ask(self, method: str, target: str, body: object = None) -> HttpReply:
        """Ask the coordinator something, as an operator."""
        token = read_token(token_file(self.directory, Role.OPERATOR))
        caller = HttpClient(
            self.host,
            self.port,
            timeout_s=PATIENT_S,
            connect_timeout_s=PATIENT_S,
            tls=calling_context(self.pin) if self.has_tls else None,
            pin=self.pin if self.has_tls else None,
        )
        data = None if body is None else json.dumps(body).encode()
        try:
            headers = {"Authorization": authorization(token)}
            return caller.call(method, target, headers=headers, body=data)
        finally:
            caller.close()

    def status(self) -> dict[str, Any]:
        """Return the status document."""
        said: dict[str, Any] = self.ask("GET", "/status").json()
        return said

    def tell(self, measured: str) -> None:
        """Say what was measured, to who runs the tests with `-s`."""
        sys.stdout.write(f"{measured}\n")

    def close(self) -> None:
        """End every process that still runs."""
        for process in [self.coordinator, *(each.process for each in self.islands)]:
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()

    def _start(
        self,
        command: list[str],
        within: Namespace | None,
        log: str,
        given: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[Any]:
        with (self.folder / log).open("a") as errors:
            options: dict[str, Any] = {
                "env": {**self.environment, **(given or {})},
                "cwd": ROOT,
                "stdout": subprocess.PIPE,
                "stderr": errors,
                "text": True,
            }
            if within is not None:
                return within.popen(command, **options)
            return subprocess.Popen(command, **options)
