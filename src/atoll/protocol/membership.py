"""The members of a run: leases, incarnations, keys and counted progress, as values.

Rule 1: an island's name belongs to the holder of its key. With the key the next
        incarnation is immediate; without it a live name is refused.
Rule 2: a later incarnation fences every earlier one permanently.
Rule 3: an expired lease means that no round waits, not that the island is dead: the
        same incarnation revives it by its next heartbeat.

Weights and the end of a run depend on numbers that islands report about themselves:
progress, weight and incarnation. Every exchange checks these claims with the functions
at the end, before a claim can change a round, a sum or a record. All bounds are
generous: they refuse the impossible, not the unusual.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from atoll.algorithm.pace import Arrivals
from atoll.errors import LeaseLost, NameKnown, UsageError
from atoll.protocol.messages import CountedWork, Heartbeat, HeldRound, JoinRequest
from atoll.protocol.tables import JOINING, changed
from atoll.settings import RunSettings
from atoll.settings.sections import DEFAULT_ISLANDS
from atoll.wire import Header
from atoll.wire.roster import new_name_fault

LEASE_S = 15.0
"""How long an island counts as live without a message."""

HEARTBEAT_S = LEASE_S / 5
"""Several heartbeats may be lost before the lease runs out."""

CLOSED_S = 1.0
"""The rest of a lease after the island's connection was closed."""

EVICTED = "evicted"
"""The reason of a leave that an operator has ordered."""

_NONE_YET = Arrivals()


@dataclass(frozen=True, kw_only=True)
class Member:
    """One island of a run, in its latest incarnation."""

    island: str
    incarnation: int
    slot: int
    key: bytes
    """The digest of the island's key."""

    nonce: bytes
    """Made by the island once per incarnation: a repeated join is recognised by it."""

    lease_until_s: float
    has_left: bool = False
    left_because: str = ""
    step: int = 0
    waits_for: tuple[int, int] | None = None
    """The fragment and round whose outcome its training waits for."""

    holds: tuple[HeldRound, ...] = ()
    returns: bool = False
    """A round waits for its next incarnation, though this one may have died."""

    is_heard: bool = True
    """False after a restart, until the island has reported its holdings."""

    unheard_until_s: float = 0.0
    """Rounds wait for its first report until then at most: one lease from the
    restart, which no join renews."""

    arrivals: Mapping[int, Arrivals] = field(default_factory=dict)
    """Of its updates, by fragment: each fragment has its own time in the period."""

    opened: tuple[int, ...] = ()
    """Rounds that were open when it joined, by fragment, if its document says that:
    they do not wait for it."""

    step_s: float | None = None
    """Its pace, as it last reported it: the seconds of an inner step."""

    def arrived(self, fragment: int, seconds: float) -> Member:
        """Return the member with one more arrival of an update."""
        then = self.arrivals_of(fragment).then(seconds)
        return changed(self, arrivals={**self.arrivals, fragment: then})

    def arrivals_of(self, fragment: int) -> Arrivals:
        return self.arrivals.get(fragment, _NONE_YET)

    def joined_before(self, round: int, fragment: int) -> bool:
        """Return whether it had joined when a round opened, as far as is known."""
        return fragment >= len(self.opened) or self.opened[fragment] < round

    @property
    def is_expected(self) -> bool:
        """Whether it may be dead and is waited for all the same, up to a deadline."""
        return self.returns and not self.has_left

    def is_live(self, now_s: float) -> bool:
        return not self.has_left and now_s <= self.lease_until_s

    def is_unheard(self, now_s: float) -> bool:
        """Return whether rounds wait for its report of holdings, if it is live."""
        return not self.is_heard and now_s <= self.unheard_until_s


@dataclass(frozen=True)
class LiveMembers:
    """The live islands of an interval of time, with sums over all of them.

    A thousand islands send several heartbeats a second together. So these sums are
    updated from message to message, and computed again only when an island joins,
    leaves or falls silent.
    """

    names: frozenset[str]
    from_s: float
    until_s: float
    """The earliest end of a lease or of a wait for a first heartbeat."""

    steps: Mapping[int, int]
    """How many of them have reached which step."""

    unreported: frozenset[str]
    """Live islands that rounds wait for until they report their holdings."""

    @classmethod
    def of(cls, by_name: Mapping[str, Member], now_s: float) -> LiveMembers:
        live = [member for member in by_name.values() if member.is_live(now_s)]
        unreported = [member for member in live if member.is_unheard(now_s)]
        moments = [member.lease_until_s for member in live]
        moments += [member.unheard_until_s for member in unreported]
        return cls(
            names=frozenset([member.island for member in live]),
            from_s=now_s,
            until_s=min(moments, default=now_s),
            steps=Counter([member.step for member in live]),
            unreported=frozenset([member.island for member in unreported]),
        )

    def holds_at(self, now_s: float) -> bool:
        return self.from_s <= now_s <= self.until_s

    def after(self, before: Member, member: Member) -> LiveMembers | None:
        """Return the same after a message of one of them; None: compute it again."""
        stays = member.lease_until_s >= self.until_s and not member.has_left
        if before.island not in self.names or not stays:
            return None
        steps, unreported = self.steps, self.unreported
        if before.step != member.step:
            steps = _moved(steps, before.step, member.step)
        if before.is_heard and not member.is_heard:
            return None
        if member.is_heard and not before.is_heard:
            unreported = unreported - {member.island}
        return changed(self, steps=steps, unreported=unreported)

    @property
    def median_step(self) -> int:
        """The step that half of them have reached, the higher of two; 0 if none."""
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
    _looked: list[LiveMembers] = field(default_factory=list, repr=False, compare=False)
    """Cache of `look`: it is valid until the first lease can have run out."""

    def live(self, now_s: float) -> frozenset[str]:
        """Return the islands that a round waits for."""
        return self.look(now_s).names

    def joined_before(self, round: int, fragment: int, now_s: float) -> frozenset[str]:
        """Return the live islands that had joined when a round opened."""
        return frozenset(
            [
                name
                for name in self.live(now_s)
                if self.known[name].joined_before(round, fragment)
            ]
        )

    def paces_s(self, now_s: float) -> list[float]:
        """Return the known paces of the live islands."""
        paces_s = [self.known[name].step_s for name in self.live(now_s)]
        return [step_s for step_s in paces_s if step_s is not None]

    def look(self, now_s: float) -> LiveMembers:
        """Return the live islands; the same object while none joins or falls silent."""
        for last in self._looked:
            if last.holds_at(now_s):
                return last
        now = LiveMembers.of(self.known, now_s)
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
        """Return the members with an island's next incarnation, by `tables.JOINING`.

        A repeat with the nonce of the present incarnation keeps that incarnation. A
        request with an incarnation resumes one whose record was lost; it reports its
        holdings with the join, so that no round waits for them.

        Raises:
            UsageError: a live island has the name and another key, or the run is full.
            LeaseLost: the incarnation to resume has a successor, or is higher than any
                incarnation can be.
            NameKnown: a new incarnation does not know the one that it would replace.
        """
        island, incarnation = request.island, request.incarnation
        if island is not None and (fault := new_name_fault(island, field="island")):
            raise UsageError(f"{fault}. Choose another name.")
        name = island if island is not None else self._free_name(key, nonce)
        before = self.known.get(name)
        _require_incarnation(name, incarnation, before)
        others, limit = self.live(now_s) - {name}, max_islands
        if limit is None:
            # After a restart, names that are long gone count as live for a lease.
            others, limit = others - self.look(now_s).unreported, default_islands
        is_full = len(others) >= limit
        answer = JOINING[
            "none" if island is None else _standing(before, now_s),
            "the same" if before and before.key == key else "another",
            "the same" if before and before.nonce == nonce else "another",
            _which_life(before, request),
            "no" if is_full else "yes",
        ]
        match answer, before:
            case "same incarnation", Member():
                again = changed(before, lease_until_s=now_s + LEASE_S)
                return self.with_member(again), again
            case "LeaseLost", _:
                raise _fenced(name, incarnation or 0, before)
            case "refused: taken", Member():
                raise UsageError(
                    f"Island {name!r} is live in this run, and this is not its key. "
                    "Give this island another name, or its key, or let that one leave: "
                    "a dead one is gone in "
                    f"{before.lease_until_s - now_s:.0f} s."
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
        """Return the member whose latest incarnation this is.

        Raises:
            LeaseLost: a later incarnation has replaced it, or it has left.
        """
        member = self.require_life(island, incarnation)
        if member.has_left:
            raise _fenced(island, incarnation, member)
        return member

    def require_life(self, island: str, incarnation: int) -> Member:
        """Return the member whose latest incarnation this is, even if it has left.

        Raises:
            LeaseLost: a later incarnation has replaced it, or the name is unknown.
        """
        member = self.known.get(island)
        if member is None or member.incarnation != incarnation:
            raise _fenced(island, incarnation, member)
        return member

    def beat(self, member: Member, beat: Heartbeat, *, now_s: float) -> Members:
        """Return the members with one lease renewed."""
        renewed = changed(
            member,
            lease_until_s=now_s + LEASE_S,
            step=beat.step,
            waits_for=beat.waits_for,
            holds=_latest(member.holds, beat.holds),
            is_heard=True,
            step_s=member.step_s if beat.step_s is None else beat.step_s,
        )
        return self.with_member(renewed)

    def close(self, member: Member, *, now_s: float) -> Members:
        """Return the members with one lease shortened: its connection was closed.

        Not that of an island whose next incarnation rounds wait for anyhow.
        """
        if member.is_expected:
            return self
        until_s = min(member.lease_until_s, now_s + CLOSED_S)
        return self.with_member(changed(member, lease_until_s=until_s))

    def leave(self, member: Member, *, because: str) -> Members:
        left_member = changed(member, has_left=True, left_because=because)
        return self.with_member(left_member)

    def in_place_of(self, forgotten: Member, member: Member) -> Members:
        """Return the members with a new name in the slot of one that is forgotten."""
        others = {
            name: other
            for name, other in self.known.items()
            if name not in (forgotten.island, member.island)
        }
        return Members({**others, member.island: changed(member, slot=forgotten.slot)})

    def with_member(self, member: Member) -> Members:
        before = self.known.get(member.island)
        looked = [
            live
            for live_members in self._looked
            if before and (live := live_members.after(before, member))
        ]
        return Members({**self.known, member.island: member}, looked)

    def _free_slot(self) -> int:
        """Return the lowest free slot; a run that was moved here may have gaps."""
        used_slots = {member.slot for member in self.known.values()}
        return next(
            slot for slot in range(len(used_slots) + 1) if slot not in used_slots
        )

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
    """Return unless an island claims to resume an incarnation that is far ahead.

    The name's next incarnation continues from it, permanently.
    """
    latest = before.incarnation if before else 0
    if incarnation is not None and incarnation > max_incarnation(latest):
        raise LeaseLost(
            f"Island {island!r} claims incarnation {incarnation}, and the run knows "
            f"incarnation {latest}: it takes at most {max_incarnation(latest)}. "
            "Join again as a new incarnation."
        )


def _moved(steps: Mapping[int, int], before: int, after: int) -> Mapping[int, int]:
    """Return the steps after one island has advanced."""
    moved = {**steps, after: steps.get(after, 0) + 1}
    moved[before] -= 1
    if not moved[before]:
        del moved[before]
    return moved


def _latest(
    before: tuple[HeldRound, ...], now: tuple[HeldRound, ...]
) -> tuple[HeldRound, ...]:
    """Return the latest holdings: messages of an island may arrive out of order."""
    if len(before) != len(now):
        return now or before
    if before == now:
        return before  # most messages come between two rounds
    return tuple(
        max(pair, key=lambda held_round: held_round.round)
        for pair in zip(now, before, strict=True)
    )


def _fenced(island: str, incarnation: int, member: Member | None) -> LeaseLost:
    if member and member.incarnation == incarnation and member.has_left:
        return _gone(member)
    latest = f"incarnation {member.incarnation}" if member else "nobody"
    return LeaseLost(
        f"Incarnation {incarnation} of island {island!r} is no member: the run "
        f"knows {latest} by that name. Join again to continue."
    )


def _gone(member: Member) -> LeaseLost:
    if member.left_because == EVICTED:
        return LeaseLost(
            f"Island {member.island!r} was evicted by an operator. The work that "
            "it had published counts; later work is lost. Ask the operator why, then "
            "start it again: it joins as a new incarnation, or under another name."
        )
    return LeaseLost(
        f"Incarnation {member.incarnation} of island {member.island!r} has left the "
        "run. Join again to continue."
    )


def _standing(before: Member | None, now_s: float) -> str:
    if before is None:
        return "unknown"
    if before.has_left:
        return "left"
    return "live" if before.is_live(now_s) else "silent"


def _which_life(before: Member | None, request: JoinRequest) -> str:
    latest = before.incarnation if before else 0
    if request.incarnation is None:
        return "new" if request.after == latest else "new, unaware"
    return "later than known" if request.incarnation > latest else "not later"


SPARE_ROUNDS = 16
WINDOWS_PER_ROUND = 4
"""An island that loses its lease trains some windows again, so its own count of inner
steps may exceed the schedule, but not by more than this factor."""

SPARE_LIVES = 2**20
"""How far beyond the latest known incarnation a returning life may claim to be."""

WINDOWS_AHEAD = 3
"""An island waits at its next send point, and stops at most a window later."""


def progress_fault(
    header: Header, *, counted: CountedWork | None, settings: RunSettings
) -> str:
    """Return why the progress or weight of an update cannot be true, or "".

    `counted` is the last counted update of the same island and fragment.
    """
    progress = header.progress
    most_steps = max_inner_steps(header.round, settings)
    if progress.inner_steps > most_steps:
        return (
            f"progress: inner_steps={progress.inner_steps} exceeds {most_steps}, the "
            f"most that an island can have made by round {header.round}"
        )
    # Tokens are reported before the optimizer step that trains on them.
    most_tokens = (progress.inner_steps + 1) * settings.limits.max_step_tokens
    if progress.tokens > most_tokens:
        return (
            f"progress: tokens={progress.tokens} exceeds {most_tokens}, which is "
            f"limits.max_step_tokens={settings.limits.max_step_tokens} for each of "
            f"{progress.inner_steps} + 1 inner steps"
        )
    return _weight_fault(header, counted, settings)


def _weight_fault(
    header: Header, counted: CountedWork | None, settings: RunSettings
) -> str:
    if settings.outer.weight != "tokens":
        if header.weight != 1:
            return f"weight: {header.weight} is not 1, and outer.weight is 'uniform'"
        return ""
    before = 0
    if counted and counted.incarnation == header.incarnation:
        # A new incarnation joins before an earlier one's last update counts, so its
        # tokens may begin below those of that update.
        before = counted.tokens
    max_weight = max(1, header.progress.tokens - before)
    if header.weight > max_weight:
        return (
            f"weight: {header.weight} exceeds {max_weight}, the tokens since the "
            "island's last counted update"
        )
    return ""


def max_inner_steps(round: int, settings: RunSettings) -> int:
    """Return the most inner steps that one island can have made by `round`."""
    windows = WINDOWS_PER_ROUND * (round + SPARE_ROUNDS)
    return windows * settings.sync.sync_every


def max_schedule_step(rounds: Iterable[int], settings: RunSettings) -> int:
    """Return the schedule step that no island exceeds while `rounds` are open."""
    return (max([1, *rounds]) + WINDOWS_AHEAD) * settings.sync.sync_every


def latest_incarnation(claimed: Iterable[int]) -> int:
    """Return the latest of the incarnations that a store has keys of; 0: none.

    Each one may be at most `SPARE_LIVES` after the one before it. An incarnation
    further ahead was not reached by joins, and is ignored.
    """
    latest = 0
    for incarnation in sorted(claimed):
        if incarnation > max_incarnation(latest):
            break
        latest = incarnation
    return latest


def max_incarnation(latest: int) -> int:
    """Return the highest incarnation that an island may claim after `latest`.

    The owner of a name takes the next incarnation, so a claim must leave room for
    every later incarnation of the name.
    """
    return latest + SPARE_LIVES
