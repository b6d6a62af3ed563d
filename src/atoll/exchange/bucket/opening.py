"""From a URL to a run in a store: made there, or found there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from atoll.bundle import Bundle, defined_by
from atoll.errors import UsageError
from atoll.exchange.bucket.making import make_run
from atoll.exchange.bucket.timing import ThreadTiming
from atoll.settings import RunSettings
from atoll.store import Patient, Probed, Store, open_store

COORDINATOR = ("address.json", "journal")
"""What lies in a coordinator's directory, and in no run of a store."""


def init(url: str, settings: RunSettings, *, bundle: str | Path | None = None) -> str:
    """Make a run in an object store or a directory, and return its id.

    `bundle` is a directory that defines the model: configuration, code and tokenizer.

    Its first island founds it with its weights. Safe to repeat: a run that is there
    stays as it is.

    Raises:
        UsageError: there is a run already, the URL is wrong, or the store cannot keep
            a run; nothing has been made then.
        StoreDenied: a permission is missing.
        Unreachable: the store does not answer.
    """
    require_no_coordinator(url)
    packed = None if bundle is None else Bundle.of_directory(bundle)
    settings = defined_by(packed, settings)
    timing = ThreadTiming()
    try:
        store = reliable(url, timing.pause)
        return make_run(store, settings, url=url, bundle=packed).run
    finally:
        timing.close()


def reliable(url: str, pause: Callable[[float], None]) -> Store:
    """Return the store at a URL: asked again when it fails, and known for what it can.

    Raises:
        UsageError: the URL is wrong, or what goes there is not installed.
        StoreDenied: a permission is missing.
        Unreachable: the store does not answer.
    """
    return Probed(Patient(open_store(url), pause=pause))


def directory_of(url: str) -> Path | None:
    """Return the directory that a URL names; None if it is no directory's."""
    if "://" not in url:
        return Path(url)
    said = urlsplit(url)
    return Path(unquote(said.path)) if said.scheme.lower() == "file" else None


def require_no_coordinator(url: str) -> None:
    """Return unless a URL is the directory of a coordinator.

    Raises:
        UsageError: it is, and says how that is reached.
    """
    directory = directory_of(url)
    if directory is None or not any((directory / it).exists() for it in COORDINATOR):
        return
    raise UsageError(
        f"{url} is the directory of a coordinator, and holds no run that islands meet "
        f"in. Serve it, and give the URL that it prints: `atoll serve RUN.toml --dir "
        f"{url}`."
    )


def require_there(url: str) -> None:
    """Return if what a URL names can be looked at without making it.

    A store in a directory makes that directory; a misspelt one should not appear.

    Raises:
        UsageError: the directory is not there, or a coordinator's.
    """
    require_no_coordinator(url)
    directory = directory_of(url)
    if directory is not None and not directory.is_dir():
        raise no_run(url)


def no_run(url: str) -> UsageError:
    """Return the error for a URL where nobody has made a run."""
    return UsageError(
        f"There is no run at {url}. Make one first: `atoll init {url} RUN.toml`."
    )
