"""`atoll move` from a store to a coordinator: what it makes, says and refuses."""

from __future__ import annotations

import json
import shlex
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll import RunSettings
from atoll.cli.run_names import locate_run
from atoll.exchange.bucket.create import make_run
from atoll.island.environment import credentials_from_environment
from atoll.run_client.move import run_file_text
from atoll.security import Credentials, Role, RunUrl, run_tokens
from atoll.security.certificates import coordinator_certificate
from atoll.store import open_store
from tests.cli.runs import as_user, ended, run, started
from tests.cli.stores import Trained, made, settings
from tests.e2e.stage import free_port, until

Said = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_user(monkeypatch, tmp_path / "home")


@pytest.fixture
def ended_run(tmp_path: Path, _user: None) -> str:
    """Return the URL of a run that two islands have brought to its end."""
    url = made(tmp_path / "bucket", end_rounds=2)
    Trained(url).wait()
    return url


@contextmanager
def typed(command: str, home: Path) -> Iterator[dict[str, Any]]:
    """Do what a command has said to type, while the block lasts."""
    program, *words = shlex.split(command)
    assert program == "atoll"
    process = started(*words, "--json", home=home)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, ended(process)
        yield json.loads(line)
    finally:
        process.kill()
        process.communicate()


def test_a_run_is_served_by_what_the_command_says(tmp_path: Path, capsys: Said) -> None:
    """Islands go on over TLS meanwhile; the run's name means the coordinator."""
    url, target = made(tmp_path / "bucket"), f"https://127.0.0.1:{free_port()}"
    trained = Trained(url)
    until("a run", lambda: _round(capsys, url) > 1)
    directory = tmp_path / "target"
    assert run(capsys, "control", url, "set", "run.patience=2.5")[0] == 0
    code, out, err = run(capsys, "move", url, target, "--dir", directory, "--json")
    assert code == 0, err
    assert RunSettings.from_toml(directory / "run.toml").run.patience == 2.5
    said = json.loads(out)
    assert (said["state"], said["move"]["target"]) == ("moved", target)
    with typed(said["serve"], tmp_path / "home") as served:
        assert (served["run"], served["url"]) == (said["run"], target)
        assert locate_run("lagoon") == locate_run(target)
        at = _round(capsys, "lagoon")
        until("rounds to close", lambda: _round(capsys, "lagoon") > at + 1)
        program, *invite = shlex.split(said["invite"])
        code, out, err = run(capsys, *invite)
        assert (program, code, out.startswith("atoll join 'atoll://")) == (
            *("atoll", 0),
            True,
        )
        assert run(capsys, "control", "lagoon", "stop")[0] == 0
        anchors = list(trained.wait().values())
        status = _status(capsys, "lagoon")

    for mine, other in zip(*anchors, strict=True):
        assert np.array_equal(mine, other)
    assert status["state"] == "ended"
    assert {each["incarnation"] for each in status["islands"]} == {1}
    assert {each["slot"] for each in status["islands"]} == {0, 1}


def _status(capsys: Said, name: str) -> dict[str, Any]:
    code, out, err = run(capsys, "status", name, "--json")
    assert code == 0, err
    said: dict[str, Any] = json.loads(out)
    return said


def _round(capsys: Said, name: str) -> int:
    return int(_status(capsys, name)["round"])


def test_the_directory_is_as_serve_would_make_it(
    ended_run: str, tmp_path: Path, capsys: Said
) -> None:
    """Tokens, a certificate that is pinned, a run file; and nobody else may read."""
    directory, target = tmp_path / "run", "https://reef.example:4711"
    code, out, _ = run(capsys, "move", ended_run, target, "--dir", directory)
    assert code == 0
    assert f"--dir {directory} --listen 0.0.0.0 --port 4711" in out
    assert "atoll invite lagoon --address reef.example:4711" in out
    names = {each.name for each in directory.iterdir()}
    assert names == {
        *("journal", "move.json", "run.toml", "address.json"),
        *("island.token", "operator.token", "certificate.pem", "certificate.key"),
    }
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert RunSettings.from_toml(directory / "run.toml") == settings(end_rounds=2)
    known = Credentials(credentials_from_environment().credentials).find(target)
    assert known is not None
    assert known.pin is not None
    assert known.token(Role.OPERATOR) is not None
    assert isinstance(locate_run("lagoon"), RunUrl)


def test_a_directory_may_have_what_islands_know_already(
    ended_run: str, tmp_path: Path, capsys: Said
) -> None:
    """Tokens and a certificate of an earlier coordinator stay: nobody is invited."""
    directory, target = tmp_path / "run", "https://127.0.0.1:4711"
    directory.mkdir(mode=0o700)
    before = run_tokens(directory)
    shown = coordinator_certificate(directory, hosts=["reef"], unix_s=time.time())
    assert run(capsys, "move", ended_run, target, "--dir", directory)[0] == 0

    known = Credentials(credentials_from_environment().credentials).find(target)
    assert known is not None
    assert known.pin == shown.pin
    assert known.token(Role.ISLAND) == before[Role.ISLAND]


def test_saying_it_again_is_saying_it_once(
    ended_run: str, tmp_path: Path, capsys: Said
) -> None:
    """The directory stays as it is, and tells the same."""
    directory, target = tmp_path / "run", "https://127.0.0.1:4711"
    words = ("move", ended_run, target, "--dir", directory)
    first = run(capsys, *words)
    token = (directory / "operator.token").read_bytes()
    assert run(capsys, *words) == first
    assert (directory / "operator.token").read_bytes() == token
    code, out, _ = run(capsys, "move", "lagoon", target, "--dir", directory)
    assert (code, "is at https://127.0.0.1:4711 already" in out) == (0, True)
    code, _, err = run(capsys, *words, "--back")
    assert (code, "has moved to" in err) == (4, True)


def test_a_run_file_holds_every_kind_of_value(tmp_path: Path) -> None:
    """What is written is read back to the same settings."""
    given = RunSettings.from_dict(
        {
            "run": {"name": 'ré"ef\\ 🏝', "end_tokens": 10**12},
            "outer": {"lr": 1e-05, "momentum": 0.7},
            "wire": {"up": "e3m0", "down": "int8"},
        }
    )
    path = tmp_path / "run.toml"
    path.write_text(run_file_text(given))

    assert RunSettings.from_toml(path) == given


@pytest.mark.parametrize(
    ("words", "way_out"),
    [
        (("./elsewhere",), "by way of a coordinator"),
        (("http://reef.example:1",), "would send the token in the open"),
        (("https://reef.example:1", "--back"), "is not moving"),
    ],
)
def test_what_cannot_be_is_told_the_way_out(
    ended_run: str, tmp_path: Path, capsys: Said, words: tuple[str, ...], way_out: str
) -> None:
    """Nothing has happened then."""
    directory = tmp_path / "run"
    code, _, err = run(capsys, "move", ended_run, *words, "--dir", directory)

    assert (code, way_out in err) == (2, True), err
    assert not directory.exists()


def test_nobody_may_listen_where_the_run_goes(
    ended_run: str, tmp_path: Path, capsys: Said
) -> None:
    """A run does not come to a coordinator that serves another; nothing is made."""
    directory = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as other:
        target = f"https://127.0.0.1:{other.getsockname()[1]}"
        code, _, err = run(capsys, "move", ended_run, target, "--dir", directory)

    assert (code, "choose another port" in err) == (2, True)
    assert not directory.exists()


def test_a_directory_has_one_run(ended_run: str, tmp_path: Path, capsys: Said) -> None:
    """Another one does not come there, and a coordinator's stays what it is."""
    directory, target = tmp_path / "run", "https://127.0.0.1:4711"
    assert run(capsys, "move", ended_run, target, "--dir", directory)[0] == 0
    url = made(tmp_path / "other", end_rounds=1)
    Trained(url).wait()
    code, _, err = run(capsys, "move", url, target, "--dir", directory)
    assert (code, "holds a run already" in err) == (2, True)
    code, _, err = run(capsys, "move", target, "s3://b", "--dir", directory)
    assert (code, "--dir is for" in err) == (2, True)


def test_a_directory_that_waits_is_not_served(
    ended_run: str, tmp_path: Path, capsys: Said
) -> None:
    """It says which command is to be said again; a damaged note is named."""
    directory, target = tmp_path / "run", "https://127.0.0.1:4711"
    assert run(capsys, "move", ended_run, target, "--dir", directory)[0] == 0
    (directory / "journal").rename(directory / "journal.arriving")
    serve = ("serve", directory / "run.toml", "--dir", directory)
    code, _, err = run(capsys, *serve)
    assert code == 2
    assert f"atoll move {ended_run} {target} --dir {directory}" in err
    other = made(tmp_path / "other", end_rounds=1)
    Trained(other).wait()
    code, _, err = run(capsys, "move", other, target, "--dir", directory)
    assert (code, "Another run is being moved" in err) == (2, True)
    (directory / "move.json").write_text("{}")
    code, _, err = run(capsys, *serve)
    assert (code, "does not name the run" in err) == (5, True)


def test_a_run_that_is_left_on_its_way_is_told(
    ended_run: str, tmp_path: Path, capsys: Said
) -> None:
    """What is damaged cannot come along: the error and the ways out are named."""
    words = ("move", ended_run, "https://127.0.0.1:4711", "--dir", tmp_path / "run")
    for folder in ("founding", "states"):
        for path in (tmp_path / "bucket" / folder).rglob("*"):
            if path.is_file():
                path.write_bytes(b"nothing of the kind")
    code, _, err = run(capsys, *words)
    assert (code, "the run is moving" in err) == (5, True)
    assert run(capsys, *words, "--back")[0] == 0
    assert not (tmp_path / "run" / "journal.arriving").exists()


def test_a_run_with_a_decider_stays_in_its_store(tmp_path: Path, capsys: Said) -> None:
    """A coordinator decides itself."""
    url = str(tmp_path / "bucket")
    given = settings(end_rounds=1).with_values({"store.decider": "a"})
    make_run(open_store(url), given, url=url)
    Trained(url).wait()
    code, _, err = run(capsys, "move", url, "https://127.0.0.1:1")

    assert (code, "store.decider" in err) == (2, True), err


def test_a_store_that_a_run_has_left_says_so(
    ended_run: str, tmp_path: Path, capsys: Said
) -> None:
    """Who exports from it, or asks the doctor, is told where the run is."""
    target = "https://reef.example:4711"
    run(capsys, "move", ended_run, target, "--dir", tmp_path / "run")

    code, _, err = run(capsys, "export", ended_run, tmp_path / "out.safetensors")
    assert code == 0
    assert f"has moved to {target}" in err
    assert f"has moved to {target}" in run(capsys, "doctor", ended_run)[1]
