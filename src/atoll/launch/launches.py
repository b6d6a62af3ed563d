"""The launches of this user: one private file per launch, found by any process.

Rule 1: a launch has its file before anything is submitted, and loses it when it is
certain that nothing of it runs, or when its islands were launched anew.
Rule 2: a process that launches locks the names of its islands until the engine has
responded: of two that want the same names, one finds what the other has launched.
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
from atoll.island.environment import surroundings_from_environment
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
"""Beyond this the oldest are forgotten, of those that are over."""

COORDINATOR = "coordinator"
"""The name of a launch that is no island, and serves the run."""


@dataclass(frozen=True)
class Record:
    """A launch, and what its islands are."""

    handle: Handle
    spec: IslandSpec

    @property
    def is_coordinator(self) -> bool:
        return self.handle.name == COORDINATOR


class Book:
    """The launches of one user."""

    def __init__(self, directory: Path | None = None) -> None:
        usual = surroundings_from_environment().credentials.parent / "launches"
        self._directory = directory or usual

    def keep(self, record: Record) -> None:
        """Write a launch down, in place of what was known of it. Durable.

        Raises:
            UsageError: it is too large to be read again.
        """
        form = {
            "handle": json.loads(record.handle.to_json()),
            "spec": spec_to_form(record.spec),
        }
        said = json.dumps(form).encode()
        if len(said) > MAX_RECORD_BYTES:
            raise UsageError(
                f"The launch {record.handle.id} takes {len(said)} bytes to write down, "
                f"and at most {MAX_RECORD_BYTES} are read again. Put what its command "
                "and its environment say into a file."
            )
        private_directory(self._directory)
        replace_private(self._path(record.handle.id), said)

    def forget(self, launch: str) -> None:
        """Let go of a launch. Safe to repeat."""
        remove_private(self._path(launch))

    @contextmanager
    def holding(self, run: str, name: str) -> Iterator[None]:
        """Be alone to launch islands of a name for a run, while the block lasts.

        Others wait, in whatever process; one that dies lets go.
        """
        # There is a file for some names each, so that there are few, for ever.
        slot = hashlib.blake2b(f"{run}\0{name}".encode(), digest_size=1).hexdigest()
        path = private_directory(self._directory) / f"names-{slot}.lock"
        with locked(path):
            yield

    def records(self) -> list[Record]:
        """Return every launch that is known, the oldest first."""
        return sorted(self._read(), key=lambda each: each.handle.begun_at_s)

    def surplus(self) -> list[Record]:
        """Return the oldest launches, which are more than are to be known.

        The book does not know which of them run: who asks their engines forgets those
        that are over.
        """
        return self.records()[:-MAX_RECORDS]

    def of_run(self, run: str) -> list[Record]:
        """Return the launches of one run, the oldest first."""
        return [each for each in self.records() if each.handle.run == run]

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
                    f"{path} says nothing of a launch: {exc} Remove it; what it "
                    "launched has to be ended by the engine's own tools."
                ) from exc


def _record(data: bytes) -> Record:
    try:
        form: Any = json.loads(data)
        handle, spec = json.dumps(form["handle"]), form["spec"]
    except (ValueError, LookupError, TypeError, RecursionError) as exc:
        raise CorruptError(f"It is no record: {exc}.") from exc
    return Record(Handle.from_json(handle), spec_from_form(spec))
