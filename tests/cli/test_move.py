"""`atoll move`: what it refuses, and what it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from atoll.cli.run_names import StoreUrl, locate_run
from atoll.coordinator.app import Coordinator
from atoll.errors import Refused
from atoll.island.environment import credentials_from_environment
from atoll.launch.code import fetch_code, pack_code, ship_code
from atoll.security import Credentials, Role, token_file
from atoll.store import open_store
from atoll.testing.fixtures import enter, plain_settings
from tests.cli.runs import as_user, run
from tests.cli.stores import made
from tests.coordinator.serving import Islands, asking, serving
from tests.e2e.stage import free_port

Said = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_user(monkeypatch, tmp_path / "home")


@pytest.fixture
def served(tmp_path: Path, _user: None) -> Iterator[Coordinator]:
    """Serve a run that one island has founded, for a user who is its operator."""
    with ExitStack() as stack:
        settings = plain_settings(name="lagoon", start_islands=2)
        coordinator = stack.enter_context(serving(tmp_path / "run", settings))
        files = {role: token_file(coordinator.directory, role) for role in Role}
        known = Credentials(credentials_from_environment().credentials)
        known.remember(coordinator.url, pin=None, tokens=files)
        enter(Islands(coordinator, stack)(key=b"a"), "a")
        yield coordinator


def test_a_moved_run_is_known_by_its_name(
    served: Coordinator, tmp_path: Path, capsys: Said
) -> None:
    """Status says where it is, at the old place and by its name."""
    target = str(tmp_path / "bucket")
    code, out, _ = run(capsys, "move", served.url, target, "--json")
    said = json.loads(out)

    assert (code, said["state"], said["move"]["target"]) == (0, "moved", target)
    assert locate_run("lagoon") == StoreUrl(target)
    code, out, _ = run(capsys, "status", "lagoon", "--json")
    assert json.loads(out)["islands"][0]["island"] == "a"
    code, _, err = run(capsys, "control", served.url, "pause")
    assert (code, "Control it there" in err) == (4, True)
    again = run(capsys, "move", served.url, target)
    assert (again[0], "The run has moved to" in again[1]) == (0, True)


def test_code_moves_with_the_run(
    served: Coordinator,
    tmp_path: Path,
    capsys: Said,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Into a store, and out of it to another coordinator: it is where the run is.

    An island that is started again with an old URL is sent on to it. What was altered
    in the store stays there.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.py").write_text("print('aboard')\n")
    code, bucket = pack_code(tmp_path / "mine"), str(tmp_path / "bucket")
    ship_code(served.url, code)
    assert asking(served, "GET /code").status == 403
    assert run(capsys, "move", served.url, bucket)[0] == 0
    (served.directory / "code" / code.digest).unlink()
    for run_url in (bucket, served.url):
        fetched = fetch_code(run_url, code.digest, island="a-0")
        assert (fetched / "train.py").read_text() == "print('aboard')\n"

    open_store(bucket).put(f"code/{'0' * 64}", [b"altered"])
    target = f"http://127.0.0.1:{free_port()}"
    back = run(capsys, "move", bucket, target, "--dir", tmp_path / "back")
    assert back[0] == 0, back[2]
    assert [each.name for each in (tmp_path / "back" / "code").iterdir()] == [
        code.digest
    ]
    open_store(bucket).remove([f"code/{code.digest}"])
    port = int(target.rpartition(":")[2])
    with serving(tmp_path / "back", None, port=port):
        fetch_code(bucket, code.digest, island="b-0")
        with pytest.raises(Refused, match="does not have code 111111111111"):
            fetch_code(served.url, "1" * 64, island="b-0")


def test_a_run_moves_to_one_place(
    served: Coordinator, tmp_path: Path, capsys: Said
) -> None:
    """Where something is it does not go, nor to two places."""
    target = tmp_path / "bucket"
    store = open_store(str(target))
    store.put("notes", [b"mine"])
    code, _, err = run(capsys, "move", served.url, str(target))
    assert (code, "already: notes" in err) == (2, True)
    code, _, err = run(capsys, "move", served.url, str(target), "--back")
    assert (code, "is not moving" in err) == (2, True)
    assert run(capsys, "move", served.url, str(tmp_path / "other"))[0] == 0
    code, _, err = run(capsys, "move", served.url, str(target))
    assert (code, "Name that one" in err) == (2, True)


@pytest.mark.parametrize(
    ("source", "target", "way_out"),
    [
        ("store", "https://host:1", "has no weights yet"),
        ("store", "./elsewhere", "by way of a coordinator"),
        ("http://127.0.0.1:1", "https://host:1", "move its directory"),
        ("http://127.0.0.1:1", "s3://bucket", "No token is known"),
    ],
)
def test_what_cannot_move_is_told_the_way_out(
    tmp_path: Path, capsys: Said, source: str, target: str, way_out: str
) -> None:
    """Nothing has happened then."""
    if source == "store":
        source = made(tmp_path / "bucket")
    code, _, err = run(capsys, "move", source, target)

    assert (code, way_out in err) == (2, True), err


def test_only_operators_learn_what_a_run_takes_along(served: Coordinator) -> None:
    """An island's token is not enough; before a move there is nothing to say."""
    heard = asking(served, "GET /belongings")
    assert heard.status == 403
    heard = asking(served, "GET /belongings", role=Role.OPERATOR)
    assert (heard.status, b"Move it first" in heard.body) == (400, True)


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ({"target": 3, "nonce": "0f" * 16}, "target"),
        ({"target": "s3://a\nb", "nonce": "0f" * 16}, "not printable"),
        ({"target": "s3://" + "a" * 600, "nonce": "0f" * 16}, "512 bytes"),
        ({"target": "s3://lagoon", "nonce": "../.."}, "hex"),
        ({"nonce": "0f" * 16}, "target"),
    ],
)
def test_a_move_says_where_in_the_right_form(
    served: Coordinator, said: object, fault: str
) -> None:
    """A wrong word changes nothing."""
    body = json.dumps(said).encode()
    heard = asking(served, "POST /control/move", body, role=Role.OPERATOR)

    assert (heard.status, fault in heard.body.decode()) == (400, True), heard.body
    assert served.status()["state"] == "waiting"
