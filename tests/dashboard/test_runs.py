"""A dashboard shows a run at a coordinator, in a store, and in a directory alike."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.cli.dashboard import redirect_file
from atoll.dashboard import RunFeed
from atoll.run_client import RunClient, open_run
from atoll.run_client.directory import DirectoryRunClient
from tests.cli import stores
from tests.cli.runs import CODE, as_user
from tests.run_client.conftest import END_ROUNDS, served, stored

HOSTS = {"coordinator": served, "store": stored, "directory": served}


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Be a user without runs."""
    with pytest.MonkeyPatch.context() as patch:
        as_user(patch, tmp_path_factory.mktemp("home"))
        yield


def _first(open_client: Callable[[], RunClient]) -> dict[str, Any]:
    feed = RunFeed(open_client, poll_s=60.0)
    try:
        feed.start()
        return feed.first()
    finally:
        feed.close()


@pytest.mark.usefixtures("user")
@pytest.mark.parametrize("kind", HOSTS)
def test_every_kind_of_run_is_shown(kind: str, tmp_path: Path) -> None:
    """With its settings, its past and its events."""
    directory = tmp_path / "run"
    with HOSTS[kind](directory) as url:
        stores.Trained(url).wait()
        if kind != "directory":
            first = _first(lambda: open_run(url))
    if kind == "directory":
        first = _first(lambda: DirectoryRunClient(directory))

    assert first["status"]["state"] == "ended"
    assert first["status"]["round"] == END_ROUNDS
    assert first["error"] is None
    assert any(row["key"] == "run.end_rounds" for row in first["settings"]["rows"])
    assert first["events"]
    marks = first["history"][0]["marks"]["columns"]
    assert {column[3] for column in marks} == {"##"}


@pytest.mark.usefixtures("user")
@pytest.mark.parametrize("kind", ["coordinator", "directory"])
def test_the_command_prints_a_link(kind: str, tmp_path: Path) -> None:
    """It ends with 0 on a signal; of a run that has ended it offers no controls."""
    directory = tmp_path / "run"
    command = [sys.executable, "-c", CODE, "dashboard", str(directory), "--port", "0"]

    def lines() -> list[str]:
        with subprocess.Popen(
            [*command, "--no-open"], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            printed = [process.stdout.readline() for _ in range(4)]
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        return printed

    with served(directory) as url:
        if kind == "coordinator":
            printed = lines()
        else:
            stores.Trained(url).wait()
    if kind == "directory":
        printed = lines()

    assert printed[2].startswith("page  http://127.0.0.1:")
    assert "#c=" in printed[2]
    may = "look" if kind == "directory" else "look and control"
    assert printed[1] == f"may   {may}\n"


def test_the_link_is_in_a_private_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only this user may read it; it is removed at the end."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("BROWSER", "true")
    tmp_path.chmod(0o700)
    with redirect_file('http://127.0.0.1:1/#c="0"') as path:
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert "#c=&quot;0&quot;" in path.read_text()
    assert not path.exists()
