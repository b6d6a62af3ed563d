"""Large things that many islands take: states and outcomes, sent from files.

What is sent lies in the page cache once, however many take it, and nothing of it is in
this process's memory.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from atoll.coordinator.office import Office
from atoll.coordinator.spool import nameless, write_all
from atoll.disk import Claim, Room
from atoll.errors import Unreachable
from atoll.weights import FragmentState
from atoll.wire import pack
from atoll.wire.digests import view_of
from atoll.wire.layout import DIGEST_BYTES


@dataclass(frozen=True)
class StateFile:
    """A state frame in a file without a name; it is gone with this object."""

    round: int
    digest: str
    handle: int
    size_bytes: int
    receipt: bytes = b""
    _is_closed: list[bool] = field(default_factory=list, repr=False)

    def __del__(self) -> None:
        if not self._is_closed:
            self._is_closed.append(True)
            os.close(self.handle)


@contextmanager
def at_once(lock: threading.Lock, what: str) -> Iterator[None]:
    """Hold a lock, or raise Unreachable if another thread holds it.

    A thread that waited for a large file to be written could serve no other request.
    """
    if not lock.acquire(blocking=False):
        raise Unreachable(f"Another {what} is in progress. Ask again.")
    try:
        yield
    finally:
        lock.release()


class StateFiles:
    """Has one file per fragment, of its newest state that somebody asked for."""

    def __init__(self, office: Office, directory: Path, room: Room) -> None:
        self._office, self._directory, self._room = office, directory, room
        self._lock = threading.Lock()
        self._files: dict[int, StateFile] = {}

    def newest(self, fragment: int) -> StateFile:
        """Return the fragment's present state, written if nobody has asked before.

        Raises:
            Unreachable: a round of the fragment is being committed, or another state
                is being written: ask again.
        """
        with (
            at_once(self._lock, "copy of a state"),
            self._office.reading(fragment) as state,
        ):
            known = self._files.get(fragment)
            if known is None or known.round != state.round:
                known = self._files[fragment] = self._write(fragment, state)
            return known

    def _write(self, fragment: int, state: FragmentState) -> StateFile:
        """Write a state as it lies in memory: there is no room for another of it."""
        run, outer, receipt = self._office.change_by(
            lambda service, _: (
                service.state.run,
                service.outer_of(fragment),
                service.receipts.of_state(fragment, state.round, state.digest),
            )
        )
        header = state.to_header(run=run, fragment=fragment, outer=outer)
        packed = pack(header)
        self._files.pop(fragment, None)  # its room comes back when nobody reads it
        size_bytes = len(packed) + header.body_bytes
        with self._room.claiming(size_bytes, what="a copy of a state to send") as claim:
            return self._copy(packed, state, receipt, claim)

    def _copy(
        self, packed: bytes, state: FragmentState, receipt: bytes, claim: Claim
    ) -> StateFile:
        file = StateFile(
            round=state.round,
            # Not the state's own digest: a void round has the same, in another frame.
            digest=packed[-DIGEST_BYTES:].hex(),
            handle=nameless(self._directory),
            size_bytes=claim.left_bytes,
            receipt=receipt,
        )
        write_all(file.handle, memoryview(packed))
        for vector in state.vectors:
            write_all(file.handle, view_of(vector))
            claim.wrote(vector.nbytes)
        return file
