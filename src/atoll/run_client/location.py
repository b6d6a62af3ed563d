"""Clients by the URL of a run, statuses that are read again, and remembered names.

Names are remembered beside the user's credentials, in one private file each, so that
`atoll status NAME` works for every run that this user has started or joined here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import AtollError, CorruptError, NoSuchFile, UsageError
from atoll.island.connection import is_coordinator
from atoll.island.environment import CredentialPaths, credentials_from_environment
from atoll.run_client.base import RunClient, RunStatus
from atoll.runtime import SystemClock
from atoll.security import parse_run_url
from atoll.security.private_files import (
    private_directory,
    read_private,
    remove_private,
    replace_private,
)
from atoll.settings import RunSettings


def open_run(url: str) -> RunClient:
    """Return the client of a run, by the URL of its coordinator or its store.

    The imports are local because each loads libraries that the other does not need.

    Raises:
        UsageError: the URL of a coordinator is malformed.
    """
    if is_coordinator(url):
        from atoll.run_client.coordinator import CoordinatorRunClient

        return CoordinatorRunClient(parse_run_url(url))
    from atoll.run_client.store import StoreRunClient

    return StoreRunClient(url)


def settings_of(run: str) -> RunSettings:
    """Return the settings in force in a run, with the changes of all epochs.

    Args:
        run: Its URL, its directory, or a name that this user's commands know.

    Raises:
        UsageError: no run has that name.
        Unreachable: the run does not answer.
    """
    with closing(_opened(run)) as client:
        return client.settings()


def _opened(run: str) -> RunClient:
    if "://" in run:
        return open_run(run)
    directory = Path(run)
    address = read_address(directory)
    if address is not None and address.is_open:
        return open_run(address.url)
    if address is not None:
        from atoll.run_client.directory import DirectoryRunClient

        return DirectoryRunClient(directory.absolute())
    if directory.is_dir():
        return open_run(run)
    url = RunNames(credentials_from_environment()).find(run)
    if url is None:
        raise UsageError(
            f"No run is called {run!r} here. Give its URL, its directory, or a name "
            "that `atoll serve` or `atoll join` has remembered for this user."
        )
    return open_run(url)


def try_status(url: str) -> RunStatus | None:
    """Return the status of a run, or None if it cannot be read now."""
    with closing(StatusPoll(url)) as poll:
        return poll.status()


class StatusPoll:
    """Reads the status of one run repeatedly, at a bounded rate. Close it."""

    def __init__(self, url: str) -> None:
        self._url, self._run = url, open_run(url)
        self._every_s = 0.0 if is_coordinator(url) else self._run.poll_s
        self._clock = SystemClock()
        self._next_s = 0.0
        self.newest: RunStatus | None = None
        """The last status that could be read."""

    def close(self) -> None:
        """Close the connection. Safe to repeat."""
        self._run.close()

    def status(self, *, at_once: bool = False) -> RunStatus | None:
        """Return the newest status, read again if the interval has passed."""
        if at_once or self._clock.now_s() >= self._next_s:
            try:
                self.newest = self._run.status()
            except AtollError:
                # The next read connects again: the run may be served again.
                self._run.close()
                self._run = open_run(self._url)
            self._next_s = self._clock.now_s() + self._every_s
        return self.newest


ADDRESS = "address.json"
"""File in a run's directory: the current or last address of its coordinator."""

RUN_SUFFIX = ".atoll"
"""Default suffix of a run's directory."""

MAX_FILE_BYTES = 2**14


@dataclass(frozen=True)
class CoordinatorAddress:
    """The address of a coordinator."""

    url: str
    is_open: bool
    """Whether it was not closed since. A coordinator that died is still marked open."""


def read_address(directory: Path) -> CoordinatorAddress | None:
    """Return the current or last address of a directory's run; None without any."""
    path = directory / ADDRESS
    try:
        data = read_private(path, content="address", max_bytes=MAX_FILE_BYTES)
    except NoSuchFile:
        return None
    try:
        document = json.loads(data)
        return CoordinatorAddress(
            str(parse_run_url(document["url"])), bool(document["is_open"])
        )
    except (ValueError, LookupError, TypeError, UsageError) as exc:
        raise CorruptError(
            f"{path} holds no address of a coordinator. Remove it, and start "
            "`atoll serve` again."
        ) from exc


def write_address(directory: Path, url: str, *, is_open: bool) -> None:
    """Record the address of the run of a directory."""
    document = json.dumps({"url": url, "is_open": is_open}).encode() + b"\n"
    replace_private(directory / ADDRESS, document)


class RunNames:
    """The names of runs that a user has started or joined here."""

    def __init__(self, paths: CredentialPaths) -> None:
        self._directory = paths.credentials.parent / "names"

    def remember(self, name: str, url: str) -> None:
        """Record a name of a URL; a name that is taken is replaced."""
        document = json.dumps({"name": name, "url": url}).encode() + b"\n"
        private_directory(self._directory)
        replace_private(self._path(name), document)

    def find(self, name: str) -> str | None:
        """Return the URL behind a name."""
        entry = self._read(self._path(name))
        return entry[1] if entry and entry[0] == name else None

    def forget(self, name: str) -> None:
        """Remove a name."""
        remove_private(self._path(name))

    def all(self) -> Iterator[str]:
        """Yield every remembered name."""
        for path in sorted(self._directory.glob("*.json")):
            if entry := self._read(path):
                yield entry[0]

    def _path(self, name: str) -> Path:
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
        return self._directory / f"{digest[:32]}.json"

    def _read(self, path: Path) -> tuple[str, str] | None:
        try:
            data = read_private(path, content="name", max_bytes=MAX_FILE_BYTES)
            document = json.loads(data)
            return str(document["name"]), str(document["url"])
        except (NoSuchFile, ValueError, LookupError, TypeError):
            return None  # the run is still reachable by its URL
