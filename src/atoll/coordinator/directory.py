"""The directory of a coordinator: its journal, its bundle and its shipped code.

bundle/<digest>  the model's definition; durable before the run whose settings name it
code/<digest>    code of launched islands, stored by operators; islands check its digest

Files named by their digest never change.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
from pathlib import Path

from atoll.bundle import MAX_BYTES, Bundle
from atoll.bundle.archive import MAX_CODE_FILES, unpack
from atoll.coordinator.move import JOURNAL, require_arrived
from atoll.coordinator.service import Service
from atoll.disk import (
    TEMPORARY,
    DiskSpace,
    SystemDisk,
    sync_directory,
)
from atoll.disk.system import write_whole
from atoll.errors import CorruptError, Refused, UsageError
from atoll.security.private_files import (
    private_directory,
    require_own_directory,
    translated,
)
from atoll.settings import RunSettings
from atoll.wire import blake3_digest

BUNDLES = "bundle"


def open_service(
    directory: Path, settings: RunSettings | None, *, now_s: float
) -> tuple[SystemDisk, Service]:
    """Return the disk and the service of a directory; create the run if it has none.

    Raises:
        UsageError: the directory has no run and `settings` is None, its run has other
            settings, or the run is still moving here; or another user owns the
            directory or can write to it.
    """
    require_arrived(directory)
    if directory.exists():
        require_own_directory(directory)
    disk = SystemDisk(directory / JOURNAL)
    try:
        return disk, _service(disk, directory, settings, now_s)
    except BaseException:
        disk.close()
        raise


def _service(
    disk: SystemDisk, directory: Path, settings: RunSettings | None, now_s: float
) -> Service:
    if not disk.names("log/"):
        if settings is None:
            raise UsageError(f"{directory} holds no run. Give a run file to begin one.")
        run = f"{settings.run.name}-{secrets.token_hex(6)}"
        return Service.create(disk, settings, run=run, now_s=now_s)
    service = Service.open(disk, now_s=now_s)
    created = service.journal.recorded.created
    assert created is not None
    if settings is not None:
        created_settings = RunSettings.from_dict(created.settings)
        settings = as_created(settings, created_settings, directory=directory)
    if settings is not None and settings.fingerprint != created.fingerprint:
        raise UsageError(
            f"{directory} holds run {created.run!r} with settings "
            f"{created.fingerprint[:12]}, and the run file has "
            f"{settings.fingerprint[:12]}. Choose another directory, or change the "
            "settings with `atoll control RUN set`."
        )
    return service


def store_bundle(directory: Path, bundle: Bundle) -> None:
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


def find_bundle(directory: Path, digest: str | None) -> Path | None:
    """Return the archive that a run's settings name; None if they name none.

    Raises:
        UsageError: it is missing; the message says how to restore it.
        CorruptError: it was altered.
    """
    if digest is None:
        return None
    path = directory / BUNDLES / digest
    if not path.is_file():
        raise UsageError(
            f"The run is defined by bundle {digest[:12]}, and {path} does not exist. "
            "Give the directory that it was made of: `atoll serve RUN.toml --bundle "
            "DIR`."
        )
    with path.open("rb") as file:
        Bundle.of_archive(file.read(MAX_BYTES + 1), digest=digest)
    return path


def as_created(
    settings: RunSettings, created: RunSettings, *, directory: Path
) -> RunSettings:
    """Return the settings with the bundle of the existing run.

    Raises:
        UsageError: they name another bundle: an edited file is another model.
    """
    own_bundle, run_bundle = settings.run.bundle, created.run.bundle
    if own_bundle is None and run_bundle is not None:
        return settings.with_values({"run.bundle": run_bundle})
    if own_bundle != run_bundle:
        raise UsageError(
            f"{directory} holds a run that {_defined(run_bundle)}, and the run file "
            f"names bundle {str(own_bundle)[:12]}: another model. Begin another run "
            "with it, in another directory."
        )
    return settings


def _defined(digest: str | None) -> str:
    return f"is defined by bundle {digest[:12]}" if digest else "has no bundle"


CODE = "code"
MAX_CODES = 64
"""Limit of stored archives: a run has few kinds of code, and each may be large."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


class CodeFiles:
    """The code of one run. Any thread may call."""

    def __init__(self, directory: Path, room: DiskSpace | None = None) -> None:
        self._directory, self._room = directory / CODE, room
        self._lock = threading.Lock()

    def store(self, digest: str, data: bytes, *, is_unlimited: bool = False) -> None:
        """Make code durable. Safe to repeat.

        With `is_unlimited` the limit for operators is ignored: a moved run brings all.

        Raises:
            UsageError: the digest is malformed.
            CorruptError: the bytes have another digest, or are not a valid archive.
            Refused: the limit is reached.
            DiskError: the disk has no room.
        """
        path = self._path(digest)
        if blake3_digest(data).hex() != digest:
            raise CorruptError(
                f"The code that came does not have the digest {digest[:12]}. Send it "
                "again."
            )
        unpack(data, max_files=MAX_CODE_FILES)
        with self._lock:
            if path.exists():
                return
            if not is_unlimited and len(self.digests()) >= MAX_CODES:
                raise Refused(
                    f"{self._directory} keeps {MAX_CODES} kinds of code already. "
                    "Remove those that no island runs."
                )
            if self._room is not None:
                self._room.require(len(data), purpose="this code")
            private_directory(self._directory)
            self._write(path, data)

    def digests(self) -> list[str]:
        """Return the digests of the stored code."""
        with translated(self._directory):
            try:
                names = os.listdir(self._directory)
            except FileNotFoundError:
                return []
        return sorted(name for name in names if _DIGEST.fullmatch(name))

    def find(self, digest: str) -> Path:
        """Return the path of stored code.

        Raises:
            UsageError: the digest is malformed.
            Refused: no code with this digest is stored.
        """
        path = self._path(digest)
        if not path.is_file():
            raise Refused(f"The run has no code {digest[:12]}. Launch again.")
        return path

    def _path(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise UsageError(f"{digest[:80]!r} is no digest: 64 hexadecimal digits.")
        return self._directory / digest

    def _write(self, path: Path, data: bytes) -> None:
        draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}{TEMPORARY}")
        with translated(path):
            try:
                write_whole(draft, [data])
                os.rename(draft, path)
            finally:
                draft.unlink(missing_ok=True)
            sync_directory(path.parent)
