"""Looks at a bucket: every roster is judged as it is put.

The world does what no island does: it goes along with the rosters as they are put,
takes the mean of the updates that they count from the bucket itself, and makes the
outer step. Everybody must come to the same bits. What closers decide is judged by
`closers`, before their rosters are on their way.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from atoll.exchange.bucket import documents, keys, means
from atoll.exchange.bucket.closing import FRESH_S
from atoll.exchange.bucket.documents import (
    MemberDocument,
    RosterDocument,
    RunDocument,
    parse,
)
from atoll.exchange.bucket.means import Pieces
from atoll.protocol.island_state import CARRIED_ROUNDS
from atoll.settings import RunSettings
from atoll.simulate.invariants.claims import (
    COUNTED_ONCE,
    ROUNDS_IN_ORDER,
    SAME_STATE,
)
from atoll.simulate.invariants.closers import Closers
from atoll.simulate.invariants.truth import Commit
from atoll.simulate.invariants.watch import Watch
from atoll.simulate.store import Bucket
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
UPDATE = re.compile(r"rounds/(\d+)/(\d+)/up/")

LONGEST_LAG_S = 5.0
"""How late a list is in any storm."""


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
        self.closers = Closers(world, bucket, watch)
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
        self.closers.look()

    def judge(self) -> None:
        """Nothing: no deadline is anybody's but the observer's."""

    def conclude(self) -> None:
        """Judge the rosters at the end: of every round there is one."""
        for fragment, state in enumerate(self._states):
            rounds = range(1, state.round + 1)
            gone = [
                round
                for round in rounds
                if self._bucket.original(keys.roster(fragment, round)) is None
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
        elif UPDATE.match(key):
            self._published(whole)
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
            key = keys.founding(document.founding, fragment)
            data = self._bucket.original(key)
            assert data is not None
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

    def _published(self, whole: bytes) -> None:
        """Take note of an update that somebody else has brought into another round."""
        truth, length = self._watch.truth, header_length(whole)
        header, body = unpack(whole[:length]), np.frombuffer(whole, np.uint8)[length:]
        if update_digest(header) in truth.updates:
            return  # by whoever made it
        for before in range(header.round - CARRIED_ROUNDS, header.round):
            was = update_digest(replace(header, round=before))
            if was in truth.updates and was not in truth.origins:
                truth.bring(header, body, truth.updates[was])

    def _excuse(self, document: RosterDocument) -> None:
        """Note the departing updates that the closer of a round cannot have seen."""
        decided_s = self.closers.decided_s(document)
        prefix = keys.updates(document.fragment, document.round)
        for key in self._bucket.objects:
            data = self._bucket.original(key)
            if key.startswith(prefix) and data is not None:
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
        data = self._bucket.original(key)
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
