"""Looks at a bucket: every roster is judged as it is decided and as it is put.

The world does what no island does: it goes along with the rosters as they are put,
takes the mean of the updates that they count from the bucket itself, and makes the
outer step. Everybody must come to the same bits.
"""

from __future__ import annotations

import re

import numpy as np

from atoll.exchange.bucket import Lookout, documents, keys, means
from atoll.exchange.bucket.closing import FRESH_S
from atoll.exchange.bucket.documents import (
    MemberDocument,
    RosterDocument,
    RunDocument,
    parse,
)
from atoll.exchange.bucket.keys import Life
from atoll.exchange.bucket.means import Pieces
from atoll.exchange.bucket.pauses import TRIES
from atoll.settings import RunSettings
from atoll.simulate.invariants.claims import (
    COUNTED_ONCE,
    NOTHING_LEFT_OUT,
    ROUNDS_IN_ORDER,
    SAME_STATE,
    ZOMBIES_CHANGE_NOTHING,
)
from atoll.simulate.invariants.truth import Commit
from atoll.simulate.invariants.watch import Watch
from atoll.simulate.process import Process
from atoll.simulate.store import REQUEST_S, Bucket
from atoll.simulate.storms import STORE
from atoll.simulate.trace import Commit as Told
from atoll.simulate.world import World
from atoll.weights import FragmentState, Layout, terms_of
from atoll.wire import (
    Header,
    RosterEntry,
    header_length,
    piece_count,
    unpack,
    update_digest,
)

ROSTER = re.compile(r"rounds/(\d+)/(\d+)/roster")

LOOK_S = 1.5
"""From the look at a round to its roster, while nothing goes wrong."""

LONGEST_LAG_S = 5.0
"""How late a list is in any storm."""

CALM_S = REQUEST_S + TRIES.longest_s
"""After rough weather somebody may still wait so long for a request."""


class BucketReferee:
    """Rounds are decided by rosters in a bucket. Implements `Referee`."""

    def __init__(
        self,
        world: World,
        bucket: Bucket,
        settings: RunSettings,
        layout: Layout,
        watch: Watch,
    ) -> None:
        self._world, self._bucket, self._watch = world, bucket, watch
        self._settings, self._layout = settings, layout
        self._states: list[FragmentState] = []
        self._members: dict[str, MemberDocument] = {}
        self._last_round = settings.run.end_rounds
        self._disturbed_s = 0.0
        self._decided_s: dict[tuple[int, int, bytes], float] = {}
        """When a roster was decided: it may come to be there much later."""

        bucket.on_put = self._put

    @property
    def opened(self) -> tuple[int, ...]:
        return tuple([state.round + 1 for state in self._states])

    @property
    def has_started(self) -> bool:
        is_enough = len(self._members) >= self._settings.run.start_islands
        return bool(self._states) and is_enough

    @property
    def has_ended(self) -> bool:
        last = self._last_round
        return last is not None and all(state.round >= last for state in self._states)

    @property
    def digests(self) -> list[bytes]:
        return [state.digest for state in self._states]

    def look(self) -> None:
        """Take note of what makes requests slow or lists late."""
        network, troubles = self._world.network, self._bucket.troubles
        is_rough = network._weathers or network._cuts
        if is_rough or troubles.outages or troubles.list_lags:
            self._disturbed_s = self._world.scheduler.now_s

    def judge(self) -> None:
        """Nothing: no deadline is anybody's but the observer's."""

    def conclude(self) -> None:
        """Judge the rosters at the end: of every round there is one."""
        for fragment, state in enumerate(self._states):
            rounds = range(1, state.round + 1)
            gone = [
                round
                for round in rounds
                if keys.roster(fragment, round) not in self._bucket.objects
            ]
            if gone:
                self._watch.report(
                    ROUNDS_IN_ORDER,
                    STORE,
                    f"the rosters of rounds {gone} of fragment {fragment} are gone",
                )

    def _put(self, key: str, whole: bytes) -> None:
        """Take note of an object that has come to be there."""
        if ROSTER.fullmatch(key):
            self._closed(parse(documents.ROSTER, whole, key=key))
        elif key.startswith(keys.MEMBERS):
            self._met(parse(documents.MEMBER, whole, key=key))
        elif key == keys.RUN:
            self._founded(parse(documents.RUN, whole, key=key))
        elif key.startswith(keys.CONTROL):
            said = parse(documents.CONTROL, whole, key=key)
            if said.action == "stop":
                self._last_round = said.last_round

    def _met(self, document: MemberDocument) -> None:
        beat = document.beat
        before = self._members.get(beat.island)
        if before is not None and before.beat.incarnation > beat.incarnation:
            return
        self._members[beat.island] = document
        about = f"incarnation {beat.incarnation}"
        if before is None or before.beat.incarnation < beat.incarnation:
            self._world.scheduler.tell(beat.island, "join", about)
        elif document.has_left and not before.has_left:
            self._world.scheduler.tell(beat.island, "leave", about)

    def _founded(self, document: RunDocument) -> None:
        for fragment in range(len(self._layout)):
            data = self._bucket.objects[keys.founding(document.founding, fragment)]
            length = header_length(data)
            header, body = unpack(data[:length]), bytearray(data[length:])
            body_bytes = np.frombuffer(body, np.uint8)
            self._states.append(FragmentState.from_frame(header, body_bytes))
            self._watch.opened_s[fragment] = self._world.scheduler.now_s
        self._watch.rounds.founded(self._states)
        count = len(self._states)
        about = f"{count} fragment{'s' * (count != 1)}"
        self._world.scheduler.tell(STORE, "found", about)

    def _closed(self, document: RosterDocument) -> None:
        """Judge a roster that was put, and go along with it."""
        state = self._states[document.fragment]
        if document.round != state.round + 1:
            self._watch.report(
                ROUNDS_IN_ORDER,
                STORE,
                f"round {document.round} of fragment {document.fragment} was closed "
                f"after round {state.round}",
            )
            return
        if document.base != state.digest:
            self._watch.report(
                SAME_STATE,
                STORE,
                f"round {document.round} of fragment {document.fragment} was closed "
                f"on {document.base.hex()[:12]}, others hold {state.digest.hex()[:12]}",
            )
            return
        header, body = self._agreed(document)
        state.apply(header, body)
        self._excuse(document)
        now_s = self._world.scheduler.now_s
        commit = Commit(header, body.tobytes(), state.digest, now_s)
        self._watch.committed(commit)
        verdicts = {each.island: str(each.verdict) for each in document.roster.entries}
        told = Told(document.fragment, document.round, verdicts)
        self._world.scheduler.tell(STORE, "commit", str(told))

    def _excuse(self, document: RosterDocument) -> None:
        """Note the departing updates that the closer of a round cannot have seen."""
        decided_s = self._decided_s.get(_which(document), 0.0)
        prefix = keys.updates(document.fragment, document.round)
        for key, data in self._bucket.objects.items():
            if key.startswith(prefix):
                since_s = decided_s - self._bucket.changed_s[key]
                if since_s < FRESH_S + LONGEST_LAG_S:
                    digest = update_digest(unpack(data[: header_length(data)]))
                    self._watch.truth.excused.add(digest)

    def _agreed(self, document: RosterDocument) -> tuple[Header, np.ndarray]:
        """Return what a round comes to, by the updates that are in the bucket."""
        layout = self._layout[document.fragment]
        terms = terms_of(layout, self._settings)
        if not document.roster.counted:
            return means.agreed(document, [], layout, terms.down)
        updates = {
            entry.island: self._update(document, entry)
            for entry in document.roster.counted
        }
        whole = Pieces(0, piece_count(layout.elements), layout.elements)
        mean = means.mean_of(document, 0, whole, updates, layout, terms)
        return means.agreed(document, [mean], layout, terms.down)

    def _update(
        self, document: RosterDocument, entry: RosterEntry
    ) -> tuple[Header | None, np.ndarray]:
        """Return a counted update, which must have been there before the roster."""
        where = (document.fragment, document.round)
        key = keys.update(*where, entry.island, entry.incarnation)
        data = self._bucket.objects.get(key)
        header = unpack(data[: header_length(data)]) if data else None
        if data is None or header is None or update_digest(header) != entry.digest:
            self._watch.report(
                COUNTED_ONCE,
                entry.island,
                f"round {where[1]} of fragment {where[0]} counts an update that is not "
                f"at {key}",
            )
            return None, np.empty(0, np.uint8)
        return header, np.frombuffer(data, np.uint8)[header_length(data) :]

    def decided(self, who: Process, document: RosterDocument, lookout: Lookout) -> None:
        """Judge a roster by what the island knows that is about to put it."""
        self._decided_s[_which(document)] = self._world.scheduler.now_s
        for entry in document.roster.entries:
            if entry.digest and not _may_speak(lookout, document, entry):
                self._watch.report(
                    ZOMBIES_CHANGE_NOTHING,
                    who.name,
                    f"closes round {document.round} of fragment {document.fragment} "
                    f"with incarnation {entry.incarnation} of {entry.island}, knows a "
                    "later one, and that does not name the update",
                )
        is_calm = self._world.scheduler.now_s > self._disturbed_s + CALM_S
        if is_calm and not who.slowdowns:
            self._require_all(who, document, lookout)

    def _require_all(
        self, who: Process, document: RosterDocument, lookout: Lookout
    ) -> None:
        """Report an update that a look before the closing would have found."""
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
                f"closes round {document.round} of fragment {document.fragment} "
                f"without {name}, whose update was there since {put_s:.3f} s",
            )


def _which(document: RosterDocument) -> tuple[int, int, bytes]:
    return document.fragment, document.round, document.roster.packed


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
