"""States on their way in: to files as they arrive, to memory when they are whole.

Rule 1: a declared size costs nothing. What arrives goes to the spool, piece by piece
        and verified, and memory is taken once for states that are complete.
Rule 2: one founding, and one recovery of a fragment, is read at a time.
Rule 3: a model whose states could not be taken is refused when its island joins.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from pathlib import Path

import numpy as np

from atoll.coordinator.brought import header_bytes, reserve_bytes, states_bytes
from atoll.coordinator.office import Office
from atoll.coordinator.spool import ReadInto, Spool, SpooledState
from atoll.coordinator.states import at_once
from atoll.disk import Room
from atoll.errors import Refused, UsageError
from atoll.exchange import FoundCall, Frame, RecoverCall
from atoll.exchange.forms import Asked, Incoming
from atoll.exchange.forms.requests import recover_call
from atoll.protocol import ModelSpec
from atoll.settings import RunSettings
from atoll.weights import Layout, lay_out

ROSTER_BYTES = 2**22
"""What the roster in the header of an outcome may take: some thousand islands."""

NOTHING = np.empty(0, np.uint8)

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


class StateUploads:
    """Reads the states that islands bring. Any thread may call."""

    def __init__(self, office: Office, spool: Spool) -> None:
        self._office, self._spool = office, spool
        self._founding = threading.Lock()
        self._recovering: dict[int, threading.Lock] = defaultdict(threading.Lock)

    def founding(
        self, known: Asked, incoming: Incoming, read_into: ReadInto
    ) -> FoundCall:
        """Return the call that brings a run's first states, read to its end.

        Raises:
            Refused, CorruptError: they are not states of the founder's model.
            FoundingLost, LeaseLost: this island may not bring any.
            Unreachable: others are being read: ask again.
            DiskError: there is no room for them.
        """
        who = known.island, known.incarnation
        layout = self._layout(*who)
        with at_once(self._founding, "founding of this run"):
            spooled: list[SpooledState] = []
            while incoming.left_bytes:
                if len(spooled) == len(layout):
                    raise Refused(
                        f"More states come than the {len(layout)} fragments of the "
                        "run's model. Bring one for each."
                    )
                most = header_bytes(layout[len(spooled)].elements)
                header = incoming.header(most=most)
                incoming.leave(header)
                spooled.append(self._spool.take_state(header, read_into))
            states = []
            while spooled:  # a file is gone as soon as its state is in memory
                states.append(spooled.pop(0).load())
            return FoundCall(*who, tuple(states), is_given=True)

    def recovery(
        self, known: Asked, incoming: Incoming, read_into: ReadInto
    ) -> RecoverCall:
        """Return the call that brings a lost state, read to its end.

        It raises what `founding` does.
        """
        who = known.island, known.incarnation
        layout, fragment = self._layout(*who), known.fragment
        if fragment >= len(layout):
            raise Refused(
                f"Fragment {fragment} does not exist: the run has {len(layout)}."
            )
        with at_once(self._recovering[fragment], f"recovery of fragment {fragment}"):
            most = ROSTER_BYTES + header_bytes(layout[fragment].elements)
            outcomes, header = incoming.recovery_headers(most=most)
            call = recover_call(known, Frame(header, NOTHING), outcomes)
            incoming.expect(header)
            is_awaited = self._office.change_by(
                lambda service, now_s: service.awaits_state(header, now_s)
            )
            if not is_awaited:  # the answer is the same, whatever the body is
                return call
            state = self._spool.take_state(header, read_into).load()
            return recover_call(known, state, outcomes)

    def _layout(self, island: str, incarnation: int) -> Layout:
        return self._office.change_by(
            lambda service, now_s: service.brought_layout(island, incarnation)
        )


def require_foundable(
    model: ModelSpec, settings: RunSettings, *, room: Room, most_bytes: int
) -> None:
    """Return if the states of a model that would found a run can be taken here.

    Raises:
        UsageError: they are more than one request may bring, or than this machine's
            memory, where the anchor and the outer optimizer's moments are kept.
        DiskFull: the disk has no room for them.
    """
    layout = lay_out(model, settings)
    size = states_bytes(layout, settings)
    for limit, what in (
        (most_bytes, "one request to this coordinator may bring"),
        (memory_bytes(), "this coordinator's machine has of memory"),
    ):
        if size > limit:
            raise UsageError(
                f"The states of this model take {size} bytes, and {limit} is all that "
                f"{what}. Use a smaller model or a larger machine; a run that begins "
                "with `atoll serve --init FILE` is not bound by the size of a request."
            )
    room.require(
        2 * size,  # in the spool, and in the journal
        what="the states of this model",
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
