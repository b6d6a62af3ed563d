"""Where a storm happens: islands as processes, and the server that they meet at.

A `Scene` starts processes and signals them; it decides nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from atoll.exchange.bucket.create import make_run
from atoll.run_client import Action, Command, open_run
from atoll.security import Role, token_file
from atoll.settings import RunSettings
from atoll.store import open_store
from tests.e2e.stage import ROOT, Settings, Stage, until
from tests.engines import free_ports
from tests.kill_storm.fork_server import Forked, ForkServer
from tests.kill_storm.process_files import Marks, open_marks, read, report_file
from tests.store.buckets import BUCKET, has_bucket, s3_settings, seaweedfs_command


@dataclass
class Life:
    """One process of an island."""

    number: int
    name: str
    process: Forked
    marks: Marks
    folder: Path
    is_stopped: bool = False
    fate: str = ""
    """Why it may end before the run does: killed, replaced or leaving."""

    @property
    def has_joined(self) -> bool:
        return bool(self.marks["has_joined"][0])

    @property
    def round(self) -> int:
        """The last round that it has taken of every fragment."""
        return int(self.marks["round"][0])

    @property
    def report(self) -> dict[str, Any] | None:
        return read(report_file(self.folder, self.number))

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def kill(self) -> None:
        self.fate = "killed"
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.is_stopped = True
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.is_stopped = False
        self.process.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        self.fate = "leaving"
        self.process.terminate()


class Server(Protocol):
    """A process that islands meet at: a coordinator, or a store's server."""

    @property
    def process(self) -> Forked | subprocess.Popen[Any] | None: ...

    def start(self) -> None:
        """Start it without waiting until it answers."""
        ...


@dataclass
class CoordinatorServer:
    """A coordinator, at the same port in all its lives."""

    stage: Stage
    fork_server: ForkServer
    process: Forked | None = None

    def start(self) -> None:
        words = self.stage.coordinator_words()
        log = self.stage.folder / "run.log"
        module = "tests.e2e.coordinator_process"
        self.process = self.fork_server.start(module, words, log)

    def until_ready(self) -> None:
        tokens = [token_file(self.stage.directory, role) for role in Role]
        until("tokens", lambda: all(file.exists() for file in tokens))
        self.stage.know(self.stage.url)

    def end(self) -> None:
        """Let it end in good order."""
        assert self.process is not None
        self.process.terminate()
        assert self.process.wait() == 0


@dataclass
class SeaweedServer:
    """A SeaweedFS with one bucket, at the same ports in all its lives."""

    home: Path
    ports: list[int] = field(default_factory=lambda: free_ports(8))
    process: subprocess.Popen[Any] | None = None

    def start(self) -> None:
        words = seaweedfs_command(self.home, self.ports)
        with (self.home / "log.txt").open("ab") as log:
            self.process = subprocess.Popen(
                [str(word) for word in words],
                cwd=self.home,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def until_ready(self) -> None:
        where = s3_settings(self.ports[3])
        until("SeaweedFS to answer", lambda: has_bucket(where, self.ports[2]))

    @property
    def environment(self) -> dict[str, str]:
        where = s3_settings(self.ports[3])
        return {
            "AWS_ENDPOINT_URL": where["endpoint"],
            "AWS_ACCESS_KEY_ID": where["access_key_id"],
            "AWS_SECRET_ACCESS_KEY": where["secret_access_key"],
            "AWS_REGION": where["region"],
        }


@dataclass
class Scene:
    """A run, its server if it has one, and every process that has been an island."""

    folder: Path
    url: str
    where: Path | str
    """The coordinator's directory, or the URL of the store."""

    elements: int
    unit: int
    paces_s: Mapping[str, float]
    fork_server: ForkServer
    server: Server | None = None
    lives: list[Life] = field(default_factory=list)

    def start(self, name: str) -> Life:
        """Start one more process of an island, as a launcher would."""
        number = len(self.lives)
        words = [
            *(self.url, name, "--folder", str(self.folder), "--process", str(number)),
            *("--elements", str(self.elements), "--unit", str(self.unit)),
            *("--step-s", str(self.paces_s[name])),
        ]
        marks, log = open_marks(self.folder, number), self.folder / f"{name}.log"
        with log.open("a") as errors:
            errors.write(f"--- process {number} of island {name}\n")
        process = self.fork_server.start("tests.kill_storm.island", words, log)
        life = Life(number, name, process, marks, self.folder)
        self.lives.append(life)
        return life

    def stop_run(self) -> None:
        """Have an operator end the run."""
        if isinstance(self.server, CoordinatorServer):
            reply = self.server.stage.ask("POST", "/control/stop", {})
            assert reply.status == 200, reply
            return
        with closing(open_run(self.url)) as client:
            client.control(Command(Action.STOP))

    def close(self) -> None:
        """End every process that still runs."""
        server = self.server.process if self.server is not None else None
        for process in (*(life.process for life in self.lives), server):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
        self.fork_server.close()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What every scene of a storm needs to know."""

    folder: Path
    settings: Settings
    elements: int
    unit: int
    paces_s: Mapping[str, float]


def at_coordinator(plan: Plan) -> Scene:
    """Serve a run by a coordinator."""
    stage, fork_server = Stage(plan.folder, settings=plan.settings), _fork_server(plan)
    server = CoordinatorServer(stage, fork_server)
    server.start()
    server.until_ready()
    return _scene(plan, stage.url, stage.directory, fork_server, server=server)


def in_store(plan: Plan, url: str) -> Scene:
    """Make a run in a store that runs already, or that is a directory."""
    _make(plan, url)
    return _scene(plan, url, url, _fork_server(plan))


def in_seaweed(plan: Plan) -> Scene:
    """Make a run in a bucket of a SeaweedFS that is a victim, too."""
    server = SeaweedServer(plan.folder / "s3")
    server.start()
    server.until_ready()
    url = f"s3://{BUCKET}/storm"
    os.environ.update(server.environment)
    _make(plan, url)
    return _scene(plan, url, url, _fork_server(plan), server=server)


def _fork_server(plan: Plan) -> ForkServer:
    return ForkServer(
        {
            "XDG_CONFIG_HOME": str(plan.folder / "user"),
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT), os.environ.get("PYTHONPATH", "")]
            ),
            "OMP_NUM_THREADS": "1",
        }
    )


def _make(plan: Plan, url: str) -> None:
    given = {key: dict(value) for key, value in plan.settings.items()}
    make_run(open_store(url), RunSettings.from_dict(given), url=url)


def _scene(
    plan: Plan,
    url: str,
    where: Path | str,
    fork_server: ForkServer,
    *,
    server: Server | None = None,
) -> Scene:
    (plan.folder / "lives").mkdir()
    (plan.folder / "updates").mkdir()
    return Scene(
        folder=plan.folder,
        url=url,
        where=where,
        elements=plan.elements,
        unit=plan.unit,
        paces_s=plan.paces_s,
        fork_server=fork_server,
        server=server,
    )
