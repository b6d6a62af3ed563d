"""The port to what starts islands: the engine that people have already.

Rule 1: an engine starts, tells and ends; it decides nothing about the run.
Rule 2: an order's `id` names what is submitted, so that it can be found by it even if
whoever launched died before the engine's answer came.
Rule 3: errors of an SDK do not cross. `UsageError` is for what cannot be had or done,
`Refused` for who may not, `Unreachable` for when asking again may help. An answer that
makes no sense may be read as if it did: `understanding` makes it `Unreachable`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from atoll.launch.handle import Handle, check_id, check_indexes
from atoll.launch.spec import IslandSpec
from atoll.launch.states import Report
from atoll.security import Secret

GRACE_S = 30.0
"""How long an island has to leave cleanly once it was told to go."""

Keep = Callable[[Handle], None]


@dataclass(frozen=True, kw_only=True)
class Order:
    """What is to be launched: islands of one kind, with the indexes from `first` on."""

    id: str
    spec: IslandSpec
    num_islands: int
    first: int = 0
    values: Mapping[str, Secret] = field(default_factory=dict)
    """Secrets whose values this side knows, by variable: for the engine's way of
    secrets and nothing else. What the engine keeps itself is in `spec.secrets`."""

    is_coordinator: bool = False
    """Whether it is no island that is launched, but what serves them: others of this
    engine must reach it, as `Traits.serving` says."""

    def __post_init__(self) -> None:
        check_id(self.id)
        check_indexes(self.first, self.num_islands)

    @property
    def indexes(self) -> range:
        return range(self.first, self.first + self.num_islands)

    def handle(
        self,
        engine: str,
        reference: Mapping[str, Any],
        *,
        options: Mapping[str, str] | None = None,
        begun_at_s: float = 0.0,
        run: str | None = None,
    ) -> Handle:
        """Return what finds this launch, with the engine's own reference in it.

        `run` is the URL of a coordinator, where the engine gives it one.
        """
        return Handle(
            id=self.id,
            engine=engine,
            run=run or self.spec.run,
            name=self.spec.name,
            num_islands=self.num_islands,
            first=self.first,
            begun_at_s=begun_at_s,
            options=options or {},
            reference=reference,
        )


LISTEN_THERE = "{address of this place}"
"""A word of a command, in whose place comes the address that others reach a process by:
the bootstrap puts it there, unless the engine knows better."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """How a coordinator runs among an engine's islands, where no file of ours is."""

    is_in_sight: bool
    """Whether this machine reaches it, too. Else nothing can be asked of it from here:
    its plan has its URL, and its engine says what became of it."""

    host: str = "0.0.0.0"
    """Where it listens."""

    port: int | None = None
    """None is any that is free: it says itself which."""

    options: Mapping[str, str] = field(default_factory=dict)
    """The engine's words for it, in place of the islands' own."""


@dataclass(frozen=True)
class Traits:
    """What an engine is like."""

    is_elsewhere: bool = True
    """Whether islands see neither this user's files nor this machine's: then code is
    shipped, and a pass is among the secrets of an order."""

    can_cancel_some: bool = True
    """Whether single islands of a launch can be ended."""

    serving: Serving | None = None
    """None if islands that are elsewhere cannot reach each other there."""


@dataclass(frozen=True)
class Plan:
    """What would be submitted: for `--dry-run`, and for whoever wants to see it."""

    data: Any
    """JSON: a manifest, a request, the arguments of a call. No value of a secret."""

    text: str
    """The same as the engine's own tools take it: a script, YAML, JSON."""

    url: str | None = None
    """Where islands would reach a coordinator, if that is known before it runs."""


class Launcher(Protocol):
    """Starts islands on one engine. `atoll.launch` and the command line call it.

    Making one has checked that its SDK is there and its options are right. Any thread
    may call, one at a time. A handle may come from another process, and another day.
    """

    @property
    def traits(self) -> Traits:
        """What this engine is like."""
        ...

    def plan(self, order: Order) -> Plan:
        """Return what `launch` would submit. Nothing is contacted, nothing changes.

        Raises:
            UsageError: the engine cannot do what the spec asks for, by name.
        """
        ...

    def launch(self, order: Order, *, keep: Keep) -> Handle:
        """Submit every island, and return what finds them; they need not run yet.

        `keep` is called with a handle before the first thing is submitted that could
        be left over, and again when the handle has become another. If this raises,
        whoever called cancels by the last handle that was kept.

        Raises:
            UsageError: as `plan`; or something of that id is there already.
            Refused: the engine does not let this user.
            Unreachable: nobody answered; what was kept says what may run.
        """
        ...

    def poll(self, handle: Handle) -> tuple[Report, ...]:
        """Return a report of every island, in the order of indexes.

        An island that the engine does not know any more is LOST, which is no error.

        Raises:
            Unreachable, Refused: the engine was not asked.
        """
        ...

    def logs(self, handle: Handle, index: int, *, after: int = 0) -> list[str]:
        """Return the lines an island has said, all of its lives, oldest first.

        The first `after` are left out: called again with how many are known, it
        follows. What the engine keeps no more is missing; what it never had is [].
        """
        ...

    def cancel(
        self,
        handle: Handle,
        *,
        indexes: Collection[int] | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        """Tell islands to go, all or some; those that stay longer are ended.

        An island is told by SIGTERM, on which it leaves its run cleanly. Returns when
        the engine has heard; `poll` says when they are gone. Safe to repeat, and for
        what is over already, or was never submitted, it changes nothing.

        Raises:
            UsageError: some were named, and this engine can only end all.
        """
        ...
