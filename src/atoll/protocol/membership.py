"""Who takes part: leases, incarnations and keys, as values.

Rule 1: an island's name belongs to who holds its key. With the key the next
        incarnation is immediate; without it a live name is refused.
Rule 2: a later incarnation fences every earlier one, for good.
Rule 3: a lease that ran out means that nobody waits, not that the island is dead: the
        same incarnation revives it by its next heartbeat.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from atoll.algorithm.pace import Arrivals
from atoll.errors import LeaseLost, NameKnown, UsageError
from atoll.protocol.messages import Beat, Holding, JoinRequest
from atoll.protocol.plausible import max_incarnation
from atoll.protocol.tables import JOINING
from atoll.protocol.values import changed
from atoll.settings.sections import DEFAULT_ISLANDS
from atoll.wire.text import new_name_fault

LEASE_S = 15.0
"""How long nobody doubts an island that says nothing."""

HEARTBEAT_S = LEASE_S / 5
"""Several heartbeats may be lost before the lease runs out."""

CLOSED_S = 1.0
"""What is left of a lease when the island's connection was closed."""

EVICTED = "evicted"
"""Why an island has left that an operator has sent away."""

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
    left_because: str = ""
    step: int = 0
    waits_for: tuple[int, int] | None = None
    """The fragment and round whose outcome its training stands still for."""

    holds: tuple[Holding, ...] = ()
    returns: bool = False
    """A round waits for its next life, though this one may have died."""

    is_heard: bool = True
    """False after a restart, until the island has said what it holds."""

    unheard_until_s: float = 0.0
    """Unless it is heard before, rounds wait for it until then: one lease from the
    restart, which no joining renews."""

    arrivals: Mapping[int, Arrivals] = field(default_factory=dict)
    """Of its updates, by fragment: each has a place of its own in the period."""

    def arrived(self, fragment: int, seconds: float) -> Member:
        """Return the member with one more arrival of an update."""
        then = self.arrivals_of(fragment).then(seconds)
        return changed(self, arrivals={**self.arrivals, fragment: then})

    def arrivals_of(self, fragment: int) -> Arrivals:
        return self.arrivals.get(fragment, _NONE_YET)

    @property
    def is_expected(self) -> bool:
        """Whether it may be dead and is waited for all the same, up to a deadline."""
        return self.returns and not self.has_left

    def is_live(self, now_s: float) -> bool:
        return not self.has_left and now_s <= self.lease_until_s

    def is_unheard(self, now_s: float) -> bool:
        """Return whether rounds wait for it to say what it holds, if it is live."""
        return not self.is_heard and now_s <= self.unheard_until_s


@dataclass(frozen=True)
class Live:
    """Who is live from one moment to another, and what many ask of them all.

    A thousand islands beat several times a second together. Whatever is asked of all
    after each of their messages is therefore brought forward from message to message,
    and counted anew only when somebody comes, goes or falls silent.
    """

    names: frozenset[str]
    from_s: float
    until_s: float
    """The earliest end of a lease or of a wait for a first heartbeat."""

    steps: Mapping[int, int]
    """How many of them have reached which step."""

    unheard: frozenset[str]
    """Those that rounds wait for because they have not said yet what they hold."""

    @classmethod
    def of(cls, known: Mapping[str, Member], now_s: float) -> Live:
        live = [each for each in known.values() if each.is_live(now_s)]
        unheard = [each for each in live if each.is_unheard(now_s)]
        moments = [each.lease_until_s for each in live]
        moments += [each.unheard_until_s for each in unheard]
        return cls(
            names=frozenset([each.island for each in live]),
            from_s=now_s,
            until_s=min(moments, default=now_s),
            steps=Counter([each.step for each in live]),
            unheard=frozenset([each.island for each in unheard]),
        )

    def holds_at(self, now_s: float) -> bool:
        return self.from_s <= now_s <= self.until_s

    def after(self, before: Member, member: Member) -> Live | None:
        """Return the same after a message of one of them; None: look again."""
        stays = member.lease_until_s >= self.until_s and not member.has_left
        if before.island not in self.names or not stays:
            return None
        steps, unheard = self.steps, self.unheard
        if before.step != member.step:
            steps = _moved(steps, before.step, member.step)
        if before.is_heard and not member.is_heard:
            return None
        if member.is_heard and not before.is_heard:
            unheard = unheard - {member.island}
        return changed(self, steps=steps, unheard=unheard)

    @property
    def median_step(self) -> int:
        """The step that half of them have reached, the higher of two; 0 for nobody."""
        passed = 0
        for step in sorted(self.steps):
            passed += self.steps[step]
            if passed > len(self.names) // 2:
                return step
        return 0


@dataclass(frozen=True)
class Members:
    """Every island that ever joined, by name."""

    known: Mapping[str, Member]
    _looked: list[Live] = field(default_factory=list, repr=False, compare=False)
    """The last answer of `live`: it holds until somebody's lease can have run out."""

    def live(self, now_s: float) -> frozenset[str]:
        """Return the islands that a round waits for."""
        return self.look(now_s).names

    def look(self, now_s: float) -> Live:
        """Return who is live; the same object while nobody comes or falls silent."""
        for last in self._looked:
            if last.holds_at(now_s):
                return last
        now = Live.of(self.known, now_s)
        self._looked[:] = [now]
        return now

    def join(
        self,
        request: JoinRequest,
        key: bytes,
        nonce: bytes,
        *,
        now_s: float,
        max_islands: int | None,
        default_islands: int = DEFAULT_ISLANDS,
        step: int,
    ) -> tuple[Members, Member]:
        """Return the members with an island's next life, as `tables.JOINING` says.

        With the nonce of its present life it is a repeat, and the same life. With an
        incarnation, a life whose record was lost goes on; it says what it holds with
        the joining, so that nobody waits for it to do so.

        Raises:
            UsageError: a live island has the name and another key, or the run is full.
            LeaseLost: a life that would go on has a successor, or claims an incarnation
                that no life can have reached.
            NameKnown: a new life does not know of the one whose place it would take.
        """
        island, incarnation = request.island, request.incarnation
        if island is not None and (fault := new_name_fault(island, what="island")):
            raise UsageError(f"{fault}. Choose another name.")
        name = island if island is not None else self._free_name(key, nonce)
        before = self.known.get(name)
        _require_incarnation(name, incarnation, before)
        others, limit = self.live(now_s) - {name}, max_islands
        if limit is None:
            # After a restart, names that are long gone count as live for a lease.
            others, limit = others - self.look(now_s).unheard, default_islands
        is_full = len(others) >= limit
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
                    f"The run has {len(others)} islands, and max_islands={limit}. "
                    "Wait for one to leave, let an operator evict one, or set "
                    "run.max_islands in a new run."
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
            slot=before.slot if before else self._free_slot(),
            key=key,
            nonce=nonce,
            lease_until_s=now_s + LEASE_S,
            step=step,
            arrivals=before.arrivals if before else {},
            holds=request.holds if incarnation is not None else (),
            returns=request.returns,
        )
        return self.with_member(member), member

    def require(self, island: str, incarnation: int) -> Member:
        """Return the member whose latest life this is.

        Raises:
            LeaseLost: a later life has taken its place, or it has left.
        """
        member = self.require_life(island, incarnation)
        if member.has_left:
            raise _fenced(island, incarnation, member)
        return member

    def require_life(self, island: str, incarnation: int) -> Member:
        """Return the member whose latest life this is, even if it has left.

        Raises:
            LeaseLost: a later life has taken its place, or the name is unknown.
        """
        member = self.known.get(island)
        if member is None or member.incarnation != incarnation:
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
        """Return the members with one lease shortened: its connection was closed.

        Not that of an island whose next life is waited for anyhow.
        """
        if member.is_expected:
            return self
        until_s = min(member.lease_until_s, now_s + CLOSED_S)
        return self.with_member(changed(member, lease_until_s=until_s))

    def leave(self, member: Member, *, because: str) -> Members:
        left = changed(member, has_left=True, left_because=because)
        return self.with_member(left)

    def in_place_of(self, forgotten: Member, member: Member) -> Members:
        """Return the members with a new name in the slot of one that is forgotten."""
        known = {
            name: each
            for name, each in self.known.items()
            if name not in (forgotten.island, member.island)
        }
        return Members({**known, member.island: changed(member, slot=forgotten.slot)})

    def with_member(self, member: Member) -> Members:
        before = self.known.get(member.island)
        looked = [
            live
            for each in self._looked
            if before and (live := each.after(before, member))
        ]
        return Members({**self.known, member.island: member}, looked)

    def _free_slot(self) -> int:
        """Return the lowest slot of nobody's; a run that came here may have gaps."""
        taken = {member.slot for member in self.known.values()}
        return next(slot for slot in range(len(taken) + 1) if slot not in taken)

    def _free_name(self, key: bytes, nonce: bytes) -> str:
        for member in self.known.values():
            if (member.key, member.nonce) == (key, nonce):
                return member.island
        number = 0
        while f"island-{number}" in self.known:
            number += 1
        return f"island-{number}"


def _require_incarnation(
    island: str, incarnation: int | None, before: Member | None
) -> None:
    """Return unless a returning life claims an incarnation that is far ahead.

    The name's next life counts on from it, for good.
    """
    known = before.incarnation if before else 0
    if incarnation is not None and incarnation > max_incarnation(known):
        raise LeaseLost(
            f"Island {island!r} claims incarnation {incarnation}, and the run knows "
            f"incarnation {known}: it takes at most {max_incarnation(known)}. "
            "Join again as a new life."
        )


def _moved(steps: Mapping[int, int], before: int, after: int) -> Mapping[int, int]:
    """Return the steps with one island that has gone on."""
    moved = {**steps, after: steps.get(after, 0) + 1}
    moved[before] -= 1
    if not moved[before]:
        del moved[before]
    return moved


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
    if known and known.incarnation == incarnation and known.has_left:
        return _gone(known)
    latest = f"incarnation {known.incarnation}" if known else "nobody"
    return LeaseLost(
        f"Incarnation {incarnation} of island {island!r} is no member: the run "
        f"knows {latest} by that name. Join again to go on."
    )


def _gone(member: Member) -> LeaseLost:
    if member.left_because == EVICTED:
        return LeaseLost(
            f"Island {member.island!r} was evicted by an operator. What it had "
            "published counts; what it has learnt since is lost. Ask the operator why, "
            "then start it again: it joins as a new life, or under another name."
        )
    return LeaseLost(
        f"Incarnation {member.incarnation} of island {member.island!r} has left the "
        "run. Join again to go on."
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
