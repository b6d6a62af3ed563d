"""A run whose islands share a process group, as a user names it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.clock import Clock, SystemClock
from atoll.errors import UsageError
from atoll.exchange.collective.circle import SILENCE_S, Circle
from atoll.exchange.collective.counted import CountedWorld
from atoll.exchange.collective.exchange import CollectiveExchange
from atoll.exchange.collective.world import World
from atoll.exchange.coordinator import CoordinatorExchange

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class CollectiveRun:
    """A coordinator's run, joined by every rank of a process group as an island each.

    Making it is a collective call: every rank of the group makes one, with the same
    address, and joins with it once. The group may use any backend; the collective makes
    groups of its own over gloo.

    Args:
        url: the coordinator's address.
        group: None is all of torch.distributed's world; a rank of a `MemoryWorld` is
            for islands that are threads.
        silence_s: a rank that says nothing for so long ends the collective.

    Raises:
        UsageError: there is no process group, or the address is no coordinator's.
    """

    def __init__(
        self,
        url: str,
        group: ProcessGroup | World | None = None,
        *,
        silence_s: float = SILENCE_S,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise UsageError(
                f"run={url!r} is no coordinator's address, and a collective needs a "
                "coordinator. Give its URL, or join without a collective."
            )
        self.url = url
        self._world = CountedWorld(_world_of(group))
        self._clock: Clock = SystemClock()
        self._circle = Circle(self._world, clock=self._clock, silence_s=silence_s)
        self._is_joined = False

    def attach(self, inner: CoordinatorExchange) -> CollectiveExchange:
        """Return the exchange of this rank, over its own way to the coordinator.

        Raises:
            UsageError: a rank is one island, and it has joined.
        """
        if self._is_joined:
            raise UsageError(
                "This rank has joined with its CollectiveRun. Make another on all "
                "ranks to join again."
            )
        self._is_joined = True
        return CollectiveExchange(inner, self._circle, self._world, clock=self._clock)

    def fail(self, why: str) -> None:
        """Let no rank wait for this one: it cannot join."""
        self._circle.fail(why)

    def costs(self) -> dict[str, float]:
        """Return what went over the network of the ranks, for loggers."""
        return self._world.costs()


def _world_of(group: ProcessGroup | World | None) -> World:
    if isinstance(group, World):
        return group
    from atoll.exchange.collective.gloo import GlooWorld

    return GlooWorld(group)
