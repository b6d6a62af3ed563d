"""One life of an island in a bucket: its document, its heartbeat, its farewell.

Rule 1: the document is overwritten by its owner alone, with a higher number each time.
Rule 2: a farewell is the last word: a heartbeat that was under way puts it again.
Rule 3: what fails in the background is met again by who waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from atoll.errors import (
    AtollError,
    CorruptError,
    LeaseLost,
    NoSuchObject,
    RunMoved,
    Unreachable,
)
from atoll.exchange.bucket import documents, keys
from atoll.exchange.bucket.documents import MemberDocument, Stand, Want, packed
from atoll.exchange.bucket.lookout import Lookout
from atoll.protocol import Beat, Position, Stats

_FAREWELL_LOOKS, _FAREWELL_S = 40, 0.05
"""How long a farewell waits for a heartbeat that is under way."""

log = logging.getLogger("atoll")


class Living:
    """Keeps a member's document, and what its heartbeats have read of the others."""

    def __init__(self, lookout: Lookout) -> None:
        self.lookout = lookout
        self._store, self._timing = lookout.store, lookout.timing
        self.stats: Callable[[], Stats] | None = None
        """What people are told of the island, asked for when it is sent."""

        self.moved: Callable[[RunMoved], None] | None = None
        """Told in the background that the run is elsewhere, for who follows it."""

        self.wants: Callable[[], tuple[Want, ...]] = tuple
        """Which updates this island needs another copy of, asked for likewise."""

        self.member: MemberDocument | None = None
        self.position = Position(step=0, rounds=())
        """Where the run was when this island last looked."""

        self._lost: LeaseLost | None = None
        self._is_beating = False

    @property
    def island(self) -> str | None:
        return self.member.beat.island if self.member else None

    def require(self) -> MemberDocument:
        """Return the document of a life that goes on.

        Raises:
            LeaseLost: a later life has the name, or this one has left.
        """
        if self._lost is not None:
            raise self._lost
        member = self.member
        assert member is not None
        if member.has_left:
            raise LeaseLost(
                f"Incarnation {member.beat.incarnation} of island "
                f"{member.beat.island!r} has left the run. Join again to go on."
            )
        return member

    def note(self, beat: Beat) -> None:
        """Take note of where this island is, and of what it holds."""
        with self.lookout.lock:
            self.member = member = replace(self.require(), beat=beat)
            if beat.waits_for is not None:
                now_s = self._timing.now_s()
                self.lookout.known_members.see(member, now_s)
            for fragment, held in enumerate(beat.holds):
                self.lookout.known_bases.see_held(fragment, held)

    def look(self) -> Position:
        """Return where the run is, by what was read so far."""
        with self.lookout.lock:
            now_s = self._timing.now_s()
            self.position = self.lookout.sight.position(now_s, island=self.island)
        return self.position

    def beat_quietly(self) -> None:
        """Beat in the background."""
        try:
            self.beat()
        except LeaseLost as exc:
            self._lost = exc
        except RunMoved as exc:
            if self.moved is not None:
                self.moved(exc)
        except (CorruptError, NoSuchObject, Unreachable) as exc:
            if not (self.member and self.member.has_left):
                log.warning("a heartbeat has failed: %s", exc)
        except AtollError as exc:
            log.error("heartbeats fail: %s", exc)
        except Exception:  # a life that says nothing any more would be given up
            log.exception("heartbeats fail")

    def beat(self) -> None:
        """Say that the island lives, and read what others and operators have said.

        Raises:
            LeaseLost: a later life has the name.
            RunMoved: the run is elsewhere.
        """
        member = self.member
        if member is None or member.has_left:
            return
        self.lookout.require_here()
        stats = self.stats() if self.stats is not None else member.beat.stats
        with self.lookout.lock:
            member = self.require()
            self.member = member = replace(
                member, beats=member.beats + 1, beat=replace(member.beat, stats=stats)
            )
        self._put_beat(member)
        self._read_others(member)
        self.lookout.require_here()
        with self.lookout.lock:
            self.lookout.sight.state.members.require(
                member.beat.island, member.beat.incarnation
            )
        self.look()

    def _read_others(self, member: MemberDocument) -> None:
        with suppress(NoSuchObject):
            self.lookout.heed_controls()
            self.lookout.look_members()
            waits_for = member.beat.waits_for
            if waits_for is not None:
                # Whether everybody waits is told by the others' open rounds: if so,
                # nobody moves until somebody is asked to. Its own is looked at by who
                # waits for it: to look twice at once would read all that is new twice.
                for round in self.lookout.sight.state.rounds:
                    if round.fragment != waits_for[0]:
                        self.lookout.look_round(round.fragment)

    def leave(self, left_behind: Callable[[MemberDocument], tuple[Stand, ...]]) -> bool:
        """Say farewell, with what is left behind; False: that was said before."""
        with self.lookout.lock:
            member = self.member
            if member is None or member.has_left:
                return False
            self.member = gone = replace(
                member,
                beats=member.beats + 1,
                has_left=True,
                beat=replace(member.beat, stats=self.stats() if self.stats else None),
                stands=left_behind(member),
            )
        for _ in range(_FAREWELL_LOOKS):
            if not self._is_beating:
                break
            self._timing.pause(_FAREWELL_S)  # a heartbeat would undo it
        self._put(gone)
        with self.lookout.lock:
            self.lookout.known_members.see(gone, self._timing.now_s())
        return True

    def _put_beat(self, member: MemberDocument) -> None:
        """Put a heartbeat; if the island has left meanwhile, its farewell again."""
        self._is_beating = True
        try:
            self._put(member)
            latest = self.member
            if latest is not None and latest.has_left:
                self._put(latest)
        finally:
            self._is_beating = False

    def _put(self, member: MemberDocument) -> None:
        key = keys.member(member.beat.island, member.beat.incarnation)
        with self.lookout.lock:
            sight = self.lookout.sight
            heads = tuple(head for _, head in sorted(sight.heads.items()))
            controls = len(sight.controls)
        said = replace(member, heads=heads, controls=controls, wants=self.wants())
        self._store.put(key, packed(documents.MEMBER, said, key))
