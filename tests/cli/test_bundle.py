"""A run's bundle on the command line: given, served, moved, looked at, consented to."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from atoll.bundle import Bundle, defined_by
from atoll.coordinator.app import Coordinator
from atoll.coordinator.directory import store_bundle
from atoll.errors import CorruptError, ModelError
from atoll.island.environment import credentials_from_environment
from atoll.protocol import JoinRequest
from atoll.run_client import move as migration
from atoll.run_client.move import run_file_text
from atoll.security import Credentials, Role, token_file
from atoll.store import open_store
from atoll.testing.fixtures import MODEL, enter, plain_settings
from tests.bundle.samples import PLAIN, WITH_CODE, a_bundle, written
from tests.cli.runs import CODE, as_user, atoll, environment, run
from tests.coordinator.serving import Islands, asking, serving
from tests.e2e.stage import free_port

Said = pytest.CaptureFixture[str]
SAY = "import os; print(os.environ.get('ATOLL_TRUST_CODE'))"


@pytest.fixture(autouse=True)
def _user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_user(monkeypatch, tmp_path / "home", XDG_CACHE_HOME=str(tmp_path / "cache"))


@pytest.fixture
def served(tmp_path: Path, _user: None) -> Iterator[Coordinator]:
    """Serve a run with a bundle that one island has founded, for its operator."""
    with ExitStack() as stack:
        bundle = a_bundle(WITH_CODE)
        store_bundle(tmp_path / "run", bundle)
        settings = defined_by(bundle, plain_settings(name="lagoon"))
        coordinator = stack.enter_context(serving(tmp_path / "run", settings))
        files = {role: token_file(coordinator.directory, role) for role in Role}
        known = Credentials(credentials_from_environment().credentials)
        known.remember(coordinator.url, pin=None, tokens=files)
        enter(Islands(coordinator, stack)(key=b"a"), "a")
        yield coordinator


def test_a_run_is_served_with_its_bundle(tmp_path: Path) -> None:
    """Whoever serves it again need not say it; one that was edited is refused."""
    files = written(tmp_path / "model", WITH_CODE)
    (tmp_path / "run.toml").write_text(run_file_text(plain_settings(name="lagoon")))
    start = ("serve", tmp_path / "run.toml", "--dir", tmp_path / "run", "--until-end")
    stop = ("--set", "run.end_rounds=1")
    bundle = Bundle.of_directory(files)
    settings = defined_by(bundle, plain_settings(name="lagoon"))
    store_bundle(tmp_path / "run", bundle)
    with serving(tmp_path / "run", settings):
        pass
    (files / "layers.py").write_text("SIZE = 5\n")
    edited = atoll(*start, *stop, "--bundle", files, home=tmp_path / "home")

    assert edited[0] == 2
    assert "another model" in edited[2]
    again = plain_settings(name="lagoon")
    with serving(tmp_path / "run", again) as coordinator:
        assert coordinator.status()["bundle"] == bundle.digest
        body = asking(coordinator, "GET /bundle").body
        assert body == bundle.data


def test_a_bundle_that_is_lost_is_asked_for(tmp_path: Path) -> None:
    """A run whose definition is gone or altered is not served without."""
    bundle = a_bundle()
    store_bundle(tmp_path / "run", bundle)
    settings = defined_by(bundle, plain_settings())
    with serving(tmp_path / "run", settings):
        pass
    kept = tmp_path / "run" / "bundle" / bundle.digest
    kept.write_bytes(a_bundle(WITH_CODE).data)
    with pytest.raises(CorruptError, match="was altered"):
        Coordinator(tmp_path / "run", settings)
    kept.unlink()
    code, _, err = atoll("serve", "--dir", tmp_path / "run", home=tmp_path / "home")

    assert (code, "--bundle" in err) == (2, True)


def test_a_run_in_a_store_has_its_bundle_by_digest(
    tmp_path: Path, capsys: Said
) -> None:
    """A second one there is refused, and leaves the first as it is."""
    (tmp_path / "run.toml").write_text("[run]\nname = 'lagoon'\n")
    files = written(tmp_path / "model", PLAIN)
    making = ("init", tmp_path / "bucket", tmp_path / "run.toml", "--bundle", files)
    bundle = Bundle.of_directory(files)
    assert run(capsys, *making)[0] == 0
    (files / "config.json").write_text("{}")
    again = run(capsys, *making)
    code, out, _ = run(capsys, "status", tmp_path / "bucket", "--json")

    assert (again[0], "There is a run" in again[2]) == (2, True)
    objects = [
        each.key for each in open_store(str(tmp_path / "bucket")).items("bundle/")
    ]
    assert objects == [f"bundle/{bundle.digest}"]
    assert (code, json.loads(out)["bundle"]) == (0, bundle.digest)


def test_a_run_file_that_names_a_bundle_needs_it(tmp_path: Path, capsys: Said) -> None:
    """Nothing is made without."""
    (tmp_path / "run.toml").write_text(f"[run]\nbundle = '{'a' * 64}'\n")
    code, _, err = run(capsys, "init", tmp_path / "bucket", tmp_path / "run.toml")

    assert (code, "--bundle DIR" in err) == (2, True)


def test_a_move_takes_the_bundle_along(
    served: Coordinator, tmp_path: Path, capsys: Said
) -> None:
    """Into a store, and out of it to another coordinator: the same bytes."""
    bundle, bucket = a_bundle(WITH_CODE), str(tmp_path / "bucket")
    assert run(capsys, "move", served.url, bucket)[0] == 0
    store = open_store(bucket)
    assert bytes(store.get(f"bundle/{bundle.digest}")) == bundle.data

    target = f"http://127.0.0.1:{free_port()}"
    back = run(capsys, "move", bucket, target, "--dir", tmp_path / "back", "--json")
    assert back[0] == 0, back[2]
    with serving(tmp_path / "back", None) as coordinator:
        assert coordinator.status()["bundle"] == bundle.digest
        assert asking(coordinator, "GET /bundle").body == bundle.data


def test_a_move_takes_no_more_than_a_bundle_may_have(
    served: Coordinator, tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a coordinator sends is judged before it is taken; said again, it goes on."""
    bucket = str(tmp_path / "bucket")
    with monkeypatch.context() as patch:
        patch.setattr(migration, "MAX_BYTES", 8)
        code, _, err = run(capsys, "move", served.url, bucket)

    assert (code, "of /bundle, and at most 8 are taken" in err) == (5, True), err
    assert run(capsys, "move", served.url, bucket)[0] == 0


def test_a_run_without_a_bundle_says_so(tmp_path: Path) -> None:
    """`GET /bundle` is refused with the flag that gives one."""
    with serving(tmp_path / "run", plain_settings()) as coordinator:
        heard = asking(coordinator, "GET /bundle")

    assert (heard.status, b"--bundle DIR" in heard.body) == (409, True)


def test_an_island_of_another_bundle_is_refused(served: Coordinator) -> None:
    """At the coordinator, by name; one that brings its own model is let in."""
    with ExitStack() as stack:
        exchange = Islands(served, stack)(key=b"b")
        other = JoinRequest(model=MODEL, island="b", bundle=a_bundle().digest)
        with pytest.raises(ModelError, match=a_bundle(WITH_CODE).digest[:12]):
            exchange.join(other)
        assert exchange.join(JoinRequest(model=MODEL, island="b")).island == "b"


@pytest.mark.parametrize("place", ["directory", "file", "url"])
def test_inspect_lists_a_bundle(
    served: Coordinator, tmp_path: Path, capsys: Said, place: str
) -> None:
    """Its digest, its files, and which of them are code."""
    bundle = a_bundle(WITH_CODE)
    where = {
        "directory": str(written(tmp_path / "model", WITH_CODE)),
        "file": str(served.directory / "bundle" / bundle.digest),
        "url": f"file://{served.directory}/bundle/{bundle.digest}",
    }[place]
    code, out, _ = run(capsys, "inspect", where)
    facts = json.loads(run(capsys, "inspect", where, "--json")[1])

    assert (code, out.splitlines()[0]) == (0, f"bundle {bundle.digest}")
    assert "made by model:make_model" in out
    assert facts["code"] == ["layers.py", "model.py"]
    assert facts["files"]["layers.py"] == len(WITH_CODE["layers.py"])


def test_inspect_refuses_an_archive_of_somebody_elses(
    tmp_path: Path, capsys: Said
) -> None:
    """Exit code 5, as for every corrupt file."""
    data = a_bundle().data
    (tmp_path / "x").write_bytes(data[:600])

    assert run(capsys, "inspect", tmp_path / "x")[0] == 5


def test_consent_is_carried_to_the_command(served: Coordinator, tmp_path: Path) -> None:
    """By its digest, which has to be the run's."""
    digest = a_bundle(WITH_CODE).digest
    home = tmp_path / "home"
    join = ("join", served.url, "--trust-code")
    right = atoll(*join, digest, "--", "python", "-c", SAY, home=home)
    wrong = atoll(*join, "0" * 64, "--", "python", "-c", SAY, home=home)
    without = atoll("join", served.url, "--", "python", "-c", SAY, home=home)

    assert right[:2] == (0, f"{digest}\n")
    assert (wrong[0], digest in wrong[2]) == (4, True)
    assert without[:2] == (0, "None\n")


def at_terminal(url: str, answer: str, tmp_path: Path) -> tuple[str, str]:
    """Join at a terminal; return what the command was told, and what was asked."""
    ours, theirs = pty.openpty()
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", CODE, "join", url, "--", "python", "-c", SAY]
    with subprocess.Popen(
        command,
        env=environment(tmp_path / "home", **cache),
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    ) as process:
        os.write(ours, f"{answer}\n".encode())
        assert process.stdout is not None
        told = process.stdout.read().strip()
    asked = os.read(ours, 65536).decode()
    os.close(ours)
    os.close(theirs)
    return told, asked


def test_a_person_at_the_terminal_is_asked_once(
    served: Coordinator, tmp_path: Path
) -> None:
    """A no is told to the command, and a yes remembered for the next."""
    digest = a_bundle(WITH_CODE).digest
    no = at_terminal(served.url, "n", tmp_path)
    yes = at_terminal(served.url, "y", tmp_path)
    again = at_terminal(served.url, "n", tmp_path)

    assert (no[0], digest in no[1]) == ("none", True)
    assert (yes[0], "Let it run" in yes[1]) == (digest, True)
    assert (again[0], "Let it run" in again[1]) == (digest, False)
