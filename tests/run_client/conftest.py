"""The same run at a coordinator, in a store, and in the directory that it has left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from atoll.cli.serve import serve_run
from atoll.coordinator.app import ListenOptions
from atoll.run_client import RunClient, open_run
from atoll.run_client.directory import DirectoryRunClient
from tests.cli import stores
from tests.cli.runs import as_user

END_ROUNDS = 6


@dataclass(frozen=True)
class Ended:
    """A run that has ended: its client, and the anchors that an island ended with."""

    client: RunClient
    anchors: Mapping[str, list[np.ndarray]]


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """Give the URL of a run that this process serves."""
    settings = stores.settings(end_rounds=END_ROUNDS)
    run = serve_run(
        directory, settings, ListenOptions(), init=None, has_tensorboard=False
    )
    with run as serving:
        yield serving.url


@contextmanager
def stored(directory: Path) -> Iterator[str]:
    """Give the URL of a run in a directory of files."""
    yield stores.made(directory, end_rounds=END_ROUNDS)


HOSTS = {"coordinator": served, "store": stored}


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Be a user without runs."""
    with pytest.MonkeyPatch.context() as patch:
        as_user(patch, tmp_path_factory.mktemp("home"))
        yield


@pytest.fixture(params=list(HOSTS))
def new(
    request: pytest.FixtureRequest, tmp_path: Path, user: None
) -> Iterator[RunClient]:
    """Return the client of a run that no island has joined."""
    with (
        HOSTS[request.param](tmp_path / "run") as url,
        closing(open_run(url)) as client,
    ):
        yield client


@pytest.fixture(scope="module", params=[*HOSTS, "directory"])
def ended(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    user: None,
) -> Iterator[Ended]:
    """Return a run that two islands have trained to its end."""
    directory = tmp_path_factory.mktemp("ended") / "run"
    host: Callable[[Path], object] = HOSTS.get(request.param, served)
    with host(directory) as url:  # type: ignore[attr-defined] # a context manager
        anchors = stores.Trained(url).wait()
        if request.param != "directory":
            with closing(open_run(url)) as client:
                yield Ended(client, anchors)
    if request.param == "directory":
        with closing(DirectoryRunClient(directory)) as client:
            yield Ended(client, anchors)
