"""What an observer of a bucket knows of the updates in open rounds.

An update of an earlier life counts only if its successor names it. Who has published
what decides whether a round is due.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from atoll.errors import CorruptError
from atoll.exchange.bucket.documents import RosterDocument, RosterHead, Stand
from atoll.exchange.bucket.keys import Life, slug
from atoll.exchange.bucket.sight import UNKNOWN, Sight
from atoll.protocol.coordinator import roster_of
from atoll.protocol.ending import end_by_tokens
from atoll.protocol.rounds import KNOWN_BASES, Phase, Round
from atoll.protocol.values import changed
from atoll.wire import Header, Roster, RosterEntry, Verdict

KEPT_ROSTERS = 8
"""Of each fragment, in memory; older ones are read again by who asks for them."""


class KnownUpdates:
    """What islands have published, what stands, and what is due."""

    def __init__(self, sight: Sight) -> None:
        self._sight = sight
        self._hollow: set[tuple[int, Life]] = set()
        """What stands in open rounds by somebody's word, and is not there."""

        self._objections: dict[tuple[int, str], str] = {}

    def see(self, header: Header, now_s: float, *, objection: str = "") -> bool:
        """Stage an update for the open round; return whether it can count."""
        round = self._sight.state.rounds[header.fragment]
        if header.round != round.number or header.island in round.staged:
            return header.round == round.number
        if not self._may_speak(header):
            return False
        if objection:
            self._objections[header.fragment, header.island] = objection
        member = self._sight.state.members.known[header.island]
        seconds = max(0.0, now_s - round.opened_s)
        member = changed(
            member.arrived(header.fragment, seconds),
            lease_until_s=max(member.lease_until_s, now_s + self._sight.lease_s),
        )
        members = self._sight.state.members.with_member(member)
        self._sight.state = changed(self._sight.state, members=members)
        self._sight.put(round.stage(header, now_s))
        self._sight.settle(now_s)
        return True

    def _may_speak(self, header: Header) -> bool:
        document = self._sight.documents.get(header.island)
        if document is None:
            return False
        if header.incarnation == document.beat.incarnation:
            return True
        return any(
            (stand.fragment, stand.round, stand.incarnation)
            == (header.fragment, header.round, header.incarnation)
            for stand in document.stands
        )

    def speaking(self, headers: Iterable[Header]) -> list[Header]:
        """Return the updates of islands' last lives, and what those name."""
        return [header for header in headers if self._may_speak(header)]

    def unstage(self, island: str) -> None:
        """Forget what an earlier life has published, unless its successor names it."""
        for round in self._sight.state.rounds:
            standing = round.staged.get(island)
            if standing is not None and not self._may_speak(standing):
                others = {
                    name: header
                    for name, header in round.staged.items()
                    if name != island
                }
                self._objections.pop((round.fragment, island), None)
                self._sight.put(changed(round, staged=others))

    def standing(self, fragment: int, round: int) -> list[Life]:
        """Return whose updates stand in a round by a document."""
        return [
            Life(slug(name), stand.incarnation)
            for name, document in self._sight.documents.items()
            for stand in document.stands
            if (stand.fragment, stand.round) == (fragment, round)
        ]

    def unread(self, fragment: int) -> list[Life]:
        """Return whose updates stand in the open round by a document, and are not seen.

        A list may be late, or older than the farewell of who left something.
        """
        round = self._sight.state.rounds[fragment]
        standing = self.standing(fragment, round.number)
        staged = {slug(name) for name in round.staged} if standing else set()
        return [
            life
            for life in standing
            if life.slug not in staged and (fragment, life) not in self._hollow
        ]

    def see_nothing(self, fragment: int, lives: Iterable[Life]) -> None:
        """Take note that updates are not there, whoever says that they stand."""
        self._hollow.update((fragment, life) for life in lives)

    def left_out(self, fragment: int, *, within: int) -> list[tuple[str, Stand]]:
        """Return what farewells name in the last closed rounds, listed there or not."""
        number = self._sight.number(fragment)
        return [
            (name, stand)
            for name, document in self._sight.documents.items()
            if document.has_left
            for stand in document.stands
            if stand.fragment == fragment and number - within <= stand.round < number
        ]

    def see_roster(self, document: RosterDocument, now_s: float) -> None:
        """Take note that the open round of a fragment is closed; open the next.

        Raises:
            CorruptError: it is the roster of another round.
        """
        round = self._sight.state.rounds[document.fragment]
        if document.round != round.number:
            raise CorruptError(
                f"The roster of round {document.round} stands where that of round "
                f"{round.number} of fragment {document.fragment} must be. "
                "Restore the bucket from a copy."
            )
        self._sight.heads[document.fragment] = RosterHead(
            round=document.round,
            digest=document.digest,
            is_chained=bool(document.before),
        )
        self._sight.rosters[document.fragment, document.round] = document
        self._sight.rosters.pop(
            (document.fragment, document.round - KEPT_ROSTERS), None
        )
        self._forget(document.fragment)
        counted = self._sight.state.counted.adding(
            document.roster,
            fragment=document.fragment,
            round=document.round,
            num_fragments=len(self._sight.state.rounds),
        )
        self._sight.state = changed(self._sight.state, counted=counted)
        closing = changed(round, phase=Phase.CLOSING, roster=document.roster)
        opened = closing.commit(
            base=UNKNOWN,
            roster=document.roster,
            outer=self._sight.terms(document.fragment).outer,
            candidates=self._sight.candidates(
                document.fragment, round.number + 1, now_s
            ),
            now_s=now_s,
            last_round=self._sight.state.last_round,
        )
        bases = (*round.bases, document.base)[-KNOWN_BASES:]
        self._sight.put(changed(opened, bases=bases, staged={}))
        self._sight.settle(now_s)

    def closing(
        self, fragment: int, island: str, now_s: float
    ) -> tuple[Round, Roster] | None:
        """Return the round that `island` may close now, and its roster.

        Only who has published for it may: so it has taken the round before, knows the
        base, and has nothing to lose by the closing. If the run has a decider, nobody
        else may.
        """
        self._sight.settle(now_s)
        round = self._sight.state.rounds[fragment]
        may_close = (
            island in round.staged
            and self._sight.settings.store.decider in (None, island)
            and round.base != UNKNOWN
            and not self.unread(fragment)
            and not self._sight.state.is_held
        )
        if not may_close:
            return None
        if not round.can_close(self._sight.state.members, self._sight.settings, now_s):
            return None
        return round, self._judged(fragment, roster_of(self._sight.state, round, now_s))

    def ended_by_tokens(self) -> int | None:
        """Return the last round, if `end_tokens` make it earlier than it was."""
        state = self._sight.state
        last = end_by_tokens(state).last_round
        return None if last == state.last_round else last

    def _judged(self, fragment: int, roster: Roster) -> Roster:
        """Return the roster without what the run's terms do not allow."""
        return Roster(
            tuple(
                _objected(entry, self._objections.get((fragment, entry.island)))
                for entry in roster.entries
            )
        )

    def _forget(self, fragment: int) -> None:
        self._hollow = {each for each in self._hollow if each[0] != fragment}
        self._objections = {
            key: value for key, value in self._objections.items() if key[0] != fragment
        }


def _objected(entry: RosterEntry, reason: str | None) -> RosterEntry:
    if reason is None or entry.verdict is not Verdict.COUNTED:
        return entry
    return replace(entry, verdict=Verdict.REFUSED, reason=reason)
