"""The way of an island to its run, wherever that goes.

An island keeps its key and its nonce, so that it is the same life at every place. The
way to the place before is closed when the next one is opened.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from atoll.clock import Clock
from atoll.errors import Unreachable
from atoll.exchange.following import Following, Place
from atoll.island.environment import Surroundings

if TYPE_CHECKING:
    from atoll.island.meeting import Meeting
    from atoll.island.reach import Way

LEAVE_S = 20.0
"""How long an island that leaves tries to get where its run has gone."""

ARRIVE_S = 0.1
"""How long a coordinator that a run has gone to is asked at a time. It may be served
much later: between two times an island looks whether it leaves, and rests."""


class Trail:
    """An exchange that follows its run, and the ways that it takes.

    Raises:
        AtollError: what `reach` and `meet` raise.
    """

    def __init__(
        self,
        run: str,
        *,
        island: str | None,
        surroundings: Surroundings,
        clock: Clock,
        key: bytes | None = None,
    ) -> None:
        self._island, self._around, self._clock = island, surroundings, clock
        # Whoever was given its name by a run has no key of its own on this machine.
        self._key = secrets.token_bytes(32) if island is None and key is None else key
        self._nonce = secrets.token_bytes(16)
        self._farewells: ExitStack | None = None
        self._gives_up = threading.Event()
        self._way = self._to(run, wait_s=None)
        self.exchange = Following(self._way.exchange, self._open, pause=self._pause)

    def costs(self) -> dict[str, float]:
        """Return what was asked on the way, under the names that loggers see."""
        return self._way.costs()

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Bound the time of a farewell, wherever it is said, and close the way."""
        timer = threading.Timer(LEAVE_S, self._gives_up.set)
        timer.daemon = True
        timer.start()
        with ExitStack() as farewells:
            farewells.callback(timer.cancel)
            farewells.enter_context(self._way.leaving())
            self._farewells = farewells
            yield

    def _open(self, target: str) -> Place:
        self._way.close()
        self._way = self._to(target, wait_s=ARRIVE_S)
        if self._farewells is not None:
            self._farewells.enter_context(self._way.leaving())
        return self._way.exchange

    def _to(self, run: str, *, wait_s: float | None) -> Way | Meeting:
        """Return the way to a run; only who goes it needs what that takes."""
        if run.startswith(("http://", "https://")):
            from atoll.island.reach import REACH_S, reach

            return reach(
                run,
                island=self._island,
                surroundings=self._around,
                clock=self._clock,
                wait_s=REACH_S if wait_s is None else wait_s,
                key=self._key,
                nonce=self._nonce,
            )
        from atoll.island.meeting import meet

        return meet(
            run,
            island=self._island,
            surroundings=self._around,
            clock=self._clock,
            key=self._key,
            nonce=self._nonce,
        )

    def _pause(self, seconds: float) -> None:
        if self._gives_up.wait(seconds):
            raise Unreachable(
                "The island could not get where its run has gone in the time that was "
                "left. What was not confirmed may be lost."
            )
