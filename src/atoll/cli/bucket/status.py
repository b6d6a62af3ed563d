"""Where a run in a store is, in the same document as a coordinator's.

No clock is kept in a store, so what is told of times is counted from when the observer
came: `watched_s` ago.
"""

from __future__ import annotations

import shlex
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from atoll import __version__
from atoll.cli.bucket.observing import LIVE, SEEN, Observing
from atoll.coordinator.status import run_state, status_of
from atoll.exchange.bucket import keys
from atoll.exchange.bucket.documents import RosterDocument
from atoll.exchange.bucket.view import BEAT_S, RunView
from atoll.protocol.coordinator_state import CoordinatorState
from atoll.protocol.membership import Members
from atoll.protocol.values import changed
from atoll.wire import Verdict

WATCH_S = 1.5 * BEAT_S
"""So long one look may take: every island that beats as usual is seen to live."""

VERDICT_ROUNDS = 8
"""Of so many rounds, at least, it is told whose updates counted."""

MAX_READS = 256
RECENT = 50
NEVER_S = float("-inf")

Rosters = dict[tuple[int, int], RosterDocument]
"""By fragment and round."""


class StatusView:
    """Makes the status document of a run that is observed."""

    def __init__(self, observing: Observing) -> None:
        self._observing = observing
        self._known = self._rosters()
        self._older = _older_rosters(observing)
        self._closed: list[dict[str, Any]] = []

    def document(self) -> dict[str, Any]:
        """Return where the run is now, by what was looked at last."""
        observing, sight = self._observing, self._observing.lookout.sight
        self._note_closed()
        state = _as_known(observing)
        said = status_of(
            state,
            observing.now_s,
            stats={
                name: each.beat.stats
                for name, each in sight.documents.items()
                if each.beat.stats is not None
            },
            verdicts=_verdicts(self._older | self._known),
        )
        said |= {
            "version": __version__,
            "listening": observing.url,
            "started_unix_s": None,
            "now_unix_s": time.time(),
            "watched_s": observing.watched_s,
            "recent": self._closed[-RECENT:],
            "damage": _damage(sight),
            "bytes_in": None,
            "bytes_out": None,
        }
        said["islands"] = [self._row(each) for each in said["islands"]]
        said["waits_for"] = [each | {"late_in_s": None} for each in said["waits_for"]]
        said |= _reasons(observing, state, said)
        return _with_url(said, observing.url)

    def _row(self, row: dict[str, Any]) -> dict[str, Any]:
        island = row["island"]
        unchanged_s = self._observing.unchanged_s(island)
        left_s = self._observing.lookout.sight.lease_s - unchanged_s
        steps, sync = row["inner_steps"], self._observing.lookout.sight.settings.sync
        stats = self._observing.lookout.sight.documents[island].beat.stats
        seconds = stats.seconds if stats else 0.0
        return row | {
            "state": self._observing.standing(island),
            "pace_s": seconds / steps * sync.sync_every if steps else None,
            "seen_s": unchanged_s,
            "lease_s": max(0.0, left_s),
        }

    def _rosters(self) -> Rosters:
        return dict(self._observing.lookout.sight.rosters)

    def _note_closed(self) -> None:
        """Take note of rounds that were closed while this observer was here."""
        found = self._rosters()
        for at in sorted(found.keys() - self._known.keys()):
            self._closed.append(_closing(found[at]))
        self._known = found


def _closing(document: RosterDocument) -> dict[str, Any]:
    count = Counter(entry.verdict for entry in document.roster.entries)
    return {
        "fragment": document.fragment,
        "round": document.round,
        "counted": count[Verdict.COUNTED],
        "late": count[Verdict.LATE],
        "refused": count[Verdict.REFUSED],
        "seconds": None,
        "bytes": None,
        "committed_unix_s": time.time(),
    }


def _as_known(observing: Observing) -> CoordinatorState:
    """Return what is known of the run with leases as this observer has seen them."""
    state = observing.lookout.sight.state
    members = {
        name: changed(
            member,
            lease_until_s=observing.now_s + 1.0
            if observing.standing(name) == LIVE
            else NEVER_S,
        )
        for name, member in state.members.known.items()
    }
    return changed(state, members=Members(members))


def _older_rosters(observing: Observing) -> Rosters:
    """Return some rosters from before the last states: they are kept for good."""
    sight = observing.lookout.sight
    rounds = sight.state.rounds
    each = min(VERDICT_ROUNDS, MAX_READS // max(1, len(rounds)))
    wanted = [
        (round.fragment, number)
        for round in rounds
        for number in range(max(1, round.number - each), round.number)
        if (round.fragment, number) not in sight.rosters
    ]
    return dict(zip(wanted, observing.read_rosters(wanted), strict=True))


def _verdicts(rosters: Rosters) -> Mapping[str, Mapping[str, Any]]:
    """Return what became of each island's updates in the rounds that were read."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for _, document in sorted(rosters.items(), key=lambda each: each[0][1]):
        for entry in document.roster.entries:
            noted, word = found[entry.island], entry.verdict.name.lower()
            noted[word] = noted.get(word, 0) + 1
            noted["last"] = word
            if entry.verdict is Verdict.REFUSED:
                noted["because"] = entry.reason
    return found


def _damage(sight: RunView) -> list[str]:
    """Return the objects that islands cannot verify, by their own documents."""
    return sorted(
        {
            f"{keys.update(want.fragment, want.round, want.island, want.incarnation)} "
            f"is gone or damaged: {name} waits for another copy"
            for name, document in sight.documents.items()
            if not document.has_left
            for want in document.wants
        }
    )


def _reasons(
    observing: Observing, state: CoordinatorState, said: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the word for where the run is, and why, where a bucket has more to say."""
    sight = observing.lookout.sight
    if sight.moved_to is not None:
        return {"state": "moved", "why": f"The run goes on at {sight.moved_to}."}
    seen = sorted(each["island"] for each in said["islands"] if each["state"] == SEEN)
    if said["state"] in ("training", "waiting") and _could_train(observing, state):
        return {"state": "unknown", "why": _unsure(observing, seen)}
    decider = sight.settings.store.decider
    is_away = decider is not None and not any(
        each["island"] == decider and each["state"] in (LIVE, SEEN)
        for each in said["islands"]
    )
    if said["state"] in ("founding", "training", "waiting") and is_away:
        return {"why": f"Waits for {decider}, which alone decides in this run."}
    return {}


def _could_train(observing: Observing, state: CoordinatorState) -> bool:
    """Return whether the run goes on if those who were only seen are live."""
    if run_state(state, observing.now_s) == "training":
        return False
    present = {
        name: changed(member, lease_until_s=observing.now_s + 1.0)
        if observing.standing(name) in (LIVE, SEEN)
        else member
        for name, member in state.members.known.items()
    }
    hopeful = changed(state, members=Members(present))
    return run_state(hopeful, observing.now_s) == "training"


def _unsure(observing: Observing, seen: list[str]) -> str:
    few = ", ".join(seen[:8]) + (", ..." if len(seen) > 8 else "")
    lease_s = observing.lookout.sight.lease_s
    return (
        f"Nothing has come from {few} for {observing.watched_s:.0f} s. Whether they "
        f"are live is known after {lease_s:.0f} s: look with --watch."
    )


def _with_url(said: dict[str, Any], url: str) -> dict[str, Any]:
    """Return the document with commands that work wherever the store can be reached."""
    named = f"atoll control {shlex.quote(said['name'])}"
    for key in ("why", "cure"):
        if said[key]:
            said[key] = said[key].replace(named, f"atoll control {shlex.quote(url)}")
    return said
