"""Looks at who closes rounds in a bucket: every roster is judged as it is decided.

What is promised holds for that moment, and for what the closer knew then. A process
can stand still before its roster is on its way, for as long as anybody likes: whatever
comes to be there meanwhile is not in the roster. That costs nobody's work. Who lives is
told that its update was late, and carries it; what somebody has left is brought into
the next round; and a later life finds what its earlier one has published, and names it.
"""

from __future__ import annotations

from atoll.exchange.bucket import Lookout, keys
from atoll.exchange.bucket.documents import RosterDocument, Stand
from atoll.exchange.bucket.keys import Life
from atoll.exchange.bucket.pauses import TRIES
from atoll.protocol.island_state import CARRIED_ROUNDS
from atoll.simulate.invariants.claims import NOTHING_LEFT_OUT, ZOMBIES_CHANGE_NOTHING
from atoll.simulate.invariants.watch import Watch
from atoll.simulate.process import Process
from atoll.simulate.store import REQUEST_S, Bucket
from atoll.simulate.world import World
from atoll.wire import Roster, RosterEntry, header_length, unpack, update_digest

LOOK_S = 1.5
"""From the look at a round to the decision to close it, while nothing goes wrong."""

CALM_S = REQUEST_S + TRIES.longest_s
"""After rough weather somebody may still wait so long for a request."""


class Closers:
    """Judges what islands decide about rounds."""

    def __init__(self, world: World, bucket: Bucket, watch: Watch) -> None:
        self._world, self._bucket, self._watch = world, bucket, watch
        self._disturbed_s = 0.0
        self._decided_s: dict[tuple[int, int, bytes], float] = {}

    def look(self) -> None:
        """Take note of what makes requests slow or lists late."""
        network, troubles = self._world.network, self._bucket.troubles
        is_rough = network._weathers or network._cuts
        if is_rough or troubles.outages or troubles.list_lags:
            self._disturbed_s = self._world.scheduler.now_s

    def decided_s(self, document: RosterDocument) -> float:
        """Return when somebody decided first what a roster says."""
        return self._decided_s.get(_which(document), 0.0)

    def decided(self, who: Process, document: RosterDocument, lookout: Lookout) -> None:
        """Judge a roster by what the island knows that has just decided it."""
        now_s = self._world.scheduler.now_s
        self._decided_s.setdefault(_which(document), now_s)
        for entry in document.roster.entries:
            if entry.digest and not _may_speak(lookout, document, entry):
                self._watch.report(
                    ZOMBIES_CHANGE_NOTHING,
                    who.name,
                    f"closes {_name(document)} with incarnation {entry.incarnation} of "
                    f"{entry.island}, knows a later one, and that does not name the "
                    "update",
                )
        self._require_leftovers(who, document, lookout)
        if now_s > self._disturbed_s + CALM_S and not who.slowdowns:
            self._require_all(who, document, lookout)

    def _require_leftovers(
        self, who: Process, document: RosterDocument, lookout: Lookout
    ) -> None:
        """Report what a farewell names, if its reader neither lists nor brings it."""
        listed = {entry.island for entry in document.roster.entries if entry.digest}
        left = lookout.known_updates.left_out(document.fragment, within=CARRIED_ROUNDS)
        for island, stand in left:
            if island not in listed and self._is_uncounted(island, stand):
                self._watch.report(
                    NOTHING_LEFT_OUT,
                    who.name,
                    f"closes {_name(document)} without what {island} has left in "
                    f"round {stand.round}, and has read its farewell",
                )

    def _is_uncounted(self, island: str, stand: Stand) -> bool:
        where = (stand.fragment, stand.round)
        data = self._bucket.original(keys.update(*where, island, stand.incarnation))
        header = unpack(data[: header_length(data)]) if data else None
        if header is None or header.refused:
            return False
        truth = self._watch.truth
        update, commit = truth.updates[update_digest(header)], truth.commits.get(where)
        is_listed = commit is not None and any(
            entry.digest == update.digest for entry in _entries(commit.header.roster)
        )
        return not is_listed and truth.counting(update) is None

    def _require_all(
        self, who: Process, document: RosterDocument, lookout: Lookout
    ) -> None:
        """Report an update that a look before the decision would have found."""
        listed = {entry.island for entry in document.roster.entries if entry.digest}
        prefix = keys.updates(document.fragment, document.round)
        before_s = self._world.scheduler.now_s - LOOK_S
        for name, member in lookout.sight.documents.items():
            key = f"{prefix}{Life(keys.slug(name), member.beat.incarnation)}"
            put_s = self._bucket.changed_s.get(key)
            if name in listed or put_s is None or put_s > before_s:
                continue
            self._watch.report(
                NOTHING_LEFT_OUT,
                who.name,
                f"closes {_name(document)} without {name}, whose update was there "
                f"since {put_s:.3f} s",
            )


def _which(document: RosterDocument) -> tuple[int, int, bytes]:
    return document.fragment, document.round, document.roster.packed


def _name(document: RosterDocument) -> str:
    return f"round {document.round} of fragment {document.fragment}"


def _entries(roster: Roster | None) -> tuple[RosterEntry, ...]:
    return roster.entries if roster is not None else ()


def _may_speak(lookout: Lookout, document: RosterDocument, entry: RosterEntry) -> bool:
    """Return whether a closer knows no later life, or one that names the update."""
    known = lookout.sight.documents.get(entry.island)
    return known is not None and (
        known.beat.incarnation == entry.incarnation
        or any(
            (stand.fragment, stand.round, stand.incarnation)
            == (document.fragment, document.round, entry.incarnation)
            for stand in known.stands
        )
    )
