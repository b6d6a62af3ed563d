"""Runs of the laboratory: one case and one seed, in virtual time.

Islands, coordinator, protocol and journal are those of real runs, by
`atoll.testing.virtual_run`; only time, network and disk are simulated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from _convergence_model import (
    BATCH,
    MODEL,
    AdamW,
    Student,
    held_out_text,
    island_text,
)

from atoll import RunSettings
from atoll.island import Host
from atoll.simulate import FaultPlan
from atoll.simulate.run import without_warnings
from atoll.testing import VirtualIsland, virtual_run

ISLANDS = 4
SYNC_EVERY = 30
EQUAL_S = (1.0, 1.0, 1.0, 1.0)
"""Seconds of an inner step, by island."""

UNEQUAL_S = (1.0, 1.3, 2.6, 5.7)

LABORATORY: Mapping[str, Any] = {
    "run.start_islands": ISLANDS,
    "sync.sync_every": SYNC_EVERY,
    "outer.lr": 0.4,
    "outer.momentum": 0.8,
}
"""Settings of every case. The optimizer is Nesterov; its default momentum of 0.9 is too
high for the seventy rounds of the laboratory."""

DECAY = 0.5
"""Share of the run's tokens over which the learning rate falls to zero, at its end.

At a constant rate the last loss is mostly the noise of the last rounds, so that cases
compare by how much of it they average out.
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A way to train, and what is asked of it."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that differ from `LABORATORY`."""

    step_s: tuple[float, ...] = EQUAL_S
    plan: FaultPlan = field(default_factory=FaultPlan)
    reference: str = ""
    """The case that this one is compared with; empty for the first of its table."""

    loss_at_most: float | None = None
    """Upper limit of the loss, relative to that of the reference."""

    loss_at_least: float | None = None
    clock_at_most: float | None = None
    waiting_at_most: float | None = None
    """Upper limit of the share of the islands' time that they wait for outcomes."""


@dataclass(frozen=True)
class Ran:
    """The result of a case with one seed."""

    loss: float
    """Of the last anchor on held-out text, in nats per token."""

    clock_s: float
    """Virtual time until the last island has seen the end of the run."""

    rounds: float
    """Mean over the fragments."""

    inner_steps: int
    """Of all islands together."""

    waiting: float
    """Share of the islands' time that they waited for outcomes."""

    sent_bytes: float
    """Per island."""


@dataclass(frozen=True)
class IslandRun:
    """The result of one island."""

    loss: float
    """Of its last anchor, which all islands hold."""

    inner_steps: int
    seconds: float
    wait_s: float
    sent_bytes: int


def run(case: Case, *, seed: int, inner_steps: int) -> Ran:
    """Train until the tokens of so many inner steps of all islands have counted."""
    end = {"run.end_tokens": inner_steps * BATCH}
    with without_warnings():
        settings = RunSettings().with_values({**LABORATORY, **end, **case.settings})
        result = virtual_run(
            partial(_train, case=case, seed=seed, text_steps=inner_steps // 2),
            settings,
            islands=ISLANDS,
            faults=case.plan,
            seed=seed,
        )
    islands: list[IslandRun] = list(result.returned.values())
    assert len(islands) == ISLANDS, f"{case.name}: {result.failures}"
    return Ran(
        loss=islands[0].loss,
        clock_s=result.seconds,
        rounds=sum(result.rounds) / len(result.rounds),
        inner_steps=sum(island.inner_steps for island in islands),
        waiting=sum(island.wait_s for island in islands)
        / sum(island.seconds for island in islands),
        sent_bytes=sum(island.sent_bytes for island in islands) / ISLANDS,
    )


def _train(
    island: VirtualIsland, *, case: Case, seed: int, text_steps: int
) -> IslandRun:
    """Train one island until the run ends."""
    number = int(island.name.removeprefix("i"))
    text, since_s = island_text(seed, number, steps=text_steps), island.clock.now_s()
    student = Student(seed)
    host = island.join(MODEL, student)
    optimizer = AdamW(student.vectors)
    while not host.has_ended:
        island.work(case.step_s[number])
        step = host.counters.inner_steps % text_steps
        gradients = student.gradients(text.contexts[step], text.following[step])
        optimizer.step(gradients, factor=_decay_factor(host))
        host.count_tokens(BATCH)
        host.stepped()
    host.leave()
    for fragment in range(len(host.slots)):
        student.write(fragment, host.read_anchor(fragment)[0])
    return IslandRun(
        loss=student.loss(held_out_text(seed)),
        inner_steps=host.counters.inner_steps,
        seconds=island.clock.now_s() - since_s,
        wait_s=host.counters.wait_s,
        sent_bytes=host.counters.bytes_up,
    )


def _decay_factor(host: Host) -> float:
    """Return the factor of `WSD(unit="tokens")`: it follows the tokens of the run."""
    clock, sync = host.clock, host.settings.sync
    assert clock.end_tokens is not None
    sync_every = None if sync.is_async else sync.sync_every
    tokens = clock.tokens_at(host.run_steps, sync_every=sync_every) or 0.0
    remaining = 1.0 - tokens / clock.end_tokens
    return min(1.0, max(0.0, remaining / DECAY))
