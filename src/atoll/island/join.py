"""From the name of a run to the host of an island, for any framework.

The connection follows a run that moves: the island keeps its key and its nonce, so that
it is the same incarnation at the new address, and the old connection is closed when the
new one is open. Code for coordinators and stores is imported only for such a run.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from atoll.clock import Clock, SystemClock
from atoll.errors import Unreachable, UsageError
from atoll.exchange import MemoryRun
from atoll.exchange.base import Constants, Keeper, KeepingExchange
from atoll.exchange.relocation import FollowingExchange, RunLocation
from atoll.island.base import ParameterView
from atoll.island.entry import Bring
from atoll.island.environment import (
    CredentialPaths,
    island_from_environment,
    run_from_environment,
    surroundings_from_environment,
)
from atoll.island.host import Host
from atoll.island.memory import Memory
from atoll.island.saved_state import SavedIsland
from atoll.island.signals import Interrupted, Termination, use_exit_codes
from atoll.protocol import JoinRequest, ModelSpec
from atoll.settings import RunSettings

if TYPE_CHECKING:
    from atoll.exchange import CollectiveRun
    from atoll.island.connection import CollectiveConnection, CoordinatorConnection
    from atoll.island.store_connection import StoreConnection


_NEVER = 2**31 - 1


class EarlierIncarnation(Protocol):
    """What is known of an island's earlier life. Joining is the only caller."""

    @property
    def saved(self) -> SavedIsland | None:
        """The island of the checkpoint that is gone on from, if there is one."""
        ...

    @property
    def is_exact(self) -> bool:
        """Whether this life's next one will go on to the bit."""
        ...

    def key(self) -> bytes:
        """Return the key of an island that is known by its checkpoints alone."""
        ...


def join_run(
    run: MemoryRun | CollectiveRun | str | None,
    view: ParameterView,
    model: ModelSpec,
    *,
    island: str | None,
    keeping: EarlierIncarnation | None = None,
    memory: Memory | None = None,
    constants: Constants | None = None,
    bundle: str = "",
) -> Host:
    """Join a run, and return the host whose weights `view` has.

    With `keeping` it goes on as the checkpoint says that was restored. `memory` is
    where the weights are, if not in this process alone. `constants` are the model's,
    which a founder brings; without them the run is founded without. `bundle` is the
    digest of what the model was built from, if it was built from a run's.

    SIGTERM meanwhile leaves the run and ends the process, with exit code 0.

    Raises:
        ModelError: the model is not the run's, naming the tensor and both sides.
        UsageError: there is no such run, or the name is taken.
        RemoteError: the run's coordinator does not answer, or refuses.
    """
    if run is None:
        run = run_from_environment()
    if run == "none":
        run = MemoryRun(_alone())
    if isinstance(run, MemoryRun):
        request = _request(model, island, keeping, bundle)
        life = _JoiningIsland(request, keeping, memory, constants)
        return life.host(run, view, SystemClock(), leaving=nullcontext())
    if not run:
        raise UsageError(
            "run='' names no run. Pass a coordinator's address, an object store's URL, "
            "an atoll.exchange.MemoryRun, or 'none' to train alone."
        )
    island = island or island_from_environment()
    # Who has no name of its own has its key where its checkpoints are.
    key = keeping.key() if keeping and island is None else None
    request = _request(model, island, keeping, bundle)
    life = _JoiningIsland(request, keeping, memory, constants, key)
    return _join_elsewhere(run, view, life)


@dataclass(frozen=True)
class _JoiningIsland:
    """The life of an island that is about to join, or to go on."""

    request: JoinRequest
    keeping: EarlierIncarnation | None
    memory: Memory | None
    constants: Constants | None
    key: bytes | None = None

    def host(
        self,
        exchange: KeepingExchange,
        view: ParameterView,
        clock: Clock,
        *,
        leaving: AbstractContextManager[object],
    ) -> Host:
        return Host(
            exchange,
            view,
            self.request,
            clock=clock,
            leaving=leaving,
            saved=self.keeping.saved if self.keeping else None,
            memory=self.memory,
            bring=self._bring_to(exchange),
        )

    def _bring_to(self, keeper: Keeper) -> Bring | None:
        """Return how a founder brings its constants, if it has any."""
        constants, model = self.constants, self.request.model
        if constants is None:
            return None
        return lambda joined: keeper.keep(joined, model, constants)


def is_alone(run: object) -> bool:
    """Return whether nobody else takes part: the weights are this island's own."""
    return run == "none" or (run is None and run_from_environment() == "none")


def _request(
    model: ModelSpec,
    island: str | None,
    keeping: EarlierIncarnation | None,
    bundle: str,
) -> JoinRequest:
    """Return what is asked for: the name of the life that goes on, if there is one."""
    saved = keeping.saved if keeping else None
    name = saved.island if island is None and saved else island
    returns = keeping is not None and keeping.is_exact
    return JoinRequest(model=model, island=name, returns=returns, bundle=bundle)


def _join_elsewhere(
    run: CollectiveRun | str, view: ParameterView, life: _JoiningIsland
) -> Host:
    use_exit_codes()
    with Termination(heed_s=0.0) as termination:
        try:
            host = _enter(run, view, life)
            termination.heed()
        except Interrupted:  # whatever it had joined, it has left
            raise SystemExit(0) from None
    if termination.is_asked:
        host.pause() if life.request.returns else host.leave()
        raise SystemExit(0)
    return host


def _enter(run: CollectiveRun | str, view: ParameterView, life: _JoiningIsland) -> Host:
    clock = SystemClock()
    way = _way_to(run, life, clock)
    try:
        host = life.host(way.exchange, view, clock, leaving=way.leaving())
    except BaseException:
        with way.leaving():  # nothing was begun: only the line is to be closed
            raise
    way.exchange.stats = host.stats
    host.tally.costs = way.costs
    return host


def _way_to(
    run: CollectiveRun | str, life: _JoiningIsland, clock: Clock
) -> RunConnection | CollectiveConnection:
    """Return the way to a run; only who goes together needs what that takes."""
    name, around = life.request.island, surroundings_from_environment()
    if isinstance(run, str):
        return RunConnection(
            run, island=name, surroundings=around, clock=clock, key=life.key
        )
    from atoll.island.connection import CollectiveConnection

    return CollectiveConnection(
        run, island=name, surroundings=around, clock=clock, key=life.key
    )


def _alone() -> RunSettings:
    """Return the settings of a run that never synchronises."""
    return RunSettings.from_dict(
        {"sync": {"sync_every": _NEVER}, "limits": {"max_constants_bytes": 0}}
    )


LEAVE_S = 20.0
"""How long an island that leaves tries to get where its run has gone."""

ARRIVE_S = 0.1
"""How long a coordinator that a run has gone to is asked at a time. It may be served
much later: between two times an island looks whether it leaves, and rests."""


class RunConnection:
    """An exchange that follows its run, and the ways that it takes.

    Raises:
        AtollError: what `connect` and `connect_store` raise.
    """

    def __init__(
        self,
        run: str,
        *,
        island: str | None,
        surroundings: CredentialPaths,
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
        self.exchange = FollowingExchange(
            self._way.exchange, self._open, pause=self._pause
        )

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

    def _open(self, target: str) -> RunLocation:
        self._way.close()
        self._way = self._to(target, wait_s=ARRIVE_S)
        if self._farewells is not None:
            self._farewells.enter_context(self._way.leaving())
        return self._way.exchange

    def _to(
        self, run: str, *, wait_s: float | None
    ) -> CoordinatorConnection | StoreConnection:
        """Return the way to a run; only who goes it needs what that takes."""
        if run.startswith(("http://", "https://")):
            from atoll.island.connection import REACH_S, connect

            return connect(
                run,
                island=self._island,
                surroundings=self._around,
                clock=self._clock,
                wait_s=REACH_S if wait_s is None else wait_s,
                key=self._key,
                nonce=self._nonce,
            )
        from atoll.island.store_connection import connect_store

        return connect_store(
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
