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
from atoll.island import environment
from atoll.island.base import ParameterView
from atoll.island.entry import PublishConstants
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
    """The checkpoint of an island's earlier incarnation. Only `join_run` calls it."""

    @property
    def saved(self) -> SavedIsland | None:
        """The island of the checkpoint to resume, if there is one."""
        ...

    @property
    def is_exact(self) -> bool:
        """Whether the next incarnation can resume this one bitwise."""
        ...

    def key(self) -> bytes:
        """Return the key of an island that only its checkpoints identify."""
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
    """Join a run, and return the host for the live weights `view`.

    With `keeping` the island resumes the checkpoint that was restored. `memory` holds
    the weights if several processes do. `constants` are those of the model, which a
    founder publishes if given. `bundle` is the digest of the run's bundle that the
    model was built from, if any.

    SIGTERM meanwhile leaves the run and ends the process, with exit code 0.

    Raises:
        ModelError: the model is not the run's, naming the tensor and both sides.
        UsageError: there is no such run, or the name is taken.
        RemoteError: the run's coordinator does not answer, or refuses.
    """
    if run is None:
        run = environment.run_from_environment()
    if run == "none":
        run = MemoryRun(_alone())
    if isinstance(run, MemoryRun):
        request = _request(model, island, keeping, bundle)
        joining = _JoiningIsland(request, keeping, memory, constants)
        return joining.host(run, view, SystemClock(), leaving=nullcontext())
    if not run:
        raise UsageError(
            "run='' names no run. Pass a coordinator's address, an object store's URL, "
            "an atoll.exchange.MemoryRun, or 'none' to train alone."
        )
    island = island or environment.island_from_environment()
    # The key of an island without a name is beside its checkpoints.
    key = keeping.key() if keeping and island is None else None
    request = _request(model, island, keeping, bundle)
    joining = _JoiningIsland(request, keeping, memory, constants, key)
    return _join_remote(run, view, joining)


@dataclass(frozen=True)
class _JoiningIsland:
    """The parts of an island that is about to join or to resume."""

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
            publish_constants=self._publisher_for(exchange),
        )

    def _publisher_for(self, keeper: Keeper) -> PublishConstants | None:
        """Return the function by which a founder publishes its constants, if any."""
        constants, model = self.constants, self.request.model
        if constants is None:
            return None
        return lambda joined: keeper.keep(joined, model, constants)


def is_alone(run: object) -> bool:
    """Return whether the island trains without a run."""
    return run == "none" or (
        run is None and environment.run_from_environment() == "none"
    )


def _request(
    model: ModelSpec,
    island: str | None,
    keeping: EarlierIncarnation | None,
    bundle: str,
) -> JoinRequest:
    """Return the join request, with the island's name of the checkpoint if any."""
    saved = keeping.saved if keeping else None
    name = saved.island if island is None and saved else island
    returns = keeping is not None and keeping.is_exact
    return JoinRequest(model=model, island=name, returns=returns, bundle=bundle)


def _join_remote(
    run: CollectiveRun | str, view: ParameterView, joining: _JoiningIsland
) -> Host:
    use_exit_codes()
    with Termination(heed_s=0.0) as termination:
        try:
            host = _enter(run, view, joining)
            termination.heed()
        except Interrupted:  # `enter` has left the run, if it had joined
            raise SystemExit(0) from None
    if termination.is_asked:
        host.pause() if joining.request.returns else host.leave()
        raise SystemExit(0)
    return host


def _enter(
    run: CollectiveRun | str, view: ParameterView, joining: _JoiningIsland
) -> Host:
    clock = SystemClock()
    connection = _connect(run, joining, clock)
    try:
        host = joining.host(
            connection.exchange, view, clock, leaving=connection.leaving()
        )
    except BaseException:
        with connection.leaving():  # not joined: only the connection is closed
            raise
    connection.exchange.stats = host.stats
    host.tally.costs = connection.costs
    return host


def _connect(
    run: CollectiveRun | str, joining: _JoiningIsland, clock: Clock
) -> RunConnection | CollectiveConnection:
    """Return a connection to a run. Collectives are imported only for one."""
    name, paths = joining.request.island, environment.credentials_from_environment()
    if isinstance(run, str):
        return RunConnection(
            run, island=name, paths=paths, clock=clock, key=joining.key
        )
    from atoll.island.connection import CollectiveConnection

    return CollectiveConnection(
        run, island=name, paths=paths, clock=clock, key=joining.key
    )


def _alone() -> RunSettings:
    """Return the settings of a run that never synchronises."""
    return RunSettings.from_dict(
        {"sync": {"sync_every": _NEVER}, "limits": {"max_constants_bytes": 0}}
    )


LEAVE_S = 20.0
"""How long an island that leaves tries to reach the new address of its run."""

ARRIVE_S = 0.1
"""Timeout of one attempt to reach the new coordinator of a run that has moved. It may
start much later: between attempts the island pauses, and checks whether it leaves."""


class RunConnection:
    """An exchange that follows its run when it moves, and its current connection.

    Raises:
        AtollError: the errors of `connect` and `connect_store`.
    """

    def __init__(
        self,
        run: str,
        *,
        island: str | None,
        paths: environment.CredentialPaths,
        clock: Clock,
        key: bytes | None = None,
    ) -> None:
        self._island, self._paths, self._clock = island, paths, clock
        # An island that is named by the run has no key on this machine.
        self._key = secrets.token_bytes(32) if island is None and key is None else key
        self._nonce = secrets.token_bytes(16)
        self._open_connections: ExitStack | None = None
        self._gives_up = threading.Event()
        self._connection = self._connect(run, wait_s=None)
        self.exchange = FollowingExchange(
            self._connection.exchange, self._open, pause=self._pause
        )

    def costs(self) -> dict[str, float]:
        """Return the costs of the connection, under the names that loggers see."""
        return self._connection.costs()

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Bound the time that leaving takes, at any address, and close after it."""
        timer = threading.Timer(LEAVE_S, self._gives_up.set)
        timer.daemon = True
        timer.start()
        with ExitStack() as open_connections:
            open_connections.callback(timer.cancel)
            open_connections.enter_context(self._connection.leaving())
            self._open_connections = open_connections
            yield

    def _open(self, target: str) -> RunLocation:
        self._connection.close()
        self._connection = self._connect(target, wait_s=ARRIVE_S)
        if self._open_connections is not None:
            self._open_connections.enter_context(self._connection.leaving())
        return self._connection.exchange

    def _connect(
        self, run: str, *, wait_s: float | None
    ) -> CoordinatorConnection | StoreConnection:
        """Return a connection to a run. Its code is imported only for its kind."""
        if run.startswith(("http://", "https://")):
            from atoll.island.connection import REACH_S, connect

            return connect(
                run,
                island=self._island,
                paths=self._paths,
                clock=self._clock,
                wait_s=REACH_S if wait_s is None else wait_s,
                key=self._key,
                nonce=self._nonce,
            )
        from atoll.island.store_connection import connect_store

        return connect_store(
            run,
            island=self._island,
            paths=self._paths,
            clock=self._clock,
            key=self._key,
            nonce=self._nonce,
        )

    def _pause(self, seconds: float) -> None:
        if self._gives_up.wait(seconds):
            raise Unreachable(
                "The island could not reach the new address of its run before it had "
                "to leave. Updates that were not confirmed may be lost."
            )
