"""Trials: whole runs, each under settings and faults drawn from its seed.

    python -m atoll.simulate.trials --storms 10000 --first 0

runs many of them in several processes, reduces the plans that fail and prints them as
tests. It exits with 1 when an invariant did not hold in one of them. With --store a
bucket replaces the coordinator.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pprint import pformat
from typing import Any

from atoll.settings import RunSettings
from atoll.simulate.islands import (
    STEP_S,
    STORE_STEP_S,
    Conditions,
    PlannedDeparture,
)
from atoll.simulate.plan import FaultPlan
from atoll.simulate.run import Simulated, simulate, without_warnings
from atoll.simulate.storms import (
    COORDINATOR,
    STORE,
    as_test,
    random_plan,
    random_store_plan,
    shrink,
)

ISLANDS = 5
ROUNDS, ASYNC_ROUNDS = 20, 40
STORE_ROUNDS, ASYNC_STORE_ROUNDS = 15, 30
SHORT_DEADLINE_S = 10.0
MAX_PACE, MEAN_PACE = 6.0, 3.0
"""How many times longer the slowest islands take for an inner step, and others."""

_IMPORTS = """import pytest

from atoll import RunSettings
from atoll.simulate import FaultPlan
from atoll.simulate.run import Conditions, PlannedDeparture, simulate
"""
NAMES = tuple(f"i{number}" for number in range(ISLANDS))


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The complete input of a run in virtual time."""

    seed: int
    settings: Mapping[str, Any]
    """As in a run file."""

    departures: Mapping[str, PlannedDeparture]
    plan: FaultPlan
    conditions: Conditions = field(default_factory=Conditions)
    store: bool = False
    """Whether a bucket replaces the coordinator."""

    def run(self) -> Simulated:
        """Return the result; equal trials give equal runs."""
        with without_warnings():
            return simulate(
                RunSettings.from_dict(self.settings),
                islands=ISLANDS,
                faults=self.plan,
                seed=self.seed,
                departures=self.departures,
                conditions=self.conditions,
                store=self.store,
            )

    def shrunk(self, *, max_runs: int = 200) -> Trial:
        """Return the smallest trial found in which the same invariant fails."""
        failed = _names(self.run())

        def fails(plan: FaultPlan) -> bool:
            return bool(failed & _names(replace(self, plan=plan).run()))

        return replace(self, plan=shrink(self.plan, fails, max_runs=max_runs))

    def as_test(self) -> str:
        """Return a test, ready to paste, that runs this trial."""
        arguments: dict[str, object] = {
            "settings": "RunSettings.from_dict(SETTINGS)",
            "islands": ISLANDS,
            "departures": "DEPARTURES",
        }
        conditions = self.conditions
        rows = ""
        if conditions.rows:
            rows = (
                f", rows={conditions.rows}, batch={conditions.batch}, "
                f"evicted_after_s={conditions.evicted_after_s}"
            )
        arguments["conditions"] = (
            f"Conditions(step_s={conditions.step_s}, paces={dict(conditions.paces)}, "
            f"spike_every={conditions.spike_every}{rows})"
        )
        if self.store:
            arguments["store"] = True
        test = as_test(self.plan, seed=self.seed, arguments=arguments)
        body = test[test.index("def ") :]
        settings = pformat(dict(self.settings), sort_dicts=False)
        return (
            f"{_IMPORTS}\nSETTINGS = {settings}\n"
            f"DEPARTURES = {dict(self.departures)!r}\n\n\n"
            f'@pytest.mark.filterwarnings("ignore::atoll.errors.AtollWarning")\n{body}'
        )


def trial(seed: int) -> Trial:
    """Return the trial of a seed: five islands and twenty rounds in a storm."""
    rng = random.Random(f"storm {seed}")
    modes = random.Random(f"modes of storm {seed}")
    is_async = modes.random() < 1 / 3
    settings = _settings(rng)
    length_s = ROUNDS * settings["sync"]["sync_every"] * STEP_S
    if is_async:
        length_s *= MEAN_PACE
    span_s = length_s * rng.uniform(0.4, 1.0)
    plan = random_plan(rng, NAMES, span_s=span_s, intensity=rng.uniform(0.3, 1.5))
    departures = _departures(rng)
    if rng.random() < 1 / 4:
        plan = _with_zombie(plan, rng, span_s=span_s)
    conditions = _with_modes(
        settings, modes, async_rounds=ASYNC_ROUNDS if is_async else None
    )
    if is_async and conditions.spike_every:
        plan = _with_late_copies(plan, modes, span_s=span_s)
    conditions = _with_rows(settings, conditions, seed)
    return Trial(
        seed=seed,
        settings=settings,
        departures=departures,
        plan=plan,
        conditions=conditions,
    )


def store_trial(seed: int) -> Trial:
    """Return the trial of a seed in a bucket: five islands and fifteen rounds."""
    rng = random.Random(f"store storm {seed}")
    settings = _settings(rng)
    settings["run"]["end_rounds"] = STORE_ROUNDS
    if rng.random() < 1 / 8:
        del settings["run"]["end_rounds"]
        settings["run"]["end_tokens"] = rng.randint(1_000, 8_000)
    window_s = settings["sync"]["sync_every"] * STORE_STEP_S
    span_s = STORE_ROUNDS * window_s * rng.uniform(0.4, 1.0)
    intensity = rng.uniform(0.3, 1.5)
    plan = random_store_plan(rng, NAMES, span_s=span_s, intensity=intensity)
    departures = _departures(rng)
    if rng.random() < 1 / 3:
        plan = _with_late_put(plan, rng, span_s=span_s, window_s=window_s)
    if rng.random() < 1 / 4:
        settings["limits"]["deadline_max_s"] = SHORT_DEADLINE_S
        sync_every = settings["sync"]["sync_every"]
        plan, departures = _with_left_out(plan, rng, sync_every=sync_every)
    is_async = random.Random(f"mode of store storm {seed}").random() < 1 / 3
    modes = random.Random(f"modes of store storm {seed}")
    conditions = _with_modes(
        settings, modes, async_rounds=ASYNC_STORE_ROUNDS if is_async else None
    )
    conditions = _with_rows(settings, conditions, seed)
    return Trial(
        seed=seed,
        settings=settings,
        departures=departures,
        plan=plan,
        conditions=replace(conditions, step_s=STORE_STEP_S, evicted_after_s=0.0),
        store=True,
    )


def storm(seed: int) -> Simulated:
    """Return the result of the storm of a seed."""
    return trial(seed).run()


def store_storm(seed: int) -> Simulated:
    """Return the result of the storm of a seed over a bucket."""
    return store_trial(seed).run()


def _names(result: Simulated) -> set[str]:
    return {violation.invariant for violation in result.violations}


def _settings(rng: random.Random) -> dict[str, dict[str, Any]]:
    """Draw the settings of a run, so that storms cover many combinations."""
    sync_every = rng.choice((2, 2, 2, 3, 4))
    return {
        "run": {
            "start_islands": rng.choice((1, 3, 4, 5)),
            "quorum": rng.choice((1, 1, 2, 3)),
            "end_rounds": ROUNDS,
        },
        "sync": {
            "sync_every": sync_every,
            "num_fragments": rng.choice(_FRAGMENTS),
            "fragment_order": "by_size",
            "overlap_steps": min(rng.choice((0, 1, 1, 2)), sync_every - 1),
            **rng.choice(_ADOPTIONS),
        },
        "wire": rng.choice(_WIRES),
        "outer": rng.choice(_OUTERS),
        "limits": {"deadline_max_s": rng.choice((10.0, 20.0, 40.0))},
    }


def _with_modes(
    settings: dict[str, dict[str, Any]],
    rng: random.Random,
    *,
    async_rounds: int | None,
) -> Conditions:
    """Draw settings that came later from a separate generator, and conditions.

    So a seed that draws none of them is the trial that it was before. With
    `async_rounds` the trial is asynchronous, and ends with as many rounds or by tokens.
    """
    is_async = async_rounds is not None
    is_dynamic = rng.random() < 1 / 4
    if rng.random() < 1 / 5:
        settings["wire"] = {**settings["wire"], "down": "gather"}
    has_spikes = rng.random() < (1 / 2 if is_async else 1 / 5)
    spike_every = rng.randint(13, 30) if has_spikes else 0
    paces = {name: round(rng.uniform(1.0, MAX_PACE), 2) for name in NAMES}
    if async_rounds is not None:
        _make_async(settings, rng, rounds=async_rounds)
    elif is_dynamic:
        settings["limits"]["deadline_max_s"] *= MAX_PACE
    if is_dynamic:
        settings["sync"]["dynamic_local_updates"] = True
    has_paces = is_async or is_dynamic
    return Conditions(paces=paces if has_paces else {}, spike_every=spike_every)


def _make_async(
    settings: dict[str, dict[str, Any]], rng: random.Random, *, rounds: int
) -> None:
    """Draw the settings of asynchronous rounds, of which a window has several."""
    settings["sync"]["mode"] = "async"
    settings["async"] = {
        "staleness": rng.choice(_STALENESS),
        **rng.choice(_BUFFERS),
        **rng.choice(_GRACES),
    }
    outer = settings["outer"]
    if outer.get("optimizer") == "adam":
        settings["outer"] = {"weight": "tokens"}
    if outer.get("merge") == "trimmed":
        settings["async"]["staleness"] = "none"
    settings["run"]["end_rounds"] = rounds
    if rng.random() < 1 / 4:
        del settings["run"]["end_rounds"]
        settings["run"]["end_tokens"] = rng.randint(2_000, 12_000)


def _with_rows(
    settings: dict[str, dict[str, Any]], conditions: Conditions, seed: int
) -> Conditions:
    """Let one run of three deal out its rows, and half of these end with their data.

    Drawn from a separate generator: the other seeds are the trials that they were.
    """
    rng = random.Random(f"rows of storm {seed}")
    if rng.random() > 1 / 3:
        return conditions
    batch = rng.choice((3, 8))
    max_rows = ROUNDS * settings["sync"]["sync_every"] * batch * ISLANDS
    passes, rows = rng.choice((1, 1, 2)), int(max_rows * rng.uniform(0.3, 0.9))
    if rng.random() < 1 / 2:
        settings["run"].pop("end_rounds", None)
        settings["run"].pop("end_tokens", None)
    else:
        passes = rng.choice((0, passes))
    settings["data"] = {
        "order": "run",
        "unit_rows": rng.choice((4, 16, 64)),
        "passes": passes,
        "shuffle": rng.random() < 1 / 2,
    }
    return replace(
        conditions,
        rows=rows // max(1, passes),
        batch=batch,
        evicted_after_s=rng.choice((0.0, 0.0, 5.0, 30.0)),
    )


def _departures(rng: random.Random) -> dict[str, PlannedDeparture]:
    """Make an island leave in one run of three, and return or not."""
    if rng.random() > 1 / 3:
        return {}
    back_after_s = rng.choice((None, round(rng.uniform(0.1, 10.0), 2)))
    steps = rng.randint(1, ROUNDS * 3)
    return {
        rng.choice(NAMES): PlannedDeparture(
            after_steps=steps, back_after_s=back_after_s
        )
    }


def _with_left_out(
    plan: FaultPlan, rng: random.Random, *, sync_every: int
) -> tuple[FaultPlan, dict[str, PlannedDeparture]]:
    """Make an island leave between the decision of the first roster and its put.

    It does not close the round itself: it has just learned that another island is
    missing. So its departing update is in no roster, unless another island brings it
    into the next round.
    """
    (island, missing), window_s = rng.sample(NAMES, 2), sync_every * STORE_STEP_S
    by_s, steps = rng.choice((9.0, 18.0, 27.0)), rng.randint(1, sync_every)
    leaves_s = window_s + SHORT_DEADLINE_S + rng.uniform(0.2, 0.8) * by_s
    slower = round(leaves_s / (steps * STORE_STEP_S), 2)
    plan = plan.slow(island, factor=slower, for_s=leaves_s)
    plan = plan.slow(missing, factor=round(3 * leaves_s / window_s, 2), for_s=leaves_s)
    plan = plan.roster_lag(STORE, by_s=by_s, for_s=leaves_s)
    back_after_s = rng.choice((None, round(rng.uniform(0.1, 10.0), 2)))
    return plan, {
        island: PlannedDeparture(after_steps=steps, back_after_s=back_after_s)
    }


def _with_late_put(
    plan: FaultPlan, rng: random.Random, *, span_s: float, window_s: float
) -> FaultPlan:
    """Kill an island whose puts of the last window arrive after its restart."""
    island, at_s = rng.choice(NAMES), round(rng.uniform(0.2, 0.9) * span_s, 1)
    link, by_s = f"{island}->{STORE}", round(rng.uniform(1.0, 9.0), 1)
    return plan.delay(
        link, at_s=max(0.0, at_s - window_s), by_s=by_s, for_s=window_s
    ).kill(island, at_s=at_s, back_after_s=0.1)


def _with_zombie(plan: FaultPlan, rng: random.Random, *, span_s: float) -> FaultPlan:
    """Kill an island, and restart it before all its messages have arrived."""
    island, at_s = rng.choice(NAMES), round(rng.uniform(0.1, 0.9) * span_s, 1)
    link, by_s = f"{island}->{COORDINATOR}", round(rng.uniform(0.5, 4.0), 1)
    return plan.reorder(
        link, at_s=max(0.0, at_s - by_s), by_s=by_s, rate=0.5, for_s=2 * by_s
    ).kill(island, at_s=at_s, back_after_s=0.1)


def _with_late_copies(
    plan: FaultPlan, rng: random.Random, *, span_s: float
) -> FaultPlan:
    """Let updates arrive again after rosters have listed them.

    Refused ones too, because this is for trials with spikes.
    """
    at_s, for_s = round(rng.uniform(0.0, 0.3) * span_s, 1), round(0.6 * span_s, 1)
    by_s = round(rng.uniform(2.0, 6.0), 1)
    return plan.duplicate("*", rate=0.5, at_s=at_s, for_s=for_s).reorder(
        "*", by_s=by_s, rate=0.2, at_s=at_s, for_s=for_s
    )


_FRAGMENTS = (1,) * 16 + (2, 3)
"""One storm in nine has several, since each fragment costs twenty rounds of time."""

_STALENESS = ("none", "inverse", "inverse_root", "exponential")
_BUFFERS: tuple[dict[str, Any], ...] = ({}, {"buffer": 1}, {"buffer": 2}, {"buffer": 5})
_GRACES: tuple[dict[str, Any], ...] = (
    {},
    {"grace_s": 0.0},
    {"grace_s": 0.2},
    {"grace_s": 2.0},
)
_ADOPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {},
    {"adopt": "mix", "keep_local": 0.5},
)
_WIRES: tuple[dict[str, Any], ...] = (
    {"up": "e3m0", "down": "int8"},
    {"up": "e3m0", "down": "int8"},
    {"up": "e3m0", "down": "bf16", "error_feedback": False},
    {"up": "e3m0", "down": "fp32", "error_feedback_decay": 0.9},
    {"up": "int8", "down": "int8", "error_feedback": True},
    {"up": "bf16", "down": "bf16"},
    {"up": "bf16-stochastic", "down": "bf16"},
    {"up": "fp32", "down": "fp32"},
    {"up": "topk-2bit", "down": "int8"},
)
_OUTERS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"weight": "tokens"},
    {"optimizer": "sgd", "lr": 1.0},
    {"optimizer": "adam", "lr": 0.01},
    {"merge": "radial"},
    {"merge": "trimmed"},
)


BATCH = 25
"""Storms per line of progress."""

SHRUNK = 3
"""Failures that are shrunk; more of them are seldom more bugs."""


@dataclass
class TrialTally:
    """Sums over the results of some storms."""

    storms: int = 0
    rounds: int = 0
    events: int = 0
    deaths: int = 0
    failures: dict[int, str] = field(default_factory=dict)
    """By seed: the first violation."""

    def add(self, other: TrialTally) -> None:
        self.storms += other.storms
        self.rounds += other.rounds
        self.events += other.events
        self.deaths += other.deaths
        self.failures.update(other.failures)

    def __str__(self) -> str:
        return (
            f"{self.storms} storms, {self.rounds} rounds, {self.deaths} deaths, "
            f"{self.events} events, {len(self.failures)} violations"
        )


def tune_collector() -> None:
    """Tune the garbage collector for storms, which create few reference cycles.

    Imported modules are no longer traversed, and other objects less often: that saves
    some 3 % of all the time, and costs some MB.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)


def run_storms(
    seeds: Sequence[int], draw: Callable[[int], Trial] = trial
) -> TrialTally:
    """Run the storms of `seeds`, one after the other."""
    tally = TrialTally()
    for seed in seeds:
        result = draw(seed).run()
        tally.storms += 1
        tally.rounds += sum(result.rounds)
        tally.events += result.events
        tally.deaths += sum(result.deaths.values())
        if result.violations:
            tally.failures[seed] = str(result.violations[0])
    return tally


def run_batches(
    first: int,
    storms: int,
    *,
    processes: int,
    draw: Callable[[int], Trial] = trial,
) -> Iterator[TrialTally]:
    """Run storms in several processes, and yield the sums so far."""
    total = TrialTally()
    batches = [
        range(start, min(start + BATCH, first + storms))
        for start in range(first, first + storms, BATCH)
    ]
    # Spawned, not forked: the caller may have threads.
    fresh = get_context("spawn")
    with ProcessPoolExecutor(
        processes, mp_context=fresh, initializer=tune_collector
    ) as pool:
        for tally in pool.map(partial(run_storms, draw=draw), batches):
            total.add(tally)
            yield total


def explain(seed: int, draw: Callable[[int], Trial] = trial) -> str:
    """Return a failed storm as a test, with a shrunk plan."""
    return draw(seed).shrunk().as_test()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the storms of the command line; return the exit status."""
    parser = argparse.ArgumentParser(description="Run storms in virtual time.")
    parser.add_argument("--storms", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--store", action="store_true", help="over a bucket")
    options = parser.parse_args(argv)
    draw = store_trial if options.store else trial
    since_s, total = time.monotonic(), TrialTally()
    storms = run_batches(
        options.first, options.storms, processes=options.processes, draw=draw
    )
    for total in storms:
        sys.stdout.write(f"\r{time.monotonic() - since_s:6.0f} s  {total}")
        sys.stdout.flush()
    sys.stdout.write("\n")
    for number, (seed, violation) in enumerate(sorted(total.failures.items())):
        sys.stdout.write(f"seed {seed}: {violation}\n")
        if number < SHRUNK:
            sys.stdout.write(f"\n{explain(seed, draw)}\n")
    return 1 if total.failures else 0


if __name__ == "__main__":
    sys.exit(main())
