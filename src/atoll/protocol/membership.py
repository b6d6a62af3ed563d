"""Who takes part: leases, incarnations and keys, as values.

Rule 1: an island's name belongs to who holds its key. With the key the next
        incarnation is immediate; without it a live name is refused.
Rule 2: a later incarnation fences every earlier one, for good.
Rule 3: a lease that ran out means that nobody waits, not that the island is dead: the
        same incarnation revives it by its next heartbeat.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from atoll.algorithm.pace import Arrivals
from atoll.errors import LeaseLost, NameKnown, UsageError
from atoll.protocol.messages import Beat, Holding, JoinRequest
from atoll.protocol.tables import JOINING
from atoll.protocol.values import changed

LEASE_S = 15.0
"""How long nobody doubts an island that says nothing."""

HEARTBEAT_S = LEASE_S / 5
"""Several heartbeats may be lost before the lease runs out."""

CLOSED_S = 1.0
"""What is left of a lease when the island's connection was closed."""

_NONE_YET = Arrivals()


@dataclass(frozen=True, kw_only=True)
class Member:
    """What a run knows of one island, in its latest life."""

    island: str
    incarnation: int
    slot: int
    key: bytes
    """The digest of the island's key."""

    nonce: bytes
    """Made by the island once per life: a repeated joining is the same life."""

    lease_until_s: float
    has_left: bool = False
    step: int = 0
    waits_for: tuple[int, int] | None = None
    """The fragment and round whose outcome its training stands still for."""

    holds: tuple[Holding, ...] = ()
    is_heard: bool = True
    """False after a restart, until the island has said what it holds."""

    arrivals: Mapping[int, Arrivals] = field(default_factory=dict)
    """Of its updates, by fragment: each has a place of its own in the period."""

    def arrived(self, fragment: int, seconds: float) -> Member:
        """Return the member with one more arrival of an update."""
        then = self.arrivals_of(fragment).then(seconds)
        return changed(self, arrivals={**self.arrivals, fragment: then})

    def arrivals_of(self, fragment: int) -> Arrivals:
        return self.arrivals.get(fragment, _NONE_YET)

    def is_live(self, now_s: float) -> bool:
        return not self.has_left and now_s <= self.lease_until_s


@dataclass(frozen=True)
class Members:
    """Every island that ever joined, by name."""

    known: Mapping[str, Member]
    _live_at: dict[float, frozenset[str]] = field(
        default_factory=dict, repr=False, compare=False
    )
    """The last answer of `live`: one event asks many times, at one moment."""

    def live(self, now_s: float) -> frozenset[str]:
        """Return the islands that a round waits for."""
        live = self._live_at.get(now_s)
        if live is None:
            live = frozenset(
                [name for name, member in self.known.items() if member.is_live(now_s)]
            )
            self._live_at.clear()
            self._live_at[now_s] = live
        return live

    def join(
        self,
        request: JoinRequest,
        key: bytes,
        nonce: bytes,
        *,
        now_s: float,
        max_islands: int | None,
        step: int,
    ) -> tuple[Members, Member]:
        """Return the members with an island's next life, as `tables.JOINING` says.

        With the nonce of its present life it is a repeat, and the same life. With an
        incarnation, a life whose record was lost goes on.

        Raises:
            UsageError: a live island has the name and another key, or the run is full.
            LeaseLost: a life that would go on has a successor.
            NameKnown: a new life does not know of the one whose place it would take.
        """
        island, incarnation = request.island, request.incarnation
        name = island if island is not None else self._free_name(key, nonce)
        before = self.known.get(name)
        others = self.live(now_s) - {name}
        is_full = max_islands is not None and len(others) >= max_islands
        answer = JOINING[
            "none" if island is None else _standing(before, now_s),
            "the same" if before and before.key == key else "another",
            "the same" if before and before.nonce == nonce else "another",
            _which_life(before, request),
            "no" if is_full else "yes",
        ]
        match answer, before:
            case "same life", Member():
                again = changed(before, lease_until_s=now_s + LEASE_S)
                return self.with_member(again), again
            case "LeaseLost", _:
                raise _fenced(name, incarnation or 0, before)
            case "refused: taken", Member():
                raise UsageError(
                    f"Island {name!r} is live in this run for another "
                    f"{before.lease_until_s - now_s:.0f} s, and this is not its key. "
                    "Give this island another name, or its key, or wait."
                )
            case "refused: full", _:
                raise UsageError(
                    f"The run has {len(others)} islands, and max_islands={max_islands}."
                    " Wait for one to leave."
                )
            case "NameKnown", Member():
                raise NameKnown(
                    f"The run knows incarnation {before.incarnation} of island "
                    f"{name!r}. Join again, after that one.",
                    incarnation=before.incarnation,
                )
        member = Member(
            island=name,
            incarnation=incarnation or (before.incarnation + 1 if before else 1),
            slot=before.slot if before else len(self.known),
            key=key,
            nonce=nonce,
            lease_until_s=now_s + LEASE_S,
            step=step,
            arrivals=before.arrivals if before else {},
            is_heard=incarnation is None,
        )
        return self.with_member(member), member

    def require(self, island: str, incarnation: int) -> Member:
        """Return the member whose latest life this is.

        Raises:
            LeaseLost: a later life has taken its place, or it has left.
        """
        member = self.known.get(island)
        if member is None or member.incarnation != incarnation or member.has_left:
            raise _fenced(island, incarnation, member)
        return member

    def beat(self, member: Member, beat: Beat, *, now_s: float) -> Members:
        """Return the members with one lease renewed."""
        renewed = changed(
            member,
            lease_until_s=now_s + LEASE_S,
            step=beat.step,
            waits_for=beat.waits_for,
            holds=_latest(member.holds, beat.holds),
            is_heard=True,
        )
        return self.with_member(renewed)

    def close(self, member: Member, *, now_s: float) -> Members:
        """Return the members with one lease shortened: its connection was closed."""
        until_s = min(member.lease_until_s, now_s + CLOSED_S)
        return self.with_member(changed(member, lease_until_s=until_s))

    def leave(self, member: Member) -> Members:
        return self.with_member(changed(member, has_left=True))

    def with_member(self, member: Member) -> Members:
        return Members({**self.known, member.island: member})

    def _free_name(self, key: bytes, nonce: bytes) -> str:
        for member in self.known.values():
            if (member.key, member.nonce) == (key, nonce):
                return member.island
        number = 0
        while f"island-{number}" in self.known:
            number += 1
        return f"island-{number}"


def _latest(
    before: tuple[Holding, ...], now: tuple[Holding, ...]
) -> tuple[Holding, ...]:
    """Return what an island holds: a life never goes back, but its messages may."""
    if len(before) != len(now):
        return now or before
    if before == now:
        return before  # most messages come between two rounds
    return tuple(
        max(pair, key=lambda held: held.round) for pair in zip(now, before, strict=True)
    )


def _fenced(island: str, incarnation: int, known: Member | None) -> LeaseLost:
    latest = f"incarnation {known.incarnation}" if known else "nobody"
    return LeaseLost(
        f"Incarnation {incarnation} of island {island!r} is no member: the run "
        f"knows {latest} by that name. Join again to go on."
    )


def _standing(before: Member | None, now_s: float) -> str:
    if before is None:
        return "unknown"
    if before.has_left:
        return "left"
    return "live" if before.is_live(now_s) else "silent"


def _which_life(before: Member | None, request: JoinRequest) -> str:
    known = before.incarnation if before else 0
    if request.incarnation is None:
        return "new" if request.after == known else "new, unaware"
    return "later than known" if request.incarnation > known else "not later"
