"""Tells events what a coordinator does, by looking at its states."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from itertools import chain, compress, repeat
from operator import is_not
from typing import Any

from atoll.coordinator.service import Service
from atoll.protocol import Stats
from atoll.protocol.membership import Member
from atoll.protocol.rounds import Phase, Round
from atoll.protocol.run_state import CoordinatorState
from atoll.security.sparing import Sparing
from atoll.telemetry import Events
from atoll.wire import Header, Verdict

RECENT = 50
"""Rounds that status shows."""


class Watcher:
    """Looks after every change, under the office's lock, and emits what is new."""

    def __init__(self, events: Events, state: CoordinatorState, now_s: float) -> None:
        self._events = events
        self._seen = state
        self._live = state.members.live(now_s)
        self._silent = frozenset(state.members.known) - self._live
        self._sparing = Sparing()
        self._reported: set[str] = set()
        """What was wrong on the disk, and has been told."""

        self.stats: dict[str, Stats] = {}
        self.verdicts: dict[str, dict[str, Any]] = defaultdict(dict)
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self.since_unix_s: dict[str, float] = {}
        """Since when the run is paused, waits for islands that went, or has ended."""

    def look(self, service: Service, now_s: float) -> None:
        """Tell what has changed since the last look."""
        self._tell_refusals(service, now_s)
        self.tell_damage(service)
        self._tell_unproven(service, now_s)
        while service.recoveries:
            island, fragment, round = service.recoveries.popleft()
            self._events.emit(
                "state_recovered", island=island, fragment=fragment, round=round
            )
        seen, state = self._seen, service.state
        if state.members is not seen.members:
            self._tell_members(service, seen, state)
        # By time alone: when all have gone, nothing else changes.
        self._tell_silence(state, now_s)
        if state is seen:
            return
        self._seen = state
        if state.rounds is not seen.rounds:
            self._tell_rounds(service, seen, state, now_s)
        self._tell_operator(service, seen, state)

    def tell_damage(self, service: Service) -> None:
        """Tell of what was found to be wrong on the disk, once."""
        cut = service.journal.cut
        if cut is not None and not self._reported:
            self._events.emit(
                "journal_cut", file=cut.name, first_byte=cut.first, bytes=cut.size
            )
            self._reported.add(str(cut))
        for line in (*service.journal.reports, *service.damage):
            if line not in self._reported:
                self._events.emit("journal_damaged", message=line)
                self._reported.add(line)

    def _tell_refusals(self, service: Service, now_s: float) -> None:
        """Tell of updates that no round will list: their values cannot count.

        Sparingly: who sends such a thing once may send it a thousand times.
        """
        while service.refusals:
            header, reason = service.refusals.popleft()
            if self._sparing.untold(header.island, now_s=now_s) is not None:
                self._note(header.island, Verdict.REFUSED, reason, header)

    def _tell_unproven(self, service: Service, now_s: float) -> None:
        """Report holdings that were refused, at a bounded rate for each island."""
        unproven = service.receipts.unproven
        while unproven:
            island, fragment, round = unproven.popleft()
            if self._sparing.untold(("holding", island), now_s=now_s) is not None:
                self._events.emit(
                    "holding_refused", island=island, fragment=fragment, round=round
                )

    def _tell_members(
        self, service: Service, seen: CoordinatorState, state: CoordinatorState
    ) -> None:
        for member in _changed(seen.members.known, state.members.known):
            island = member.island
            before = seen.members.known.get(island)
            if before is None:
                self._report_removed(seen, state)
            if before is None or before.incarnation != member.incarnation:
                version = self.stats.get(island, Stats()).version
                self._events.emit(
                    "island_joined",
                    island=island,
                    incarnation=member.incarnation,
                    version=version,
                )
                if before is not None and before.key != member.key:
                    self._events.emit(
                        "island_taken_over",
                        island=island,
                        incarnation=member.incarnation,
                    )
            elif member.has_left and not before.has_left:
                self._events.emit(
                    "island_left",
                    island=island,
                    incarnation=member.incarnation,
                    reason=_reason(service, island),
                )

    def _report_removed(self, seen: CoordinatorState, state: CoordinatorState) -> None:
        """Emit an event for a name that made room for a new one."""
        for island in seen.members.known.keys() - state.members.known.keys():
            self._events.emit("island_forgotten", island=island)
            self.stats.pop(island, None)
            self.verdicts.pop(island, None)

    def _tell_silence(self, state: CoordinatorState, now_s: float) -> None:
        members, live = state.members, state.members.live(now_s)
        self._note_quorum(state, len(live))
        if live is self._live:
            return  # the very same set is kept while nobody comes, goes or is silent
        self._live = live
        present = {name for name, each in members.known.items() if not each.has_left}
        silent = frozenset(present) - live
        for island in sorted(silent - self._silent):
            self._events.emit("island_silent", island=island)
        for island in sorted((self._silent - silent) & present):
            self._events.emit("island_returned", island=island)
        self._silent = silent

    def _note_quorum(self, state: CoordinatorState, live: int) -> None:
        """Remember since when a run that was under way has too few islands."""
        if state.has_started and live < state.settings.run.quorum:
            self.since_unix_s.setdefault("waiting", time.time())
        else:
            self.since_unix_s.pop("waiting", None)

    def _tell_rounds(
        self,
        service: Service,
        seen: CoordinatorState,
        state: CoordinatorState,
        now_s: float,
    ) -> None:
        if state.rounds and not seen.rounds:
            founder = seen.founding.island if seen.founding else ""
            self._events.emit("run_founded", island=founder)
        for before, after in zip(seen.rounds, state.rounds, strict=False):
            if before is after:
                continue
            self._tell_staged(before, after, now_s)
            if after.phase is Phase.CLOSING and before.phase is not Phase.CLOSING:
                self._tell_closing(state, after, now_s)
            if after.number > before.number:
                self._tell_committed(service, before, after, now_s)
            if after.phase is Phase.OPEN and (
                before.phase is Phase.WAITING or after.number > before.number
            ):
                self._tell_opened(after)

    def _tell_staged(self, before: Round, after: Round, now_s: float) -> None:
        if after.number != before.number:
            return
        for island in after.staged.keys() - before.staged.keys():
            header = after.staged[island]
            self._events.emit(
                "update_staged",
                island=island,
                fragment=after.fragment,
                round=after.number,
                bytes=header.body_bytes,
                seconds=max(0.0, now_s - after.opened_s),
            )

    def _tell_closing(
        self, state: CoordinatorState, round: Round, now_s: float
    ) -> None:
        self._events.emit(
            "round_closing",
            fragment=round.fragment,
            round=round.number,
            staged=len(round.staged),
            missing=sorted(round.missing(state.members, now_s)),
        )

    def _tell_opened(self, round: Round) -> None:
        self._events.emit(
            "round_opened",
            fragment=round.fragment,
            round=round.number,
            islands=len(round.candidates),
        )

    def _tell_committed(
        self, service: Service, before: Round, after: Round, now_s: float
    ) -> None:
        """Report the outcomes that are known; a recovery may have skipped many."""
        known = service.journal.recorded.fragments[after.fragment].where
        first = max(before.number, after.number - RECENT)
        for number in range(first, after.number):
            if number not in known:
                continue
            header, _ = service.journal.outcome(after.fragment, number, has_body=False)
            self._tell_outcome(header, before, after, now_s)

    def _tell_outcome(
        self, header: Header, before: Round, after: Round, now_s: float
    ) -> None:
        assert header.roster is not None
        count = {verdict: 0 for verdict in Verdict}
        for entry in header.roster.entries:
            count[entry.verdict] += 1
            self._note(entry.island, entry.verdict, entry.reason, header)
        said = {
            "fragment": header.fragment,
            "round": header.round,
            "counted": count[Verdict.COUNTED],
            "late": count[Verdict.LATE],
            "refused": count[Verdict.REFUSED],
            "seconds": max(0.0, now_s - before.opened_s),
            "bytes": header.body_bytes,
        }
        event = self._events.emit(
            "round_committed",
            **said,
            digest=after.base.hex(),
            tokens=self._seen.counted.tokens,
            stall_share=self._stall_share(),
        )
        self.recent.append({**said, "committed_unix_s": event.at_unix_s})

    def _stall_share(self) -> float | None:
        told = list(self.stats.values())  # others write there meanwhile
        seconds = sum(each.seconds for each in told)
        waited_s = sum(each.wait_s for each in told)
        return min(1.0, waited_s / seconds) if seconds > 0 else None

    def _note(self, island: str, verdict: Verdict, reason: str, header: Header) -> None:
        noted = self.verdicts[island]
        name = verdict.name.lower()
        noted[name] = noted.get(name, 0) + 1
        noted["last"] = name
        where = {"fragment": header.fragment, "round": header.round}
        if verdict is Verdict.REFUSED:
            noted["because"] = reason
            self._events.emit("update_refused", island=island, reason=reason, **where)
        elif verdict is Verdict.LATE:
            self._events.emit("update_late", island=island, **where)

    def _tell_operator(
        self, service: Service, seen: CoordinatorState, state: CoordinatorState
    ) -> None:
        for epoch in service.journal.recorded.epochs[seen.epoch : state.epoch]:
            values = dict(epoch.values)
            self._events.emit("epoch_set", epoch=epoch.number, values=values)
        if state.is_paused != seen.is_paused:
            name = "run_paused" if state.is_paused else "run_resumed"
            self.since_unix_s["paused"] = self._events.emit(name).at_unix_s
        if state.move != seen.move:
            self._tell_move(state)
        if _has_ended(state) and not _has_ended(seen):
            last = min(round.number for round in state.rounds) - 1
            event = self._events.emit("run_ended", round=last)
            self.since_unix_s["ended"] = event.at_unix_s

    def _tell_move(self, state: CoordinatorState) -> None:
        if state.move is None:
            self._events.emit("run_stays")
        else:
            name = "run_moved" if state.move.is_over else "run_moving"
            self._events.emit(name, target=state.move.target)


def _changed(
    before: Mapping[str, Member], after: Mapping[str, Member]
) -> Iterator[Member]:
    """Yield the members that are not as before.

    They keep their order, so that they can be compared place by place, without a
    look at each, after every message of every island. When one was forgotten, those
    after it are yielded too.
    """
    is_other = map(is_not, after.values(), chain(before.values(), repeat(None)))
    return compress(after.values(), is_other)


def _reason(service: Service, island: str) -> str:
    """Return why an island is no member any more, as the journal has it."""
    member = service.journal.recorded.members.get(island)
    return (member.reason if member else "") or "left"


def _has_ended(state: CoordinatorState) -> bool:
    return bool(state.rounds) and all(
        round.phase is Phase.ENDED for round in state.rounds
    )
