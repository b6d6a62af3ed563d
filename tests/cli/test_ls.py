"""`atoll ls`: the runs of a user, with their statuses, in a bounded time."""

from __future__ import annotations

import json
import shutil
import socket
import time
from pathlib import Path

import pytest

from atoll.cli import ls
from atoll.cli.ls import KnownRun, looked_at
from atoll.island.environment import credentials_from_environment
from atoll.run_client.location import RunNames, write_address
from tests.cli import stores
from tests.cli.runs import as_user, run, serving
from tests.run_client.conftest import served


def by_name(output: str) -> dict[str, dict[str, object]]:
    """Return the JSON of runs by their shortest names."""
    return {min(row["names"], key=len): row for row in json.loads(output)}


def test_runs_are_listed_with_their_states(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at a coordinator, one in a store; one that stops is listed by its events."""
    monkeypatch.setattr(ls, "LOOK_S", 60.0)  # a busy machine is no silent run
    with serving(tmp_path) as server:
        as_user(monkeypatch, server.home)
        url = stores.made(tmp_path / "bucket", end_rounds=2)
        RunNames(credentials_from_environment()).remember("reef", url)
        _, text, _ = run(capsys, "ls")
        _, output, _ = run(capsys, "ls", "--json")
        rows, directory = by_name(output), server.directory
        server.stop()
    _, output, _ = run(capsys, "ls", "--json")
    stopped = by_name(output)["lagoon"]
    shutil.rmtree(directory)
    _, without, _ = run(capsys, "ls", "--json")
    _, output, _ = run(capsys, "ls", "--json", "--all")

    lines = {line.split()[0]: line.split() for line in text.splitlines()}
    assert lines["run"] == ["run", "state", *HEAD]
    # No island, no rate, and no end in sight.
    assert lines["lagoon"][1:5] == ["founding", "0", "of", "4"]
    assert lines["lagoon"][-2:] == ["serve", str(directory)]
    assert rows["lagoon"]["state"] == "founding"
    assert (rows["lagoon"]["roles"], rows["lagoon"]["live"]) == (["serve"], 0)
    assert len(rows["lagoon"]["names"]) == 2  # type: ignore[arg-type] # a list
    assert (rows["reef"]["roles"], rows["reef"]["round"]) == (["store"], 0)
    assert (stopped["state"], stopped["round"]) == ("not served", 0)
    assert "lagoon" not in by_name(without)
    assert by_name(output)["lagoon"]["state"] == "removed"


HEAD = ["round", "islands", "tokens/s", "ends", "in", "as", "at"]


def test_an_ended_run_is_read_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a coordinator; until another run takes its directory."""
    monkeypatch.setattr(ls, "LOOK_S", 60.0)
    as_user(monkeypatch, tmp_path / "home")
    with served(tmp_path / "run") as url:
        stores.Trained(url).wait()
    name = stores.settings().run.name
    _, output, _ = run(capsys, "ls", "--json")
    code, page, _ = run(capsys, "status", name)
    _, events, _ = run(capsys, "events", name)

    assert by_name(output)[name]["state"] == "ended"
    assert (code, page.split()[:2]) == (0, [name, "ended"])
    assert "tokens/s" not in page.splitlines()[0]
    assert "run_ended" in events

    write_address(tmp_path / "run", "https://127.0.0.1:1", is_open=False)
    _, output, _ = run(capsys, "ls", "--json", "--all")
    assert by_name(output)[name]["state"] == "removed"


def test_a_silent_run_is_not_waited_for() -> None:
    """Two runs that accept and never answer take one bounded wait together."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        started_s = time.monotonic()
        runs = looked_at([KnownRun(url), KnownRun(url)], timeout_s=0.2)
        took_s = time.monotonic() - started_s

    assert [run.state for run in runs] == ["no answer", "no answer"]
    assert took_s < 10.0


def test_a_user_without_runs_is_shown_how_to_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No table without rows."""
    as_user(monkeypatch, tmp_path)
    code, text, _ = run(capsys, "ls")

    assert (code, text) == (
        0,
        "No runs are known here. Start one: atoll serve run.toml\n",
    )
    assert run(capsys, "ls", "--json")[1] == "[]\n"
