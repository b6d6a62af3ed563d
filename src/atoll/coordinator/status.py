"""A run as people see it: the status document, and events for its changes.

The keys of the status document are stable. The watcher compares the state after each
change with the one before, and emits the difference as events.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress, repeat
from operator import is_not
from statistics import median
from typing import Any

from atoll.coordinator.rows import RowWatcher, rows_of
from atoll.coordinator.service import Service
from atoll.coordinator.status_fields import (
    RECENT_AGES,
    ages_of,
    async_fields,
    control_command,
    cure,
    last_round_of,
    num_parameters,
    overshoot,
    same_data,
    unowned_share,
    why_ended,
)
from atoll.protocol import Stats
from atoll.protocol.coordinator_state import CoordinatorState, held_by
from atoll.protocol.membership import LEASE_S, Member
from atoll.protocol.rounds import Phase, Round
from atoll.security.audit import (
    RateLimiter,
)
from atoll.telemetry import EventBus
from atoll.telemetry.curves import ABSENT, COUNTED, LATE, NO_MARK, REFUSED
from atoll.telemetry.events import MAX_TEXT
from atoll.wire import Header, Roster, Verdict

MAX_NAMES = 8
"""Largest number of islands named in a sentence."""


def status_of(
    state: CoordinatorState,
    now_s: float,
    *,
    stats: Mapping[str, Stats],
    verdicts: Mapping[str, Mapping[str, Any]],
    since_unix_s: Mapping[str, float] | None = None,
    recent: Sequence[Mapping[str, Any]] = (),
    rows_per_s: float | None = None,
) -> dict[str, Any]:
    """Return the status document: progress, members, and awaited islands.

    Args:
        state: State of the run.
        now_s: Time of the coordinator's clock.
        stats: Last statistics of each island.
        verdicts: Last verdict on each island's updates.
        since_unix_s: Start time of each run state, where known.
        recent: The last committed rounds.
        rows_per_s: Trained rows per second, if the run deals out rows.
    """
    missing = waits_for(state, now_s)
    shares = [x for x in map(_share, stats.values()) if x is not None]
    run_phase = run_state(state, now_s)
    return {
        "run": state.run,
        "name": state.settings.run.name,
        "bundle": state.settings.run.bundle,
        "settings_authority": "run",
        "state": run_phase,
        "why": why(state, now_s, missing),
        "since_unix_s": (since_unix_s or {}).get(run_phase),
        "waits_for": missing,
        "round": min((round.number for round in state.rounds), default=1) - 1,
        "rounds": [round.number for round in state.rounds],
        "last_round": last_round_of(state),
        "last_rounds": state.last_rounds and list(state.last_rounds),
        "move": state.move
        and {
            "target": state.move.target,
            "nonce": state.move.nonce,
            "is_over": state.move.is_over,
        },
        "tokens": state.counted.tokens,
        "parameters": num_parameters(state.model),
        "epoch": state.epoch,
        "quorum": state.settings.run.quorum,
        "start_islands": state.settings.run.start_islands,
        "sync_every": state.settings.sync.sync_every,
        "end_tokens": state.settings.run.end_tokens,
        "overshoot": overshoot(state),
        **async_fields(state, now_s, recent),
        "stall_share": max(shares, default=None),
        "cure": cure(state, now_s, shares),
        "same_data": same_data(stats),
        "unowned_share": unowned_share(state, now_s),
        "data": rows_of(state, rows_per_s=rows_per_s),
        "islands": [
            island_of(state, member, now_s, stats.get(name), verdicts.get(name, {}))
            for name, member in sorted(state.members.known.items())
        ],
    }


def run_state(state: CoordinatorState, now_s: float) -> str:
    """Return the state of the run, as one word."""
    if state.model is None:
        return "ended" if state.last_round == 0 else "founding"
    if state.move is not None:
        return "moved" if state.move.is_over else "moving"
    if all(round.phase is Phase.ENDED for round in state.rounds):
        return "ended"
    if state.is_paused:
        return "paused"
    if any(round.phase is Phase.WAITING for round in state.rounds):
        return "waiting"
    live = len(state.members.live(now_s))
    return "training" if live >= state.settings.run.quorum else "waiting"


def why(
    state: CoordinatorState, now_s: float, missing: Sequence[Mapping[str, Any]]
) -> str:
    """Return why the run makes no progress, in a sentence; empty if it does."""
    live, run = len(state.members.live(now_s)), state.settings.run
    match run_state(state, now_s):
        case "founding" if state.founding and now_s <= state.founding.until_s:
            return f"Waits for {state.founding.island} to bring the first weights."
        case "founding":
            return "Waits for the first island, which brings the weights."
        case "moving" if state.move:
            return (
                f"Moves to {state.move.target}: run `atoll move` again to resume, "
                "or with --back to stay."
            )
        case "moved" if state.move:
            return f"The run has moved to {state.move.target}. Islands are redirected."
        case "paused":
            resume = f"{control_command(state)} resume"
            return f"Paused by an operator. Resume it with `{resume}`."
        case "ended":
            return why_ended(state)
        case "waiting" if not state.has_started:
            missing_count = run.start_islands - live
            return (
                f"Waits for {missing_count} more of start_islands={run.start_islands}."
            )
        case "waiting":
            return _too_few(state, now_s)
    names = sorted({row["island"] for row in missing})
    return (
        _why_not_known(state, now_s)
        or (f"Waits for {_listed(names)}." if names else "")
        or _why_not_closed(state)
    )


def _why_not_known(state: CoordinatorState, now_s: float) -> str:
    """Return why a restarted coordinator does not close a round yet."""
    members = state.members
    unreported = sorted(members.look(now_s).unreported)
    if unreported:
        until_s = max(members.known[name].unheard_until_s for name in unreported)
        return (
            f"The coordinator has restarted, and waits up to {until_s - now_s:.0f} s "
            f"for {_listed(unreported)} to report their rounds."
        )
    for round in state.rounds:
        lost = state.lost_state(round.fragment, now_s)
        if lost is not None:
            holders = sorted(
                name
                for name in members.live(now_s)
                if held_by(members.known[name], round.fragment) == lost
            )
            return (
                f"The run has lost rounds {round.number} to {lost.round} of fragment "
                f"{round.fragment}, and waits for {_listed(holders)} to bring its "
                f"state. `{control_command(state)} evict ISLAND` continues without it."
            )
    return ""


def _why_not_closed(state: CoordinatorState) -> str:
    """Return why a round that waits for no island is still open or closing."""
    quorum = state.settings.run.quorum
    for round in state.rounds:
        name = f"Round {round.number} of fragment {round.fragment}"
        if round.phase is Phase.CLOSING:
            return f"{name} is being reduced and written."
        if round.phase is Phase.OPEN and 0 < len(round.staged) < quorum:
            return f"{name} has {len(round.staged)} of quorum={quorum} updates."
    return ""


def _too_few(state: CoordinatorState, now_s: float) -> str:
    """Return how many islands are missing for the quorum, and which have left."""
    members, quorum = state.members, state.settings.run.quorum
    live = members.live(now_s)
    sentence = f"Waits for {quorum - len(live)} more of quorum={quorum}"
    silent = sorted(
        name
        for name, member in members.known.items()
        if name not in live and not member.has_left
    )
    return f"{sentence}. Silent: {_listed(silent)}." if silent else f"{sentence}."


def _listed(names: Sequence[str]) -> str:
    few = ", ".join(names[:MAX_NAMES])
    return (
        few if len(names) <= MAX_NAMES else f"{few} and {len(names) - MAX_NAMES} more"
    )


def waits_for(state: CoordinatorState, now_s: float) -> list[dict[str, Any]]:
    """Return the islands that rounds with updates wait for."""
    return [
        _awaited(state, round, island, now_s)
        for round in state.rounds
        if round.phase is Phase.OPEN and round.staged
        for island in sorted(round.missing(state.members, now_s))
    ]


def _awaited(
    state: CoordinatorState, round: Round, island: str, now_s: float
) -> dict[str, Any]:
    since_s = round.waits_from_s
    late_s = round.late_at_s(island, state.members, state.settings) - now_s
    return {
        "island": island,
        "fragment": round.fragment,
        "round": round.number,
        "since_s": max(0.0, now_s - since_s),
        "late_in_s": max(0.0, late_s),
    }


def island_of(
    state: CoordinatorState,
    member: Member,
    now_s: float,
    stats: Stats | None,
    verdicts: Mapping[str, Any],
) -> dict[str, Any]:
    """Return one island's row."""
    paces = [arrivals.median_s for arrivals in member.arrivals.values() if arrivals]
    left_s = member.lease_until_s - now_s
    waits = member.waits_for
    has_weights = state.settings.outer.weight == "tokens"
    return {
        "island": member.island,
        "incarnation": member.incarnation,
        "slot": member.slot,
        "state": _standing(member, now_s),
        "lease_s": max(0.0, left_s),
        "seen_s": max(0.0, LEASE_S - left_s) if member.is_heard else None,
        "step": member.step,
        "round": min((holding.round for holding in member.holds), default=None),
        "pace_s": median(paces) if paces else None,
        "step_s": member.step_s,
        "late_after_s": _late_after_s(state, member),
        "window": state.window_of(member.island),
        "share": verdicts.get("share") if has_weights else None,
        **ages_of(verdicts),
        "waits_for": waits and {"fragment": waits[0], "round": waits[1]},
        **_progress_of(stats),
        "counted": verdicts.get("counted", 0),
        "late": verdicts.get("late", 0),
        "refused": verdicts.get("refused", 0),
        "last_verdict": verdicts.get("last"),
        "refused_because": verdicts.get("because"),
    }


def _late_after_s(state: CoordinatorState, member: Member) -> float | None:
    """Return how long after its opening a round still waits for an island."""
    for round in state.rounds:
        if round.phase is Phase.OPEN and not round.is_async:
            late_s = round.late_at_s(member.island, state.members, state.settings)
            return max(0.0, late_s - round.opened_s)
    return None


def _progress_of(stats: Stats | None) -> dict[str, Any]:
    """Return the values that an island has reported; None before it has."""
    if stats is None:
        return dict.fromkeys(_REPORTED) | {"wait_share": None}
    values = {key: getattr(stats, key) for key in _REPORTED}
    return values | {
        **{key: getattr(stats, key) or 0 for key in _NEVER_YET},
        "wait_share": _share(stats),
    }


_NEVER_YET = ("dropped_steps", "carried", "dropped")
"""Counts that an island leaves out while they are 0."""

_REPORTED = (
    *_NEVER_YET,
    *("loss", "tokens", "inner_steps", "wait_s", "bytes_up"),
    *("bytes_down", "version", "loss_is_finite", "metrics"),
    *("exchange_s", "hidden_s", "up_bytes_per_s", "down_bytes_per_s", "rtt_s"),
    *("store_usd", "machine"),
)


def shares_of(rosters: Iterable[Roster]) -> dict[str, float]:
    """Return the weight of each listed island as a share of all counted weights."""
    weights: Counter[str] = Counter()
    for roster in rosters:
        weights.update(dict.fromkeys([entry.island for entry in roster.entries], 0))
        weights.update({entry.island: entry.weight for entry in roster.counted})
    total = weights.total() or 1  # of rounds in which no update counted
    return {island: weight / total for island, weight in weights.items()}


def _share(stats: Stats) -> float | None:
    return min(1.0, stats.wait_s / stats.seconds) if stats.seconds > 0 else None


def _standing(member: Member, now_s: float) -> str:
    if member.has_left:
        return "left"
    return "live" if member.is_live(now_s) else "silent"


RECENT = 50
"""Rounds that status shows."""


class Watcher:
    """Emits events after every change, under the service's lock."""

    def __init__(self, events: EventBus, state: CoordinatorState, now_s: float) -> None:
        self._events = events
        self.rows = RowWatcher(events)
        self._seen = state
        self._live = state.members.live(now_s)
        self._silent = frozenset(state.members.known) - self._live
        self._sparing = RateLimiter()
        self._reported: set[str] = set()
        """Damage that has been reported."""

        self.stats: dict[str, Stats] = {}
        self.verdicts: dict[str, dict[str, Any]] = defaultdict(dict)
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self._rosters: deque[Roster] = deque(maxlen=RECENT)
        """Those of the recent rounds of an asynchronous run."""

        self.since_unix_s: dict[str, float] = {}
        """Time at which the run was paused, lost its quorum, or ended."""

    def look(self, service: Service, now_s: float) -> None:
        """Emit events for the changes since the last call."""
        self._tell_refusals(service, now_s)
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
        if state.windows is not seen.windows:
            self._tell_windows(seen, state)
        if state.ledger is not seen.ledger:
            self.rows.look(seen.ledger, state.ledger, now_s)
        self._tell_operator(service, seen, state)

    def tell_damage(self, service: Service) -> None:
        """Report damage on the disk, once. Called at each tick."""
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
        """Report updates with invalid values, which no round lists.

        The rate is limited: an island may send many of them.
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
                    slot=member.slot,
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
            return  # the same object until a member joins, leaves or falls silent
        self._live = live
        present = {
            name for name, member in members.known.items() if not member.has_left
        }
        silent = frozenset(present) - live
        for island in sorted(silent - self._silent):
            self._events.emit("island_silent", island=island)
        for island in sorted((self._silent - silent) & present):
            self._events.emit("island_returned", island=island)
        self._silent = silent

    def _note_quorum(self, state: CoordinatorState, live: int) -> None:
        """Record when a started run lost its quorum."""
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
            self._events.emit(
                "run_founded", island=founder, fragments=len(state.rounds)
            )
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
                self._tell_ahead(after)

    def _tell_ahead(self, round: Round) -> None:
        """Report the updates that had arrived before their round opened."""
        for island in round.staged:
            self._emit_staged(round, island, round.opened_s)

    def _tell_staged(self, before: Round, after: Round, now_s: float) -> None:
        if after.number == before.number:
            for island in after.staged.keys() - before.staged.keys():
                self._emit_staged(after, island, now_s)

    def _emit_staged(self, round: Round, island: str, now_s: float) -> None:
        self._events.emit(
            "update_staged",
            island=island,
            fragment=round.fragment,
            round=round.number,
            bytes=round.staged[island].body_bytes,
            seconds=max(0.0, now_s - round.opened_s),
            norm=round.staged[island].norm,
        )

    def _tell_closing(
        self, state: CoordinatorState, round: Round, now_s: float
    ) -> None:
        missing = round.missing(state.members, now_s)
        is_open_ended = round.is_async and not round.is_last  # their updates stand
        self._events.emit(
            "round_closing",
            fragment=round.fragment,
            round=round.number,
            staged=len(round.staged),
            missing=[] if is_open_ended else sorted(missing),
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
        positions = service.journal.recorded.fragments[after.fragment].positions
        first = max(before.number, after.number - RECENT)
        for number in range(first, after.number):
            if number not in positions:
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
            noted = self.verdicts[entry.island]
            if after.is_async and entry.verdict is Verdict.COUNTED:
                noted.setdefault("ages", deque(maxlen=RECENT_AGES)).append(entry.age)
        self._note_shares(header.roster, is_async=after.is_async)
        fields = {
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
            **fields,
            digest=after.base.hex(),
            tokens=self._seen.counted.tokens,
            stall_share_mean=self._stall_share_mean(),
            marks=marks_of(header.roster, self._seen.members.known),
            late_names=_names_of(header.roster, Verdict.LATE),
            refused_names=_names_of(header.roster, Verdict.REFUSED),
        )
        self.recent.append({**fields, "committed_unix_s": event.at_unix_s})

    def _note_shares(self, roster: Roster, *, is_async: bool) -> None:
        """Keep the islands' shares of a round; of recent ones if few count in each."""
        rosters = [roster]
        if is_async:
            self._rosters.append(roster)
            rosters = list(self._rosters)
        for island, share in shares_of(rosters).items():
            if island in self.verdicts:  # forgotten ones are not
                self.verdicts[island]["share"] = share

    def _stall_share_mean(self) -> float | None:
        all_stats = list(self.stats.values())  # others write there meanwhile
        seconds = sum(stats.seconds for stats in all_stats)
        waited_s = sum(stats.wait_s for stats in all_stats)
        return min(1.0, waited_s / seconds) if seconds > 0 else None

    def _note(self, island: str, verdict: Verdict, reason: str, header: Header) -> None:
        noted = self.verdicts[island]
        name = verdict.name.lower()
        noted[name] = noted.get(name, 0) + 1
        noted["last"] = name
        position = {"fragment": header.fragment, "round": header.round}
        if verdict is Verdict.REFUSED:
            noted["because"] = reason
            self._events.emit(
                "update_refused", island=island, reason=reason, **position
            )
        elif verdict is Verdict.LATE:
            self._events.emit("update_late", island=island, **position)

    def _tell_windows(self, seen: CoordinatorState, state: CoordinatorState) -> None:
        for island in sorted(state.windows.last):
            window, member = state.window_of(island), state.members.known.get(island)
            if window != seen.window_of(island):
                self._events.emit(
                    "island_paced",
                    island=island,
                    window=window,
                    step_s=member.step_s if member else None,
                )

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


def _names_of(roster: Roster, verdict: Verdict) -> list[str]:
    return [entry.island for entry in roster.entries if entry.verdict is verdict]


_MARKS = {Verdict.COUNTED: COUNTED, Verdict.LATE: LATE, Verdict.REFUSED: REFUSED}


def marks_of(roster: Roster, members: Mapping[str, Member]) -> str:
    """Return a mark for each slot: counted, late, refused, absent or no member."""
    verdicts = {entry.island: _MARKS[entry.verdict] for entry in roster.entries}
    marks = {
        member.slot: verdicts.get(name, ABSENT)
        for name, member in members.items()
        if name in verdicts or not member.has_left
    }
    length = min(MAX_TEXT, max(marks, default=-1) + 1)
    return "".join(marks.get(slot, NO_MARK) for slot in range(length))


def _changed(
    before: Mapping[str, Member], after: Mapping[str, Member]
) -> Iterator[Member]:
    """Yield the members that have changed.

    They keep their order, so that they can be compared place by place, without a
    look at each, after every message of every island. When one was forgotten, those
    after it are yielded too.
    """
    is_other = map(is_not, after.values(), chain(before.values(), repeat(None)))
    return compress(after.values(), is_other)


def _reason(service: Service, island: str) -> str:
    """Return why an island has left, in the journal's words."""
    member = service.journal.recorded.members.get(island)
    return (member.reason if member else "") or "left"


def _has_ended(state: CoordinatorState) -> bool:
    return bool(state.rounds) and all(
        round.phase is Phase.ENDED for round in state.rounds
    )
