"""Asynchronous runs: an update stands until a roster lists it, and is listed soon.

`StandingUpdates` checks updates that a coordinator stages, `EveryoneListed` those that
islands know as staged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from atoll.protocol.rounds import Round
from atoll.simulate.invariants import claims
from atoll.simulate.storms import COORDINATOR
from atoll.wire import Header, update_digest


class StandingUpdates:
    """Updates that a coordinator has staged, and the rounds that must list them."""

    def __init__(self, report: claims.Report) -> None:
        self._report = report
        self._due: dict[int, dict[bytes, tuple[int, str]]] = {}
        """By fragment and digest: the round that lists it, and its island."""

    def begin(self, rounds: Iterable[Round]) -> None:
        """Start again: a coordinator that has died keeps only departing updates."""
        self._due = {}
        for round in rounds:
            self.look(round, {}, {})

    def look(
        self, round: Round, staged: Mapping[str, Header], ahead: Mapping[str, Header]
    ) -> None:
        """Note the updates of a round that were not among these before."""
        due = self._due.setdefault(round.fragment, {})
        for updates, before, number in (
            (round.staged, staged, round.number),
            (round.ahead, ahead, round.number + 1),
        ):
            for island, header in updates.items():
                if before.get(island) is not header:
                    due[update_digest(header)] = number, island

    def committed(self, commit: claims.CommittedRound) -> None:
        """Check that a roster lists every update that was staged for it."""
        header = commit.header
        assert header.roster is not None
        listed = {entry.digest for entry in header.roster.entries}
        due = self._due.get(header.fragment, {})
        for digest, (number, island) in list(due.items()):
            if number > header.round:
                continue
            del due[digest]
            if digest not in listed:
                self._report(
                    claims.STANDS,
                    COORDINATOR,
                    f"round {header.round} of fragment {header.fragment} does not "
                    f"list an update of {island}, which was staged for round {number}",
                )


@dataclass(frozen=True)
class AcknowledgedUpdate:
    """An update that its island knows as staged."""

    island: str
    fragment: int
    last_round: int
    """The round that lists it at the latest."""


class EveryoneListed:
    """Checks, once nothing fails, that updates are listed and islands send some."""

    def __init__(
        self,
        history: claims.History,
        report: claims.Report,
        *,
        lease_s: float,
        longest_s: float,
    ) -> None:
        self._history, self._report = history, report
        self._lease_s, self._longest_s = lease_s, longest_s
        self._calm_s = float("inf")
        self._waiting: dict[bytes, AcknowledgedUpdate] = {}
        self._listed_s: dict[tuple[str, int], float] = {}
        """When each island was last listed, by fragment."""

    def calm(self, since_s: float) -> None:
        """Note the end of all faults."""
        self._calm_s = since_s + self._lease_s

    def disturbed(self, now_s: float) -> None:
        """Note a join or an end: an island may be listed later than others hoped."""
        self._calm_s = max(self._calm_s, now_s)

    def acknowledged(self, header: Header, now_s: float) -> None:
        """Note that an island knows its update to be staged."""
        if now_s < self._calm_s:
            return
        last = self._history.last.get(header.fragment, 0)
        update = AcknowledgedUpdate(header.island, header.fragment, last + 2)
        self._waiting.setdefault(update_digest(header), update)

    def committed(
        self, commit: claims.CommittedRound, opened_s: float, islands: Collection[str]
    ) -> None:
        """Check a commit; `islands` take part since the round opened."""
        header = commit.header
        assert header.roster is not None
        for entry in header.roster.entries:
            self._waiting.pop(entry.digest, None)
            self._listed_s[entry.island, header.fragment] = commit.at_s
        for digest, update in list(self._waiting.items()):
            if self._history.listing(digest) is not None:
                del self._waiting[digest]
            elif (update.fragment, update.last_round) == (
                header.fragment,
                header.round,
            ):
                self._missed(
                    update.island,
                    f"round {header.round} of fragment {header.fragment} does not "
                    "list an update that it knew as staged two rounds before",
                )
        self._require_recent(header.fragment, commit.at_s, islands)

    def _require_recent(
        self, fragment: int, now_s: float, islands: Collection[str]
    ) -> None:
        """Report an island of which no roster has listed anything for too long."""
        for island in islands:
            listed_s = self._listed_s.setdefault((island, fragment), now_s)
            since_s = max(listed_s, self._calm_s)
            if now_s - since_s > self._longest_s:
                self._missed(
                    island,
                    f"no roster of fragment {fragment} lists it between "
                    f"{listed_s:.3f} s and {now_s:.3f} s, longer than "
                    f"{self._longest_s:.3f} s",
                )

    def _missed(self, island: str, detail: str) -> None:
        self._report(claims.EVERYONE_COUNTS, island, detail)
