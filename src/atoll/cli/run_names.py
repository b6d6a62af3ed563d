"""What people call a run: its URL, its directory on this machine, or its name.

A run is at a coordinator, which has a URL of HTTP and on its own machine a directory;
or in a store, which has any other URL or is a plain path.

Names are kept beside the user's credentials, one private file each, so that whoever
started or joined a run here can say `atoll status NAME`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import typer

from atoll.errors import CorruptError, NoSuchFile, UsageError
from atoll.island.environment import CredentialPaths, surroundings_from_environment
from atoll.security import Credentials, Role, RunUrl, parse_run_url
from atoll.security.private_files import (
    private_directory,
    read_private,
    remove_private,
    replace_private,
)

ADDRESS = "address.json"
"""In a run's directory: where its coordinator listens, or did last."""

IN_STORE = "settings/0"
"""In a directory where islands meet, as `atoll.exchange.bucket.keys` has it."""

RUN_SUFFIX = ".atoll"
"""Of a run's directory, unless another was chosen."""

MAX_FILE_BYTES = 2**14
URL_STARTS = ("http://", "https://")


@dataclass(frozen=True)
class Served:
    """Where a coordinator listens."""

    url: str
    is_open: bool
    """Whether it was not closed since; one that died could not say so."""


@dataclass(frozen=True)
class StoreUrl:
    """Where a run is that has no coordinator."""

    url: str

    def __str__(self) -> str:
        return self.url


def place_of(run: str) -> RunUrl | StoreUrl:
    """Return where the run is that a user called so.

    A path may be a store's only if it looks like one, or a run is there: so a name that
    is not known here is not taken for one.

    Raises:
        UsageError: nothing is known by that name here.
    """
    if run.startswith(URL_STARTS):
        return parse_run_url(run)
    if "://" in run:
        return _in_store(run)
    if (Path(run) / ADDRESS).exists():
        return _url_of_directory(Path(run))
    known = Names(surroundings_from_environment()).find(run)
    if known is not None and not _is_path(run):
        return place_of(known)
    if _is_path(run) or Path(run, IN_STORE).exists():
        return _in_store(run)
    raise UsageError(
        f"{run[:128]!r} is no URL of a run, no directory of one that was served on "
        f"this machine, and no name that is known here ({_known_names()}). Write "
        "https://HOST:PORT, the URL of a store or ./PATH, or paste an invitation: "
        "`atoll join INVITATION -- COMMAND`."
    )


def url_of(run: str) -> RunUrl:
    """Return the URL of the coordinator of what a user called a run.

    Raises:
        UsageError: nothing is known by that name here, or it has no coordinator.
    """
    place = place_of(run)
    if isinstance(place, RunUrl):
        return place
    raise UsageError(
        f"The run at {place} is in a store, and this is for runs with a coordinator. "
        "Who may read and write there takes part without more: "
        f"`atoll join {place} -- COMMAND`, `atoll status {place}`."
    )


def directory_of(run: str) -> Path:
    """Return the directory of a run on this machine, of which there may be none yet.

    Raises:
        UsageError: it is served elsewhere, or nothing is known by that name here.
    """
    path = Path(run)
    if (path / ADDRESS).exists() or path.suffix == RUN_SUFFIX:
        return path.absolute()
    try:
        url = url_of(run)
    except UsageError:
        if path.is_dir():
            return path.absolute()
        raise
    known = Credentials(surroundings_from_environment().credentials).find(str(url))
    token = known.tokens.get(Role.OPERATOR) if known else None
    if not isinstance(token, Path):
        raise UsageError(
            f"{run[:128]!r} is not served by this user on this machine, and what "
            "belongs to its directory is done there."
        )
    return token.parent


def served(directory: Path) -> Served | None:
    """Return where the run of a directory is or was served, if it ever was."""
    path = directory / ADDRESS
    try:
        data = read_private(path, content="address", max_bytes=MAX_FILE_BYTES)
    except NoSuchFile:
        return None
    try:
        said = json.loads(data)
        return Served(str(parse_run_url(said["url"])), bool(said["is_open"]))
    except (ValueError, LookupError, TypeError, UsageError) as exc:
        raise CorruptError(
            f"{path} does not say where the run is served. Remove it, and start "
            "`atoll serve` again."
        ) from exc


def note_served(directory: Path, url: str, *, is_open: bool) -> None:
    """Write down where the run of a directory is served."""
    said = json.dumps({"url": url, "is_open": is_open}).encode() + b"\n"
    replace_private(directory / ADDRESS, said)


class Names:
    """The names of runs that a user has started or joined here."""

    def __init__(self, surroundings: CredentialPaths) -> None:
        self._directory = surroundings.credentials.parent / "names"

    def remember(self, name: str, url: str) -> None:
        """Take a name for a URL; the last one that took it has it."""
        said = json.dumps({"name": name, "url": url}).encode() + b"\n"
        private_directory(self._directory)
        replace_private(self._path(name), said)

    def find(self, name: str) -> str | None:
        """Return the URL behind a name."""
        found = self._read(self._path(name))
        return found[1] if found and found[0] == name else None

    def forget(self, name: str) -> None:
        """Let go of a name."""
        remove_private(self._path(name))

    def all(self) -> Iterator[str]:
        """Yield every name that is known."""
        for path in sorted(self._directory.glob("*.json")):
            if found := self._read(path):
                yield found[0]

    def _path(self, name: str) -> Path:
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
        return self._directory / f"{digest[:32]}.json"

    def _read(self, path: Path) -> tuple[str, str] | None:
        try:
            data = read_private(path, content="name", max_bytes=MAX_FILE_BYTES)
            said = json.loads(data)
            return str(said["name"]), str(said["url"])
        except (NoSuchFile, ValueError, LookupError, TypeError):
            return None  # it can be had again by its URL


def complete(incomplete: str) -> list[str]:
    """Return the names that begin so, for the shell."""
    names = Names(surroundings_from_environment()).all()
    return [name for name in names if name.startswith(incomplete)]


RUN = typer.Argument(
    metavar="RUN",
    help="A URL, a directory of a run, or a name.",
    autocompletion=complete,
    show_default=False,
)


def _is_path(run: str) -> bool:
    return "/" in run or run.startswith((".", "~"))


def _in_store(run: str) -> StoreUrl:
    """Return the URL of a store, the same wherever a command is started.

    What goes there takes its time to load, and most commands do not.
    """
    from atoll.exchange.bucket.create import require_no_coordinator

    require_no_coordinator(run)
    is_plain = "://" not in run
    return StoreUrl(str(Path(run).expanduser().absolute()) if is_plain else run)


def _url_of_directory(directory: Path) -> RunUrl:
    found = served(directory)
    assert found is not None
    if not found.is_open:
        raise UsageError(
            f"{directory} is not served now. Start it again: "
            f"atoll serve RUN.toml --dir {directory}"
        )
    return parse_run_url(found.url)


def _known_names() -> str:
    names = list(Names(surroundings_from_environment()).all())
    return f"known are {', '.join(names[:8])}" if names else "none is"
