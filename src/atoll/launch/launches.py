"""The launches of this user: one private file per launch, found by any process.

Rule 1: a launch has its file before anything is submitted, and loses it when it is
certain that nothing of it runs, or when its islands were launched again.
Rule 2: a process that launches locks the names of its islands until the engine has
responded: of two that want the same names, the second finds the launch of the first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.errors import AtollError, CorruptError, NoSuchFile, UsageError
from atoll.island.environment import credentials_from_environment
from atoll.launch.base import MAX_HANDLE_BYTES, Handle, check_id
from atoll.launch.spec import IslandSpec, spec_from_form, spec_to_form
from atoll.security.private_files import (
    locked,
    private_directory,
    read_private,
    remove_private,
    replace_private,
)

MAX_RECORD_BYTES = 2 * MAX_HANDLE_BYTES
MAX_RECORDS = 200
"""Beyond this number, the oldest launches that are over are forgotten."""

COORDINATOR = "coordinator"
"""The name of a launch that is no island, and serves the run."""


@dataclass(frozen=True)
class Record:
    """A launch, and the specification of its islands."""

    handle: Handle
    spec: IslandSpec

    @property
    def is_coordinator(self) -> bool:
        return self.handle.name == COORDINATOR


class LaunchRecords:
    """The launches of one user."""

    def __init__(self, directory: Path | None = None) -> None:
        default = credentials_from_environment().credentials.parent / "launches"
        self._directory = directory or default

    def keep(self, record: Record) -> None:
        """Store a launch, and replace its earlier record. Durable.

        Raises:
            UsageError: it is too large to be read again.
        """
        form = {
            "handle": json.loads(record.handle.to_json()),
            "spec": spec_to_form(record.spec),
        }
        data = json.dumps(form).encode()
        if len(data) > MAX_RECORD_BYTES:
            raise UsageError(
                f"The record of {record.handle.id} has {len(data)} bytes, "
                f"more than the {MAX_RECORD_BYTES} that are read back. Put the "
                "arguments of its command and its environment into a file."
            )
        private_directory(self._directory)
        replace_private(self._path(record.handle.id), data)

    def forget(self, launch: str) -> None:
        """Remove the record of a launch. Safe to repeat."""
        remove_private(self._path(launch))

    @contextmanager
    def holding(self, run: str, name: str) -> Iterator[None]:
        """Hold the lock on launching islands of a name for a run during the block.

        Other processes wait; the death of the owner releases the lock.
        """
        # Several names share one of 256 lock files, so that files do not pile up.
        slot = hashlib.blake2b(f"{run}\0{name}".encode(), digest_size=1).hexdigest()
        path = private_directory(self._directory) / f"names-{slot}.lock"
        with locked(path):
            yield

    def records(self) -> list[Record]:
        """Return the records of all launches, the oldest first."""
        return sorted(self._read(), key=lambda record: record.handle.begun_at_s)

    def surplus(self) -> list[Record]:
        """Return the oldest launches, beyond the last `MAX_RECORDS`.

        The records do not say which of them run: the caller polls their engines, and
        forgets those that are over.
        """
        return self.records()[:-MAX_RECORDS]

    def of_run(self, run: str) -> list[Record]:
        """Return the launches of one run, the oldest first."""
        return [record for record in self.records() if record.handle.run == run]

    def _path(self, launch: str) -> Path:
        return self._directory / f"{check_id(launch)}.json"

    def _read(self) -> Iterator[Record]:
        for path in self._directory.glob("*.json"):
            try:
                yield _record(
                    read_private(path, content="launch", max_bytes=MAX_RECORD_BYTES)
                )
            except NoSuchFile:
                continue  # forgotten by another process since
            except AtollError as exc:
                raise CorruptError(
                    f"{path} is no record of a launch: {exc} Remove it, and end its "
                    "islands with the engine's own tools."
                ) from exc


def _record(data: bytes) -> Record:
    try:
        form: Any = json.loads(data)
        handle, spec = json.dumps(form["handle"]), form["spec"]
    except (ValueError, LookupError, TypeError, RecursionError) as exc:
        raise CorruptError(f"It is no record: {exc}.") from exc
    return Record(Handle.from_json(handle), spec_from_form(spec))
