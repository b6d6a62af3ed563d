"""An island waits for a coordinator that is not up yet, and for nothing else."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from atoll.coordinator.app import Coordinator, ListenOptions
from atoll.errors import Refused, Unreachable
from atoll.http import Request, Response, as_json
from atoll.island.connection import CoordinatorConnection, connect
from atoll.island.environment import CredentialPaths
from atoll.runtime import SystemClock
from atoll.security import Role, make_token, token_file
from atoll.testing.fixtures import plain_settings
from atoll.wire.digests import view_of
from tests.coordinator.serving import serving
from tests.http.loopback import listening


def credential_paths(directory: Path, token: Path | None = None) -> CredentialPaths:
    """Return the paths of a user with this token, or with an unknown one."""
    if token is None:
        token = directory / "token"
        token.touch(mode=0o600)
        token.write_text(make_token(Role.ISLAND).reveal())
    keys = directory / "keys"
    return CredentialPaths(credentials=directory, keys=keys, token_file=token)


def reached(
    url: str, paths: CredentialPaths, *, wait_s: float = 60.0
) -> CoordinatorConnection:
    connection = connect(
        url, island="a", paths=paths, clock=SystemClock(), wait_s=wait_s
    )
    with connection.leaving():
        return connection


@pytest.fixture
def retries(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return the log messages about retries."""
    caplog.set_level(logging.WARNING, logger="atoll")
    return lambda: [
        record.getMessage()
        for record in caplog.records
        if "retrying " in record.getMessage()
    ]


class OnRetry(logging.Handler):
    """Calls `act` once, when a retry is logged."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__(logging.WARNING)
        self._act: Callable[[], None] | None = act

    def emit(self, record: logging.LogRecord) -> None:
        act, self._act = self._act, None
        if act is not None:
            act()


@contextmanager
def when_it_waits(act: Callable[[], None]) -> Iterator[None]:
    log, handler = logging.getLogger("atoll"), OnRetry(act)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def test_an_island_may_be_started_before_its_coordinator(
    tmp_path: Path, retries: Callable[[], list[str]]
) -> None:
    """It retries until the coordinator listens, and logs that once."""
    directory = tmp_path / "run"
    with serving(directory, plain_settings()) as served:
        url, run = served.url, served.run
    port = int(url.rpartition(":")[2])
    started: list[Coordinator] = []

    def start() -> None:
        listens = ListenOptions(port=port, has_tls=False)
        started.append(Coordinator(directory, None, listening=listens))
        started[0].start()

    paths = credential_paths(tmp_path, token_file(directory, Role.ISLAND))
    try:
        with when_it_waits(start):
            connection = reached(url, paths)
    finally:
        started[0].close(grace_s=0.2)

    assert connection.info.run == run
    (message,) = retries()
    assert message.startswith(f"retrying {url} for 60 s: ")
    assert "refused" in message


def test_a_coordinator_behind_something_that_answers_for_it_is_waited_for(
    tmp_path: Path, retries: Callable[[], list[str]]
) -> None:
    """503 means not yet; the reply after it counts."""
    directory = tmp_path / "run"
    with serving(directory, plain_settings()) as served:
        info = json.loads(view_of(served._info().body[0]).tobytes())
    answers = [as_json({}, status=503), as_json({}, status=502), as_json(info)]

    def handle(request: Request) -> Response:
        return answers.pop(0)

    with listening(handle) as listener:
        url = "http://{}:{}".format(*listener.address)
        connection = reached(url, credential_paths(tmp_path))

    assert connection.info.run == info["run"]
    assert len(retries()) == 1


def test_who_never_comes_up_is_waited_for_no_longer_than_said(tmp_path: Path) -> None:
    """The error has the duration of the retries."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # bound, but not listening
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        with pytest.raises(Unreachable, match=r"did not answer.* retried for 0\.5 s"):
            reached(url, credential_paths(tmp_path), wait_s=0.5)


def test_a_wrong_token_is_refused_at_once(
    tmp_path: Path, retries: Callable[[], list[str]]
) -> None:
    """A coordinator that refuses is not asked again."""
    with (
        serving(tmp_path / "run", plain_settings()) as served,
        pytest.raises(Refused, match="token"),
    ):
        reached(served.url, credential_paths(tmp_path))

    assert retries() == []


def test_what_is_no_coordinator_is_refused_at_once(
    tmp_path: Path, retries: Callable[[], list[str]]
) -> None:
    """404 is an answer."""
    with listening(lambda request: as_json({}, status=404)) as listener:
        url = "http://{}:{}".format(*listener.address)
        with pytest.raises(Unreachable, match=r"answers 404\. Is a coordinator"):
            reached(url, credential_paths(tmp_path))

    assert retries() == []


def test_http_where_tls_is_spoken_is_refused_at_once(
    tmp_path: Path, retries: Callable[[], list[str]]
) -> None:
    """A retry could not succeed."""
    with serving(tmp_path / "run", plain_settings(), has_tls=True) as served:
        url = served.url.replace("https://", "http://")
        with pytest.raises(Unreachable):
            reached(url, credential_paths(tmp_path))

    assert retries() == []


def test_a_name_that_nobody_has_is_refused_at_once(
    tmp_path: Path,
    retries: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The resolver does not know the name; its temporary failure is retried."""

    def unknown(*words: object, **named: object) -> list[object]:
        raise socket.gaierror(codes.pop(0), "not known")

    codes = [socket.EAI_NONAME]
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(Unreachable, match="not known"):
        reached("https://coordinator.example:1", credential_paths(tmp_path))
    assert retries() == []

    codes = [socket.EAI_AGAIN, socket.EAI_NONAME]
    with pytest.raises(Unreachable, match="not known"):
        reached("https://coordinator.example:1", credential_paths(tmp_path))
    assert len(retries()) == 1


def test_a_wait_may_be_in_any_thread(tmp_path: Path) -> None:
    """It does not need the main thread."""
    failures: list[Exception] = []

    def ask() -> None:
        try:
            reached("http://127.0.0.1:1", credential_paths(tmp_path), wait_s=0.0)
        except Unreachable as exc:
            failures.append(exc)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()

    assert len(failures) == 1
