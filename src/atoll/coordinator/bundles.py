"""The model's definition in a coordinator's directory: bundle/<digest>, never changed.

It is there before the run that names it, so that no run is without it.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from atoll.bundle import MAX_BYTES, Bundle
from atoll.disk import TEMPORARY, sync_directory
from atoll.disk.whole import write_whole
from atoll.errors import UsageError
from atoll.security.private import private_directory, translated
from atoll.settings import RunSettings

BUNDLES = "bundle"


def keep(directory: Path, bundle: Bundle) -> None:
    """Make a bundle durable in a run's directory. Safe to repeat."""
    folder = private_directory(directory) / BUNDLES
    private_directory(folder)
    path = folder / bundle.digest
    if path.exists() and path.read_bytes() == bundle.data:
        return
    draft = folder / f"{bundle.digest}.{secrets.token_hex(8)}{TEMPORARY}"
    with translated(path):
        try:
            write_whole(draft, [bundle.data])
            os.rename(draft, path)
        finally:
            draft.unlink(missing_ok=True)
        sync_directory(folder)


def kept(directory: Path, digest: str | None) -> Path | None:
    """Return the archive that a run's settings name; None: they name none.

    Raises:
        UsageError: it is not there; how it comes back is said.
        CorruptError: it was altered.
    """
    if digest is None:
        return None
    path = directory / BUNDLES / digest
    if not path.is_file():
        raise UsageError(
            f"The run is defined by bundle {digest[:12]}, and {path} is not there. "
            "Give the directory that it was made of: `atoll serve RUN.toml --bundle "
            "DIR`."
        )
    with path.open("rb") as file:
        Bundle.of_archive(file.read(MAX_BYTES + 1), digest=digest)
    return path


def as_created(
    settings: RunSettings, created: RunSettings, *, where: Path
) -> RunSettings:
    """Return settings of a run that is there, with the bundle that it has.

    Raises:
        UsageError: they name another: an edited file is another model.
    """
    mine, its = settings.run.bundle, created.run.bundle
    if mine is None and its is not None:
        return settings.with_values({"run.bundle": its})
    if mine != its:
        raise UsageError(
            f"{where} holds a run that {_defined(its)}, and what was given is bundle "
            f"{str(mine)[:12]}: another model. Begin another run with it, in another "
            "directory."
        )
    return settings


def _defined(digest: str | None) -> str:
    return f"is defined by bundle {digest[:12]}" if digest else "has no bundle"
