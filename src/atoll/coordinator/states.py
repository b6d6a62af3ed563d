"""States of fragments, sent to islands from files and received into the spool.

Sent: a state is written to an anonymous file once. All islands read it from the page
cache, and none of it is in this process's memory.

Received:
Rule 1: a declared size costs nothing. Arriving bytes are written to the spool, piece by
        piece and verified, and memory is allocated once for complete states.
Rule 2: one founding, and one recovery of a fragment, is read at a time.
Rule 3: a model whose states could not be stored is refused when its island joins.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from atoll.coordinator.spool import ReadInto, Spool, SpooledState, nameless, write_all
from atoll.coordinator.submissions import (
    header_bytes,
    outcome_header_bytes,
    reserve_bytes,
    states_bytes,
)
from atoll.coordinator.threads import ThreadedService
from atoll.disk import (
    DiskSpace,
    SpaceReservation,
)
from atoll.errors import Refused, Unreachable, UsageError
from atoll.exchange import Frame
from atoll.exchange.api import Incoming, RequestHead
from atoll.exchange.api.requests import recover_call
from atoll.exchange.calls import FoundCall, RecoverCall
from atoll.protocol import ModelSpec
from atoll.protocol.coordinator_state import require_fragment
from atoll.settings import RunSettings
from atoll.weights import FragmentState, Layout, lay_out, terms_of
from atoll.wire import pack
from atoll.wire.digests import view_of
from atoll.wire.frame import DIGEST_BYTES


@dataclass(frozen=True)
class StateFile:
    """A state frame in an anonymous file; it is closed with this object."""

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
def try_lock(lock: threading.Lock, operation: str) -> Iterator[None]:
    """Hold a lock, or raise Unreachable if another thread holds it.

    A thread that waited for a large file to be written could serve no other request.
    """
    if not lock.acquire(blocking=False):
        raise Unreachable(f"Another {operation} is in progress. Ask again.")
    try:
        yield
    finally:
        lock.release()


class StateFiles:
    """Caches one file per fragment, with its newest requested state."""

    def __init__(
        self, threaded_service: ThreadedService, directory: Path, room: DiskSpace
    ) -> None:
        self._threaded_service, self._directory, self._room = (
            threaded_service,
            directory,
            room,
        )
        self._lock = threading.Lock()
        self._files: dict[int, StateFile] = {}

    def newest(self, fragment: int) -> StateFile:
        """Return the file of the fragment's present state; write it on first request.

        Raises:
            Unreachable: a round of the fragment is being committed, or another state
                is being written: ask again.
        """
        with (
            try_lock(self._lock, "copy of a state"),
            self._threaded_service.reading(fragment) as state,
        ):
            file = self._files.get(fragment)
            if file is None or file.round != state.round:
                file = self._files[fragment] = self._write(fragment, state)
            return file

    def _write(self, fragment: int, state: FragmentState) -> StateFile:
        """Write a state directly from memory, without a second copy there."""
        run, outer, receipt = self._threaded_service.change_by(
            lambda service, _: (
                service.state.run,
                service.outer_of(fragment),
                service.receipts.of_state(fragment, state.round, state.digest),
            )
        )
        header = state.to_header(run=run, fragment=fragment, outer=outer)
        packed = pack(header)
        self._files.pop(fragment, None)  # its space is freed after the last reader
        size_bytes = len(packed) + header.body_bytes
        with self._room.claiming(
            size_bytes, purpose="a copy of a state to send"
        ) as claim:
            return self._copy(packed, state, receipt, claim)

    def _copy(
        self,
        packed: bytes,
        state: FragmentState,
        receipt: bytes,
        claim: SpaceReservation,
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


ROSTER_BYTES = 2**22
"""Largest roster in the header of an outcome: some thousand islands."""

EMPTY = np.empty(0, np.uint8)

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


class StateUploads:
    """Reads the states that islands upload. Thread-safe."""

    def __init__(self, threaded_service: ThreadedService, spool: Spool) -> None:
        self._threaded_service, self._spool = threaded_service, spool
        self._founding = threading.Lock()
        self._recovering: dict[int, threading.Lock] = defaultdict(threading.Lock)

    def founding(
        self, head: RequestHead, incoming: Incoming, read_into: ReadInto
    ) -> FoundCall:
        """Return the call that brings a run's first states, read to its end.

        Raises:
            Refused, CorruptError: they are not states of the founder's model.
            FoundingLost, LeaseLost: this island may not bring any.
            Unreachable: others are being read: ask again.
            DiskError: there is no room for them.
        """
        sender = head.island, head.incarnation
        layout = self._layout(*sender)
        with try_lock(self._founding, "founding of this run"):
            spooled: list[SpooledState] = []
            while incoming.left_bytes:
                if len(spooled) == len(layout):
                    raise Refused(
                        f"More states come than the {len(layout)} fragments of the "
                        "run's model. Bring one for each."
                    )
                max_bytes = header_bytes(layout[len(spooled)].elements)
                header = incoming.header(max_bytes=max_bytes)
                incoming.leave(header)
                spooled.append(self._spool.take_state(header, read_into))
            states = []
            while spooled:  # a file is gone as soon as its state is in memory
                states.append(spooled.pop(0).load())
            return FoundCall(*sender, tuple(states), is_given=True)

    def recovery(
        self, head: RequestHead, incoming: Incoming, read_into: ReadInto
    ) -> RecoverCall:
        """Return the call that brings a lost state, read to its end.

        It raises what `founding` does.
        """
        sender = head.island, head.incarnation
        layout, fragment = self._layout(*sender), head.fragment
        require_fragment(fragment, len(layout))
        settings = self._threaded_service.look()[0].settings
        terms = terms_of(layout[fragment], settings)
        max_bytes = ROSTER_BYTES + outcome_header_bytes(layout[fragment], terms)
        with try_lock(self._recovering[fragment], f"recovery of fragment {fragment}"):
            outcomes, header = incoming.recovery_headers(max_bytes=max_bytes)
            call = recover_call(head, Frame(header, EMPTY), outcomes)
            incoming.expect(header)
            is_awaited = self._threaded_service.change_by(
                lambda service, now_s: service.awaits_state(header, now_s)
            )
            if not is_awaited:  # the answer does not depend on the body
                return call
            state = self._spool.take_state(header, read_into).load()
            return recover_call(head, state, outcomes)

    def _layout(self, island: str, incarnation: int) -> Layout:
        return self._threaded_service.change_by(
            lambda service, now_s: service.brought_layout(island, incarnation)
        )


def require_foundable(
    model: ModelSpec, settings: RunSettings, *, room: DiskSpace, most_bytes: int
) -> None:
    """Return if the states of a model that would found a run can be taken here.

    Raises:
        UsageError: they are more than one request may bring, or than this machine's
            memory, where the anchor and the outer optimizer's moments are kept.
        DiskFull: the disk has no room for them.
    """
    layout = lay_out(model, settings)
    size = states_bytes(layout, settings)
    for limit, resource in (
        (most_bytes, "one request to this coordinator may bring"),
        (memory_bytes(), "this coordinator's machine has of memory"),
    ):
        if size > limit:
            raise UsageError(
                f"The states of this model take {size} bytes, and {limit} is all that "
                f"{resource}. Use a smaller model or a larger machine; a run that "
                "begins "
                "with `atoll serve --init FILE` is not bound by the size of a request."
            )
    room.require(
        2 * size,  # in the spool, and in the journal
        purpose="the states of this model",
        beyond_bytes=reserve_bytes(layout, settings),
    )


def memory_bytes() -> int:
    """Return how much memory this process can have at most."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = int(_CGROUP_LIMIT.read_text())
    except (OSError, ValueError):  # there is none, or it says "max"
        return physical
    return min(limit, physical)
