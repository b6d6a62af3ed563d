"""Large things that many islands take: states and outcomes, sent from files.

What is sent lies in the page cache once, however many take it, and nothing of it is in
this process's memory.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from atoll.coordinator.office import Office
from atoll.coordinator.service import Service
from atoll.coordinator.spool import nameless, write_all
from atoll.exchange import Frame
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
    _is_closed: list[bool] = field(default_factory=list, repr=False)

    def __del__(self) -> None:
        if not self._is_closed:
            self._is_closed.append(True)
            os.close(self.handle)


class StateFiles:
    """Has one file per fragment, of its newest state that somebody asked for."""

    def __init__(self, office: Office, directory: Path) -> None:
        self._office, self._directory = office, directory
        self._lock = threading.Lock()
        self._files: dict[int, StateFile] = {}

    def newest(self, fragment: int) -> StateFile:
        """Return the fragment's present state, written if nobody has asked before.

        Raises:
            Unreachable: a round of the fragment is being committed: ask again.
        """
        with self._lock:
            known = self._files.get(fragment)
            copied = self._office.change_by(_unless_known(fragment, known))
            if copied is not None:
                known = self._files[fragment] = self._write(copied)
            assert known is not None
            return known

    def _write(self, frame: Frame) -> StateFile:
        handle = nameless(self._directory)
        packed = pack(frame.header)
        file = StateFile(
            round=frame.header.round,
            # Not the state's own digest: a void round has the same, in another frame.
            digest=packed[-DIGEST_BYTES:].hex(),
            handle=handle,
            size_bytes=len(packed) + frame.header.body_bytes,
        )
        write_all(handle, memoryview(packed))
        write_all(handle, view_of(frame.body))
        return file


def _unless_known(
    fragment: int, known: StateFile | None
) -> Callable[[Service, float], Frame | None]:
    def copy(service: Service, now_s: float) -> Frame | None:
        round = service.settled_round(fragment)
        is_known = known is not None and known.round == round
        return None if is_known else service.state_frame(fragment)

    return copy
