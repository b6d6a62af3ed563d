"""A coordinator among its islands: nobody outside of the engine reaches it.

Real coordinators and real islands, in the processes of loopback clouds that resolve
their names for nobody else.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.runs import ISLAND, RUN_FILE, as_user
from tests.e2e.stage import PATIENT_S
from tests.launch.hf_hub import TOKEN, served
from tests.launch.kubernetes_server import KubernetesServer

pytestmark = pytest.mark.timeout(600)


@contextmanager
def _kubernetes(place: Path) -> Iterator[list[str]]:
    place.mkdir()
    with KubernetesServer(place).serving() as server:
        yield _options(kubeconfig=server.kubeconfig(), python=sys.executable)
        assert len(server.services) == 1


@contextmanager
def _hf_jobs(place: Path) -> Iterator[list[str]]:
    with served(place) as hub:
        yield _options(endpoint=hub.url, network_group="reef")


def _options(**given: object) -> list[str]:
    given["port"] = _free_port()
    return [word for key, it in given.items() for word in ("--option", f"{key}={it}")]


def _free_port() -> int:
    """Return a port that is free now: in a cloud every container has its own."""
    with socket.socket() as held:
        held.bind(("", 0))
        return int(held.getsockname()[1])


ENGINES = {"kubernetes": _kubernetes, "hf_jobs": _hf_jobs}


@pytest.fixture(params=ENGINES)
def words(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[str]]:
    """What follows `atoll launch`, but for the command."""
    as_user(monkeypatch, tmp_path / "home")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RUN_FILE)
    with ENGINES[request.param](tmp_path / "cloud") as options:
        words = ["--on", request.param, "--coordinator", "island0", "-n", "2"]
        yield [*words, "--name", "reef", "--image", "reef/atoll:1", *options]


def test_a_run_is_trained_where_nobody_else_reaches_it(words: list[str]) -> None:
    """The engine's word for the coordinator's end is the command's exit code."""
    done = _atoll("launch", *words, "run.toml", "--", "python", "-c", ISLAND)

    assert done.returncode == 0, done.stdout + done.stderr
    states = _table(done.stdout)
    assert states == dict.fromkeys(("reef-0", "reef-1", "coordinator-0"), "finished")
    digests = {
        line.split()[-1] for line in done.stdout.splitlines() if " | reef-" in line
    }
    assert len(digests) == 1


def test_it_is_found_and_ended_by_the_name_of_its_run(words: list[str]) -> None:
    """Coordinator and islands are in `ps` and `logs`, and go with one word."""
    stay = "import time; print('here', flush=True); time.sleep(600)"
    done = _atoll("launch", "--detach", *words, "run.toml", "--", "python", "-c", stay)
    assert done.returncode == 0, done.stderr
    assert _states("lagoon").keys() == {"reef-0", "reef-1", "coordinator-0"}
    said = _atoll("logs", "lagoon", "coordinator-0").stdout
    assert '"name": "lagoon"' in said
    assert "atoll_" not in said
    more = _atoll("scale", "lagoon", "3")
    assert more.returncode == 0, more.stderr
    done = _atoll("cancel", "lagoon", "--grace-s", "1")

    assert done.returncode == 0, done.stderr
    assert set(_states("lagoon", "--all").values()) == {"cancelled"}
    assert len(_states("lagoon", "--all")) == 4


def test_who_cannot_be_served_is_told_before_anything_runs(words: list[str]) -> None:
    """Islands that die leave no coordinator behind, and the exit code says so."""
    done = _atoll(
        "launch", *words, "run.toml", "--", "python", "-c", "raise SystemExit(7)"
    )

    assert done.returncode == 1, done.stdout + done.stderr
    assert set(_states("--all").values()) == {"failed", "cancelled"}


def _table(said: str) -> dict[str, str]:
    """Return the states of the table at the end."""
    rows = [line.split() for line in said.splitlines()]
    head = max(i for i, row in enumerate(rows) if row[:2] == ["island", "state"])
    return {row[0]: row[1] for row in rows[head + 1 :] if len(row) > 1}


def _states(*words: str) -> dict[str, str]:
    done = _atoll("ps", "--json", *words)
    assert done.returncode == 0, done.stderr
    return {
        island["name"]: island["state"]
        for each in json.loads(done.stdout)
        for island in each["islands"]
    }


def _atoll(*words: str) -> subprocess.CompletedProcess[Any]:
    return subprocess.run(
        [sys.executable, "-m", "atoll.cli", *words],
        env=dict(os.environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=4 * PATIENT_S,
    )
