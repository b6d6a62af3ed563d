"""Who takes part in a run that lives in memory."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.errors import LeaseLost, UsageError
from atoll.settings import RunSection
from atoll.wire.text import new_name_fault


@dataclass(frozen=True, kw_only=True)
class Member:
    """One life of one island."""

    island: str
    incarnation: int
    slot: int


class Members:
    """Live islands, and the slots and incarnations of all that ever joined."""

    def __init__(self, settings: RunSection) -> None:
        self._settings = settings
        self._known: dict[str, Member] = {}
        self._live: dict[str, Member] = {}
        self.steps: dict[str, int] = {}
        """The schedule step each live island reported last."""

        self.waits: dict[str, tuple[int, int]] = {}
        """The fragment and round whose outcome an island stands still for."""

    @property
    def live(self) -> frozenset[str]:
        return frozenset(self._live)

    @property
    def has_started(self) -> bool:
        """True from the moment `start_islands` have joined, though some have left."""
        return len(self._known) >= self._settings.start_islands

    def forget(self, island: str) -> None:
        """Take back a name whose island never took part."""
        del self._known[island]

    def add(self, name: str | None, *, step: int) -> Member:
        """Make `name` live at a schedule step; None takes the first free `island-<n>`.

        Raises:
            UsageError: a live island has the name, no frame could carry it, or the
                run is full.
        """
        if name is not None and (fault := new_name_fault(name, what="island")):
            raise UsageError(f"{fault}. Give this island another name.")
        if name in self._live:
            raise UsageError(
                f"Island {name!r} is live in this run already. "
                "Give this island another name, or let that one leave first."
            )
        limit = self._settings.most_islands
        if len(self._live) >= limit:
            raise UsageError(
                f"The run has {len(self._live)} islands, and max_islands={limit}. "
                "Wait for one to leave, or raise run.max_islands in a new run."
            )
        member = self._next_life(name if name is not None else self._free_name())
        self._known[member.island] = self._live[member.island] = member
        self.steps[member.island] = step
        return member

    def remove(self, island: str, incarnation: int) -> bool:
        """Forget a live member; return False when it was not live."""
        member = self._live.get(island)
        if member is None or member.incarnation != incarnation:
            return False
        del self._live[island], self.steps[island]
        self.waits.pop(island, None)
        return True

    def require(self, island: str, incarnation: int) -> None:
        """Return when this life of the island is live.

        Raises:
            LeaseLost: it has left, or a later one has taken its place.
        """
        member = self._live.get(island)
        if member is None or member.incarnation != incarnation:
            raise LeaseLost(
                f"Island {island!r} is not live as incarnation {incarnation}. "
                "Join again to go on."
            )

    def _next_life(self, name: str) -> Member:
        before = self._known.get(name)
        if before is None:
            return Member(island=name, incarnation=1, slot=len(self._known))
        return Member(island=name, incarnation=before.incarnation + 1, slot=before.slot)

    def _free_name(self) -> str:
        number = 0
        while f"island-{number}" in self._known:
            number += 1
        return f"island-{number}"
