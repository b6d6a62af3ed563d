"""From the name of a run to an island's host, for any framework."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from atoll.clock import Clock, SystemClock
from atoll.errors import UsageError
from atoll.exchange import Constants, Keeper, MemoryRun
from atoll.exchange.constants import KeepingExchange
from atoll.island.entry import Bring
from atoll.island.environment import (
    island_from_environment,
    run_from_environment,
    surroundings_from_environment,
)
from atoll.island.host import Host
from atoll.island.memory import Memory
from atoll.island.saved import SavedIsland
from atoll.island.signals import Interrupted, Termination, use_exit_codes
from atoll.island.trail import Trail
from atoll.island.view import ParameterView
from atoll.protocol import JoinRequest, ModelSpec
from atoll.settings import RunSettings

if TYPE_CHECKING:
    from atoll.exchange.collective import CollectiveRun
    from atoll.island.together import Together

_NEVER = 2**31 - 1


class Past(Protocol):
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
    keeping: Past | None = None,
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
        life = _Life(request, keeping, memory, constants)
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
    life = _Life(request, keeping, memory, constants, key)
    return _join_elsewhere(run, view, life)


@dataclass(frozen=True)
class _Life:
    """The life of an island that is about to join, or to go on."""

    request: JoinRequest
    keeping: Past | None
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
    model: ModelSpec, island: str | None, keeping: Past | None, bundle: str
) -> JoinRequest:
    """Return what is asked for: the name of the life that goes on, if there is one."""
    saved = keeping.saved if keeping else None
    name = saved.island if island is None and saved else island
    returns = keeping is not None and keeping.is_exact
    return JoinRequest(model=model, island=name, returns=returns, bundle=bundle)


def _join_elsewhere(run: CollectiveRun | str, view: ParameterView, life: _Life) -> Host:
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


def _enter(run: CollectiveRun | str, view: ParameterView, life: _Life) -> Host:
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


def _way_to(run: CollectiveRun | str, life: _Life, clock: Clock) -> Trail | Together:
    """Return the way to a run; only who goes together needs what that takes."""
    name, around = life.request.island, surroundings_from_environment()
    if isinstance(run, str):
        return Trail(run, island=name, surroundings=around, clock=clock, key=life.key)
    from atoll.island.together import Together

    return Together(run, island=name, surroundings=around, clock=clock, key=life.key)


def _alone() -> RunSettings:
    """Return the settings of a run that never synchronises."""
    return RunSettings.from_dict(
        {"sync": {"sync_every": _NEVER}, "limits": {"max_constants_bytes": 0}}
    )
