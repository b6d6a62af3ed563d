"""The two kinds of actors, as Ray makes them."""

from __future__ import annotations

import threading
import time
from typing import Any

import ray

from atoll.launch.engines.ray.leading import Lead, Leader
from atoll.launch.engines.ray.ledger import Ledger

KEPT_S = 86_400.0
"""How long a ledger is there after its last island."""

LOOK_S = 60.0


def actor_name(launch: str, index: int) -> str:
    """Return the name under which an island's actor is found."""
    return f"{launch}-{index}"


HEAD = "node:__internal_head__"
"""A resource that Ray gives to the head node alone."""


def ledger_class(launch: str) -> Any:
    """Return what makes the ledger of a launch: at the head, and again if it is lost.

    A cluster outlives any other node, and so does what became of its islands.
    """
    return ray.remote(_LedgerActor).options(
        name=launch,
        namespace=ray.get_runtime_context().namespace,
        lifetime="detached",
        num_cpus=0,
        resources={HEAD: 0.0001},
        max_restarts=-1,
        max_task_retries=-1,
    )


def leader_class(launch: str, index: int, **resources: Any) -> Any:
    """Return what makes an island's actor, away from the others if there is room."""
    return ray.remote(_LeaderActor).options(
        name=actor_name(launch, index),
        namespace=ray.get_runtime_context().namespace,
        lifetime="detached",
        scheduling_strategy="SPREAD",
        max_concurrency=4,
        **resources,
    )


class _LedgerActor(Ledger):
    """A ledger that ends by itself, long after its islands.

    Ray takes methods from the class that it is given, so this is one of the classes
    that a framework wants to be another's.
    """

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__(names)
        self._name = ray.get_runtime_context().get_actor_name() or ""
        threading.Thread(target=self._end_later, daemon=True).start()

    def _end_later(self) -> None:
        over_since_s: float | None = None
        while over_since_s is None or time.monotonic() - over_since_s < KEPT_S:
            time.sleep(LOOK_S)
            if not self.is_over():
                over_since_s = None
            elif over_since_s is None:
                over_since_s = time.monotonic()
        ray.get_actor(self._name).leave.remote()

    def leave(self) -> None:
        """End for good: nobody is started in its place."""
        ray.actor.exit_actor()  # type: ignore[no-untyped-call]  # Ray's own


class _LeaderActor:
    """An island's leader, from its first breath: a new life is not told to begin."""

    def __init__(self, lead: Lead, ledger: Any, name: str) -> None:
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        lead = lead.at(address)
        self._leader, self._name = Leader(lead, ledger), name
        threading.Thread(target=self._lead, daemon=True).start()

    def _lead(self) -> None:
        is_again = ray.get_runtime_context().was_current_actor_reconstructed
        self._leader.lead(ray.get, is_again=is_again)
        ray.get_actor(self._name).leave.remote()

    def go(self, grace_s: float) -> None:
        """Let the island go."""
        self._leader.go(grace_s)

    def leave(self) -> None:
        """Give the place back: nobody is started here again."""
        ray.actor.exit_actor()  # type: ignore[no-untyped-call]  # Ray's own
