"""The way of an island to its run that it goes together with other ranks."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from atoll.clock import Clock
from atoll.errors import AtollError
from atoll.exchange.collective import CollectiveRun
from atoll.island.environment import Surroundings
from atoll.island.reach import reach


class Together:
    """A collective's exchange, and this rank's own line to the coordinator.

    Raises:
        AtollError: what `reach` raises. The other ranks are told, and raise too.
    """

    def __init__(
        self,
        run: CollectiveRun,
        *,
        island: str | None,
        surroundings: Surroundings,
        clock: Clock,
        key: bytes | None = None,
    ) -> None:
        self._run = run
        if key is None and island is None:
            # Whoever is named by the run has no key of its own on this machine.
            key = secrets.token_bytes(32)
        try:
            self._way = reach(
                run.url,
                island=island,
                surroundings=surroundings,
                clock=clock,
                key=key,
            )
        except AtollError as exc:
            run.fail(f"A rank of the collective cannot reach the run: {exc}")
            raise
        self.exchange = run.attach(self._way.exchange)

    def costs(self) -> dict[str, float]:
        """Return what went between the ranks, under the names that loggers see."""
        return self._run.costs()

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Bound the time of a farewell, and close the line after it."""
        with self._way.leaving():
            yield
