"""Departing updates are written before anybody has to wait for them.

Rule 1: who is about to stage an update first writes it here, while others are served.
        What is left to do is a record, which is small.
Rule 2: nothing here decides. It is a forecast: what was written for nothing is removed
        with its round, and what was not written is written when it is staged.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from atoll.coordinator.restore import Key
from atoll.errors import AtollError, DiskError
from atoll.exchange import Frame, JoinCall
from atoll.journal import Journal
from atoll.protocol.coordinator import advance
from atoll.protocol.events import Joining, Welcome
from atoll.protocol.run_state import CoordinatorState
from atoll.wire import Header, Kind, blake3_digest, update_digest


class Drafting:
    """Writes ahead what may have to last. Any thread may call.

    `spool` are the updates of open rounds, which others add and remove meanwhile.
    """

    def __init__(self, journal: Journal, spool: Mapping[Key, Frame]) -> None:
        self._journal, self._spool = journal, spool

    def brought(self, frame: Frame) -> None:
        """Write an update that has come, if its island departs."""
        if frame.header.kind is Kind.DEPARTING:
            with suppress(DiskError):  # who stages it meets the same, and is told
                self._journal.draft(frame.header, frame.body)

    def offered(self, header: Header) -> None:
        """Write an update that stands, if its island says now that it departs."""
        if header.kind is not Kind.DEPARTING or not header.is_sealed:
            return
        standing = self._spool.get((header.fragment, header.round, header.island))
        if standing is None or update_digest(standing.header) != update_digest(header):
            return
        self.brought(as_departing(standing))

    def joining(self, call: JoinCall, state: CoordinatorState, now_s: float) -> None:
        """Write what an earlier life of a joining island has left in open rounds."""
        welcome = _forecast(call, state, now_s)
        if welcome is None:
            return
        for fragment in welcome.spoken_for:
            number = state.rounds[fragment].number
            standing = self._spool.get((fragment, number, welcome.member.island))
            if standing is not None:
                self.brought(as_departing(standing))


def as_departing(frame: Frame) -> Frame:
    """Return an update as its island would have sent it with its last words."""
    return Frame(replace(frame.header, kind=Kind.DEPARTING), frame.body)


def _forecast(call: JoinCall, state: CoordinatorState, now_s: float) -> Welcome | None:
    event = Joining(call.request, blake3_digest(call.key), call.nonce)
    with suppress(AtollError):  # it will be refused
        _, actions = advance(state, event, now_s)
        return next((each for each in actions if isinstance(each, Welcome)), None)
    return None
