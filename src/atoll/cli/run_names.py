"""Names of runs: a URL, a directory on this machine, or a name that was remembered.

A run is at a coordinator, which has an HTTP URL and a directory on its own machine; or
in a store, which has any other URL or a plain path.

Names are remembered beside the user's credentials, in one private file each, so that
`atoll status NAME` works for every run that this user has started or joined here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import typer

from atoll.errors import CorruptError, NoSuchFile, UsageError
from atoll.island.environment import CredentialPaths, credentials_from_environment
from atoll.run_client import RunClient, open_run
from atoll.run_client.base import needs_coordinator
from atoll.security import Credentials, Role, RunUrl, parse_run_url
from atoll.security.private_files import (
    private_directory,
    read_private,
    remove_private,
    replace_private,
)

ADDRESS = "address.json"
"""File in a run's directory: the current or last address of its coordinator."""

STORE_MARK = "settings/0"
"""Object of a run in a store, as in `atoll.exchange.bucket.keys`."""

RUN_SUFFIX = ".atoll"
"""Default suffix of a run's directory."""

MAX_FILE_BYTES = 2**14
HTTP_PREFIXES = ("http://", "https://")


@dataclass(frozen=True)
class CoordinatorAddress:
    """The address of a coordinator."""

    url: str
    is_open: bool
    """Whether it was not closed since. A coordinator that died is still marked open."""


@dataclass(frozen=True)
class StoreUrl:
    """The location of a run that has no coordinator."""

    url: str

    def __str__(self) -> str:
        return self.url


def locate_run(run: str) -> RunUrl | StoreUrl:
    """Return the location of a run, given by URL, directory or name.

    A path counts as a store only if it looks like a path, or holds a run: so an unknown
    name is an error, and not a new directory.

    Raises:
        UsageError: the name is unknown here.
    """
    if run.startswith(HTTP_PREFIXES):
        return parse_run_url(run)
    if "://" in run:
        return _store_url(run)
    if (Path(run) / ADDRESS).exists():
        return _url_of_directory(Path(run))
    url = RunNames(credentials_from_environment()).find(run)
    if url is not None and not _is_path(run):
        return locate_run(url)
    if _is_path(run) or Path(run, STORE_MARK).exists():
        return _store_url(run)
    raise UsageError(
        f"{run[:128]!r} is no URL of a run, no directory of one that was served on "
        f"this machine, and no name that is known here ({_known_names()}). Write "
        "https://HOST:PORT, the URL of a store or ./PATH, or paste an invitation: "
        "`atoll join INVITATION -- COMMAND`."
    )


def open_named(run: str) -> RunClient:
    """Return the client of a run, given by URL, directory or name.

    A directory that is not served answers for itself if its run has ended.

    Raises:
        UsageError: the name is unknown here, or the run of the directory is to be
            served.
    """
    directory = Path(run)
    address = read_address(directory) if "://" not in run else None
    if address is not None and not address.is_open:
        from atoll.run_client.directory import DirectoryRunClient

        client = DirectoryRunClient(directory.absolute())
        if client.status().has_ended:
            return client
        client.close()
    return open_run(str(locate_run(run)))


def coordinator_url(run: str) -> RunUrl:
    """Return the URL of a run's coordinator.

    Raises:
        UsageError: the name is unknown here, or the run has no coordinator.
    """
    location = locate_run(run)
    if isinstance(location, RunUrl):
        return location
    raise needs_coordinator(location.url)


def local_directory(run: str) -> Path:
    """Return the directory of a run on this machine, which may not exist yet.

    Raises:
        UsageError: the run is served elsewhere, or its name is unknown here.
    """
    path = Path(run)
    if (path / ADDRESS).exists() or path.suffix == RUN_SUFFIX:
        return path.absolute()
    try:
        url = coordinator_url(run)
    except UsageError:
        if path.is_dir():
            return path.absolute()
        raise
    credential = Credentials(credentials_from_environment().credentials).find(str(url))
    token = credential.tokens.get(Role.OPERATOR) if credential else None
    if not isinstance(token, Path):
        raise UsageError(
            f"{run[:128]!r} is not served by this user on this machine. Run "
            "this command on the machine that serves it."
        )
    return token.parent


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


def complete_run_name(incomplete: str) -> list[str]:
    """Return the remembered names that begin with `incomplete`, for the shell."""
    names = RunNames(credentials_from_environment()).all()
    return [name for name in names if name.startswith(incomplete)]


RUN = typer.Argument(
    metavar="RUN",
    help="URL, directory or name of a run.",
    autocompletion=complete_run_name,
    show_default=False,
)


def _is_path(run: str) -> bool:
    return "/" in run or run.startswith((".", "~"))


def _store_url(run: str) -> StoreUrl:
    """Return the URL of a store, with an absolute path.

    The import is local because it is slow, and most runs have a coordinator.
    """
    from atoll.exchange.bucket.create import require_no_coordinator

    require_no_coordinator(run)
    is_plain = "://" not in run
    return StoreUrl(str(Path(run).expanduser().absolute()) if is_plain else run)


def _url_of_directory(directory: Path) -> RunUrl:
    address = read_address(directory)
    assert address is not None
    if not address.is_open:
        raise UsageError(
            f"{directory} is not served now. Start it again: "
            f"atoll serve RUN.toml --dir {directory}"
        )
    return parse_run_url(address.url)


def _known_names() -> str:
    names = list(RunNames(credentials_from_environment()).all())
    return f"known are {', '.join(names[:8])}" if names else "none is"
