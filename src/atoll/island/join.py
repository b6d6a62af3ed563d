"""From the name of a run to the host of an island, for any framework.

The connection follows a run that moves: the island keeps its key and its nonce, so that
it is the same incarnation at the new address, and the old connection is closed when the
new one is open. Code for coordinators and stores is imported only for such a run.

`FollowingExchange` follows a run to another address.
Rule 1: a call that is answered with `RunMoved` is repeated at the new address. Rounds,
        bases and digests there are the same.
Rule 2: the island joins as at a coordinator that restarted, as the same incarnation.
        Updates that were not confirmed at the old address are published again before
        any other call.
Rule 3: an island that cannot reach the new address keeps its work, reports the reason,
        and retries: only an incarnation that has a successor there ends.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from atoll import protocol
from atoll.data import Ask, Claim, DataSpec
from atoll.errors import (
    AtollError,
    LeaseLost,
    Refused,
    RunMoved,
    Unreachable,
    UsageError,
)
from atoll.exchange import Frame, MemoryRun, Outcome
from atoll.exchange.base import Constants, ConstantsUploader, Dealer, FoundingExchange
from atoll.island import environment
from atoll.island.base import IslandMemory, ParameterView
from atoll.island.entry import PublishConstants
from atoll.island.host import Host
from atoll.island.saved_state import SavedIsland
from atoll.island.signals import Interrupted, Termination, use_exit_codes
from atoll.retry import LEAVE_S, NEW_LOCATION, NOT_UP_S
from atoll.runtime import Clock, SystemClock
from atoll.settings import RunSettings
from atoll.settings.reference import summary
from atoll.wire import FrameKind

if TYPE_CHECKING:
    from atoll.exchange import CollectiveRun
    from atoll.island.connection import CollectiveConnection, CoordinatorConnection
    from atoll.island.store_connection import StoreConnection

T = TypeVar("T")
log = logging.getLogger("atoll")

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
    model: protocol.ModelSpec,
    *,
    island: str | None,
    checkpointing: EarlierIncarnation | None = None,
    memory: IslandMemory | None = None,
    constants: Constants | None = None,
    bundle: str = "",
) -> Host:
    """Join a run, and return the host for the live weights `view`.

    With `checkpointing` the island resumes the checkpoint that was restored. `memory`
    holds the weights if several processes do. `constants` are those of the model,
    which a founder publishes if given. `bundle` is the digest of the run's bundle that
    the model was built from, if any.

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
        request = _request(model, island, checkpointing, bundle)
        joining = _JoiningIsland(request, checkpointing, memory, constants)
        return joining.host(run, view, leaving=ExitStack())
    if not run:
        raise UsageError(
            "run='' names no run. Pass a coordinator's address, an object store's URL, "
            "an atoll.exchange.MemoryRun, or 'none' to train alone."
        )
    island = island or environment.island_from_environment()
    # The key of an island without a name is beside its checkpoints.
    key = checkpointing.key() if checkpointing and island is None else None
    request = _request(model, island, checkpointing, bundle)
    joining = _JoiningIsland(request, checkpointing, memory, constants, key)
    return _join_remote(run, view, joining)


@dataclass(frozen=True)
class _JoiningIsland:
    """The parts of an island that is about to join or to resume."""

    request: protocol.JoinRequest
    checkpointing: EarlierIncarnation | None
    memory: IslandMemory | None
    constants: Constants | None
    key: bytes | None = None

    def host(
        self,
        exchange: FoundingExchange,
        view: ParameterView,
        *,
        leaving: AbstractContextManager[object],
    ) -> Host:
        return Host(
            exchange,
            view,
            self.request,
            leaving=leaving,
            saved=self.checkpointing.saved if self.checkpointing else None,
            memory=self.memory,
            publish_constants=self._publisher_for(exchange),
        )

    def _publisher_for(self, keeper: ConstantsUploader) -> PublishConstants | None:
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
    model: protocol.ModelSpec,
    island: str | None,
    checkpointing: EarlierIncarnation | None,
    bundle: str,
) -> protocol.JoinRequest:
    """Return the join request, with the island's name of the checkpoint if any."""
    saved = checkpointing.saved if checkpointing else None
    name = saved.island if island is None and saved else island
    returns = checkpointing is not None and checkpointing.is_exact
    return protocol.JoinRequest(
        model=model, island=name, returns=returns, bundle=bundle
    )


def _join_remote(
    run: CollectiveRun | str, view: ParameterView, joining: _JoiningIsland
) -> Host:
    use_exit_codes()
    with Termination(grace_s=0.0) as termination:
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
        host = joining.host(connection.exchange, view, leaving=connection.leaving())
    except BaseException:
        with connection.leaving():  # not joined: only the connection is closed
            raise
    log.info(
        "island %s has joined %s, epoch %d: %s",
        host.joined.island,
        host.joined.run,
        host.joined.epoch,
        summary(host.joined.settings),
    )
    connection.exchange.stats = host.stats
    host.counters.costs = connection.costs
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
            from atoll.island.connection import connect

            return connect(
                run,
                island=self._island,
                paths=self._paths,
                clock=self._clock,
                wait_s=NOT_UP_S if wait_s is None else wait_s,
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


class RunLocation(FoundingExchange, Protocol):
    """An exchange with a run at one address, as one island uses it."""

    stats: Callable[[], protocol.Stats] | None
    moved: Callable[[RunMoved], None] | None
    """Called in the background when a heartbeat learns that the run has moved."""

    @property
    def unconfirmed(self) -> Mapping[tuple[int, int], Frame]:
        """The island's updates without an outcome, by fragment and round."""
        ...


Open = Callable[[str], RunLocation]
"""Opens an exchange with the run at a URL, and closes the one opened before."""


class FollowingExchange:
    """An `Exchange` for one incarnation of one island, at any address of its run."""

    def __init__(
        self, location: RunLocation, open: Open, *, pause: Callable[[float], None]
    ) -> None:
        self._open, self._pause = open, pause
        self._lock = threading.Lock()
        self._stats: Callable[[], protocol.Stats] | None = None
        self._request: protocol.JoinRequest | None = None
        self._beat: protocol.Heartbeat | None = None
        self._unconfirmed: tuple[Frame, ...] = ()
        """Those of the exchange before, until all are published at the new address."""

        self._last_warning = ""
        self._location: RunLocation | str = self._watched(location)
        """The exchange with the run; or the run's URL, until one is open."""

    @property
    def stats(self) -> Callable[[], protocol.Stats] | None:
        """Returns the island's statistics; called for each heartbeat that is sent."""
        return self._stats

    @stats.setter
    def stats(self, stats: Callable[[], protocol.Stats] | None) -> None:
        self._stats, location = stats, self._location
        if not isinstance(location, str):
            location.stats = stats

    def join(self, request: protocol.JoinRequest) -> protocol.JoinReply:
        reply = self._call(lambda location: location.join(request))
        self._request = replace(
            request, island=reply.island, incarnation=reply.incarnation, after=0
        )
        return reply

    def heartbeat(
        self, beat: protocol.Heartbeat, *, at_once: bool = False
    ) -> protocol.Position:
        self._beat = beat
        return self._call(lambda location: location.heartbeat(beat, at_once=at_once))

    def keep(
        self,
        joined: protocol.JoinReply,
        model: protocol.ModelSpec,
        constants: Constants,
    ) -> None:
        """Have the run keep the founder's constants. Implements `ConstantsUploader`."""
        self._call(lambda location: location.keep(joined, model, constants))

    def publish(self, frame: Frame) -> protocol.Reception:
        return self._call(lambda location: self._publish(location, frame))

    def _publish(self, location: RunLocation, frame: Frame) -> protocol.Reception:
        """Publish a frame; raise if another thread has followed the run meanwhile.

        That thread may have read the unconfirmed updates before this one was among
        them: `_call` publishes it at the new address.
        """
        reception = location.publish(frame)
        is_update = frame.header.kind not in (FrameKind.STATE, FrameKind.AGREED)
        with self._lock:
            if is_update and location is not self._location:
                raise Unreachable("The run has moved while the update was published.")
        return reception

    def outcome(
        self, fragment: int, round: int, *, wait_s: float, has_body: bool = True
    ) -> Outcome | None:
        return self._call(
            lambda location: location.outcome(
                fragment, round, wait_s=wait_s, has_body=has_body
            )
        )

    def state(self, fragment: int) -> Frame:
        return self._call(lambda location: location.state(fragment))

    def open_data(self, island: str, incarnation: int, data: DataSpec) -> DataSpec:
        """Describe the data to the run. Implements `Dealer`."""
        return self._call(
            lambda location: cast(Dealer, location).open_data(island, incarnation, data)
        )

    def claim(self, ask: Ask) -> Claim:
        return self._call(lambda location: cast(Dealer, location).claim(ask))

    def leave(self, island: str, incarnation: int) -> None:
        self._call(lambda location: location.leave(island, incarnation))

    def _call(self, act: Callable[[RunLocation], T]) -> T:
        while True:
            location = self._location
            if isinstance(location, str):
                self._follow(location, location)
                continue
            try:
                return act(location)
            except RunMoved as exc:
                self._follow(location, exc.target)
            except Exception:
                # Another thread may have followed the run and closed the exchange of
                # this call, which then fails somehow: repeat it at the new address.
                with self._lock:
                    if location is self._location:
                        raise

    def _watched(self, location: RunLocation) -> RunLocation:
        """Return an exchange whose heartbeats make this island follow the run."""
        location.stats = self._stats
        location.moved = lambda exc: self._follow_quietly(location, exc.target)
        return location

    def _follow_quietly(self, location: RunLocation, target: str) -> None:
        with suppress(AtollError):  # the next call meets the same error, and raises it
            self._follow(location, target)

    def _follow(self, location: RunLocation | str, target: str) -> None:
        """Open an exchange at `target`, unless another thread has done it since.

        If that fails, only the URL is kept and the next call tries again: the exchange
        before is closed and cannot be used.
        """
        with self._lock:
            if location is not self._location:
                return
            if not isinstance(location, str):
                log.warning("the run has moved to %s: this island follows", target)
                self._unconfirmed = tuple(location.unconfirmed.values())
            self._location = target
            self._location = self._arrive(target)

    def _arrive(self, target: str) -> RunLocation:
        for pause_s in NEW_LOCATION.pauses_s():
            try:
                return self._enter(target)
            except RunMoved as exc:
                target = exc.target
                self._warn(f"the run has moved again, to {target}: this island follows")
            except LeaseLost:
                raise
            except AtollError as exc:
                self._warn(f"the run is at {target}, and this island waits: {exc}")
            self._pause(pause_s)
        raise AssertionError("the attempts have no limit")

    def _enter(self, target: str) -> RunLocation:
        """Return the new exchange, joined by the same incarnation."""
        location = self._watched(self._open(target))
        if self._request is None:
            return location
        location.join(self._request)
        if self._beat is not None:
            location.heartbeat(self._beat)
        for frame in self._unconfirmed:
            try:
                location.publish(frame)
            except Refused as exc:  # only the outcome decides which updates count
                log.warning("an update was refused after the move: %s", exc)
        return location

    def _warn(self, message: str) -> None:
        if message != self._last_warning:
            self._last_warning = message
            log.warning("%s", message)
