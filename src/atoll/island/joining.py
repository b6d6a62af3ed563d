"""From the name of a run to an island's host, for any framework."""

from __future__ import annotations

from atoll.clock import SystemClock
from atoll.errors import UsageError
from atoll.exchange import MemoryRun
from atoll.island.environment import (
    island_from_environment,
    run_from_environment,
    surroundings_from_environment,
)
from atoll.island.host import Host
from atoll.island.signals import Interrupted, Termination
from atoll.island.trail import Trail
from atoll.island.view import ParameterView
from atoll.protocol import JoinRequest, ModelSpec
from atoll.settings import RunSettings

_NEVER = 2**31 - 1


def join_run(
    run: MemoryRun | str | None,
    view: ParameterView,
    model: ModelSpec,
    *,
    island: str | None,
) -> Host:
    """Join a run, and return the host whose weights `view` has.

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
        request = JoinRequest(model=model, island=island)
        return Host(run, view, request, clock=SystemClock())
    if not run:
        raise UsageError(
            "run='' names no run. Pass a coordinator's address, an object store's URL, "
            "an atoll.exchange.MemoryRun, or 'none' to train alone."
        )
    return _join_elsewhere(run, view, model, island or island_from_environment())


def _join_elsewhere(
    run: str, view: ParameterView, model: ModelSpec, island: str | None
) -> Host:
    with Termination(heed_s=0.0) as termination:
        try:
            host = _enter(run, view, JoinRequest(model=model, island=island))
            termination.heed()
        except Interrupted:  # whatever it had joined, it has left
            raise SystemExit(0) from None
    if termination.is_asked:
        host.leave()
        raise SystemExit(0)
    return host


def _enter(run: str, view: ParameterView, request: JoinRequest) -> Host:
    clock = SystemClock()
    around = surroundings_from_environment()
    way = Trail(run, island=request.island, surroundings=around, clock=clock)
    try:
        host = Host(way.exchange, view, request, clock=clock, leaving=way.leaving())
    except BaseException:
        with way.leaving():  # nothing was begun: only the line is to be closed
            raise
    way.exchange.stats = host.stats
    host.tally.costs = way.costs
    return host


def _alone() -> RunSettings:
    """Return the settings of a run that never synchronises."""
    return RunSettings.from_dict({"sync": {"sync_every": _NEVER}})
