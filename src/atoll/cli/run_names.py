"""Names of runs: a URL, a directory on this machine, or a name that was remembered.

A run is at a coordinator, which has an HTTP URL and a directory on its own machine; or
in a store, which has any other URL or a plain path.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

from atoll.errors import UsageError
from atoll.island.environment import credentials_from_environment
from atoll.run_client import RunClient, open_run
from atoll.run_client.base import needs_coordinator
from atoll.run_client.location import ADDRESS, RUN_SUFFIX, RunNames, read_address
from atoll.security import Credential, Credentials, Role, RunUrl, parse_run_url

STORE_MARK = "settings/0"
"""Object of a run in a store, as in `atoll.exchange.bucket.keys`."""

HTTP_PREFIXES = ("http://", "https://")


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

    A directory that is not served answers for itself if its run has ended; also if the
    run is given by a name that this user has served.

    Raises:
        UsageError: the name is unknown here, or the run of the directory is to be
            served.
    """
    directory = _directory_of(run)
    address = read_address(directory) if directory is not None else None
    if directory is not None and address is not None and not address.is_open:
        from atoll.run_client.directory import DirectoryRunClient

        client = DirectoryRunClient(directory.absolute())
        if client.status().has_ended:
            return client
        client.close()
    return open_run(str(locate_run(run)))


def _directory_of(run: str) -> Path | None:
    """Return the directory of a run on this machine, by its path or its name."""
    if "://" in run:
        return None
    if (Path(run) / ADDRESS).exists():
        return Path(run)
    url = RunNames(credentials_from_environment()).find(run)
    if url is None or not url.startswith(HTTP_PREFIXES):
        return None
    credentials = Credentials(credentials_from_environment().credentials)
    directory = served_directory(credentials.find(url))
    address = read_address(directory) if directory is not None else None
    # Another run in the directory has another address.
    return directory if address is not None and address.url == url else None


def served_directory(credential: Credential | None) -> Path | None:
    """Return the directory of a run that this user has served on this machine."""
    source = credential.tokens.get(Role.OPERATOR) if credential else None
    return source.parent if isinstance(source, Path) else None


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
    directory = served_directory(credential)
    if directory is None:
        raise UsageError(
            f"{run[:128]!r} is not served by this user on this machine. Run "
            "this command on the machine that serves it."
        )
    return directory


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
