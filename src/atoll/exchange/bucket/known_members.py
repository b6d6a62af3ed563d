"""What an observer of a bucket knows of islands: who lives, by its own clock.

A member is gone when its document has not changed for a lease of the observer's own
clock. No clock of a writer is ever read.
"""

from __future__ import annotations

from atoll.exchange.bucket.documents import MemberDocument
from atoll.exchange.bucket.keys import Life, slug
from atoll.exchange.bucket.known_updates import KnownUpdates
from atoll.exchange.bucket.sight import Sight
from atoll.protocol.membership import EVICTED, Member
from atoll.protocol.plausible import max_schedule_step
from atoll.protocol.values import changed


class KnownMembers:
    """Who takes part, as far as was read."""

    def __init__(self, sight: Sight, updates: KnownUpdates) -> None:
        self._sight, self._updates = sight, updates
        self._read_s: dict[str, float] = {}
        """When each one was last read, changed or not."""

        self._lives: dict[Life, str] = {}
        self._latest: dict[str, int] = {}
        self._evicted: set[tuple[str, int]] = set()

    def see(self, document: MemberDocument, now_s: float) -> None:
        """Take note of a member's document; one that has not changed says nothing."""
        beat = document.beat
        before = self._sight.state.members.known.get(beat.island)
        if before is not None and beat.incarnation < before.incarnation:
            return
        read_s = self._read_s.get(beat.island, now_s)
        self._read_s[beat.island] = now_s
        if self._sight.documents.get(beat.island) == document:
            self._renew_unwatched(beat.island, read_s, now_s)
            return
        self._sight.documents[beat.island] = document
        self._lives[Life(slug(beat.island), beat.incarnation)] = beat.island
        self._latest[slug(beat.island)] = beat.incarnation
        is_evicted = (beat.island, beat.incarnation) in self._evicted
        member = Member(
            island=beat.island,
            incarnation=beat.incarnation,
            slot=document.slot,
            key=document.key,
            nonce=document.nonce,
            lease_until_s=now_s + self._sight.lease_s,
            has_left=document.has_left or is_evicted,
            left_because=EVICTED if is_evicted else "",
            step=min(beat.step, self._last_step()),
            waits_for=beat.waits_for,
            holds=beat.holds,
            arrivals=before.arrivals if before else {},
        )
        members = self._sight.state.members.with_member(member)
        self._sight.state = changed(self._sight.state, members=members)
        self._updates.unstage(beat.island)
        self._sight.settle(now_s)

    def _last_step(self) -> int:
        """Return the schedule step that no island exceeds, as far as was read."""
        rounds = [round.number for round in self._sight.state.rounds]
        return max_schedule_step(rounds, self._sight.settings)

    def _renew_unwatched(self, island: str, read_s: float, now_s: float) -> None:
        """Begin a lease anew if nobody has watched most of it.

        An observer whose clock jumped, that stood still or could not read has seen no
        silence; a member that was gone when it was last read stays so.
        """
        member = self._sight.state.members.known[island]
        was_live = not member.has_left and read_s <= member.lease_until_s
        if was_live and now_s - read_s > self._sight.lease_s / 2:
            renewed = changed(member, lease_until_s=now_s + self._sight.lease_s)
            members = self._sight.state.members.with_member(renewed)
            self._sight.state = changed(self._sight.state, members=members)
            self._sight.settle(now_s)

    def unwatched(self, now_s: float) -> set[str]:
        """Return who would be gone, but was not read again when its lease was over.

        An observer that stood still, or could not read, has seen nobody fall silent.
        """
        return {
            name
            for name, member in self._sight.state.members.known.items()
            if not member.has_left
            and not member.is_live(now_s)
            and self._read_s.get(name, now_s) <= member.lease_until_s
        }

    def name_of(self, life: Life) -> str | None:
        """Return whose life a key names; None: its document has not been read."""
        return self._lives.get(life)

    def knows(self, life: Life) -> bool:
        """Return whether a document of this life has been read, or of a later one."""
        return self._latest.get(life.slug, -1) >= life.incarnation

    def rests(self, life: Life, now_s: float) -> bool:
        """Return whether a life has been silent for so long that a look can wait.

        Who died without a farewell would be read for ever: between two looks a quarter
        of the silence passes, or two leases. An update would tell that it lives again.
        """
        name = self._lives.get(life)
        if name is None:
            return False
        member = self._sight.state.members.known[name]
        read_s = self._read_s.get(name, now_s)
        silent_s = now_s - (member.lease_until_s - self._sight.lease_s)
        pause_s = min(silent_s / 4, 2 * self._sight.lease_s)
        return member.lease_until_s < read_s and now_s - read_s < pause_s

    def evict(self, island: str, incarnation: int) -> None:
        self._evicted.add((island, incarnation))
        member = self._sight.state.members.known.get(island)
        if member is not None and member.incarnation == incarnation:
            members = self._sight.state.members.leave(member, because=EVICTED)
            self._sight.state = changed(self._sight.state, members=members)
