"""The setup of `atoll simulate`: settings, islands and faults, checked together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.errors import UsageError
from atoll.fields import nearest
from atoll.settings import RunSettings
from atoll.simulate.islands import STORE_STEP_S
from atoll.simulate.plan import FaultPlan
from atoll.simulate.run import LIMIT_S, MODEL, STEP_S
from atoll.simulate.storms import COORDINATOR, STORE, random_plan, random_store_plan
from atoll.weights import lay_out

CALM = "none"
"""Value of `--faults` for a plan without faults."""

DEFAULT_ISLANDS, DEFAULT_ROUNDS = 4, 20

_STORM_SHARE = 0.8
"""Share of a run with random faults; the rest shows whether all recover."""

_STREAMING: dict[str, Any] = {
    "sync.sync_every": 12,
    "sync.num_fragments": 2,
    "sync.overlap_steps": 2,
    "wire.up": "e3m0",
    "wire.down": "int8",
    "limits.deadline_max_s": 60.0,
}
"""Settings of a run without a run file."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A simulation that can begin."""

    settings: RunSettings
    islands: tuple[str, ...]
    seed: int
    plan: FaultPlan
    origin: str
    """Description of the source of the faults."""

    store: bool = False
    """Whether a bucket replaces the coordinator."""

    @property
    def rounds(self) -> int:
        rounds = self.settings.run.end_rounds
        assert rounds is not None
        return rounds


def prepare(
    run_file: Path | None,
    values: Mapping[str, Any],
    *,
    islands: int | None,
    rounds: int | None,
    seed: int,
    faults: str | None,
    storm: float | None,
    store: bool = False,
) -> Setup:
    """Return the setup for the arguments of the command line.

    Raises:
        UsageError: a file is unreadable or not valid, or values contradict each other.
    """
    settings = _settings(run_file, values, islands, rounds)
    number = islands or max(DEFAULT_ISLANDS, settings.run.start_islands)
    names = tuple(f"i{index}" for index in range(number))
    _check_islands(settings, number)
    _check_length(settings, store=store)
    _check_model(settings)
    plan, origin = _faults(settings, names, seed, faults, storm, store=store)
    _check_names(plan, names, STORE if store else COORDINATOR)
    return Setup(
        settings=settings,
        islands=names,
        seed=seed,
        plan=plan,
        origin=origin,
        store=store,
    )


def length_s(settings: RunSettings, *, store: bool = False) -> float:
    """Return the virtual time of a run without faults."""
    step_s = STORE_STEP_S if store else STEP_S
    return (settings.run.end_rounds or 0) * settings.sync.sync_every * step_s


def _settings(
    run_file: Path | None,
    values: Mapping[str, Any],
    islands: int | None,
    rounds: int | None,
) -> RunSettings:
    if run_file is None:
        number = islands or DEFAULT_ISLANDS
        few: dict[str, Any] = {
            "run.start_islands": number,
            "run.quorum": max(1, number // 2),
        }
        settings = RunSettings().with_values({**_STREAMING, **few, **values})
    else:
        settings = RunSettings.from_toml(run_file).with_values(values)
    end = rounds or settings.run.end_rounds or DEFAULT_ROUNDS
    return settings.with_values({"run.end_rounds": end})


def _check_islands(settings: RunSettings, islands: int) -> None:
    run = settings.run
    for key, needed in (("start_islands", run.start_islands), ("quorum", run.quorum)):
        if needed > islands:
            raise UsageError(
                f"run.{key}={needed} exceeds --islands {islands}, so that no round "
                f"could close. Simulate at least {needed} islands."
            )
    if run.most_islands < islands:
        raise UsageError(
            f"--islands {islands} exceeds run.max_islands={run.most_islands}. "
            f"Simulate at most {run.most_islands} islands, or set run.max_islands."
        )


def _check_length(settings: RunSettings, *, store: bool) -> None:
    """Refuse a run that may not end within the time limit under faults."""
    needed_s, most_s = length_s(settings, store=store), LIMIT_S / 2
    if needed_s > most_s:
        rounds, sync_every = settings.run.end_rounds, settings.sync.sync_every
        raise UsageError(
            f"{rounds} rounds of {sync_every} inner steps take {needed_s:.0f} s of "
            f"virtual time without faults, and the limit is {most_s:.0f} s. "
            "Choose fewer with --rounds, or shorter ones with --set sync.sync_every=12."
        )


def _check_model(settings: RunSettings) -> None:
    try:
        lay_out(MODEL, settings)
    except UsageError as exc:
        raise UsageError(f"The simulated model cannot be split: {exc}") from exc


def _faults(
    settings: RunSettings,
    names: tuple[str, ...],
    seed: int,
    faults: str | None,
    storm: float | None,
    *,
    store: bool,
) -> tuple[FaultPlan, str]:
    if faults is not None and storm is not None:
        raise UsageError(
            f"--faults {faults} and --storm {storm:g} exclude each other. Give one."
        )
    if faults == CALM:
        return FaultPlan(), "none"
    if faults is not None:
        return FaultPlan.from_toml(faults), f"from {faults}"
    intensity = 1.0 if storm is None else storm
    span_s = _STORM_SHARE * length_s(settings, store=store)
    draw = random_store_plan if store else random_plan
    plan = draw(seed, names, span_s=span_s, intensity=intensity)
    return plan, f"a storm of intensity {intensity:g} from seed {seed}"


def _check_names(plan: FaultPlan, islands: tuple[str, ...], host: str) -> None:
    names = (*islands, host)
    for number, fault in enumerate(plan.faults, 1):
        for name in fault.names:
            if name not in names:
                raise UsageError(
                    f"Fault {number} of the plan, a {fault.kind}, names {name!r}, but "
                    f"the processes are {islands[0]} to {islands[-1]} and {host!r}. "
                    f"Did you mean {nearest(name, names)!r}?"
                )
