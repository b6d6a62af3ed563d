"""An asynchronous island takes outcomes until a roster lists its update."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from itertools import repeat
from typing import Any

import numpy as np
import pytest

from atoll import RunSettings
from atoll.errors import AtollWarning, OutcomeLost, RunEnded
from atoll.exchange import Frame, Outcome
from atoll.island import Host
from atoll.island.fragment import UpdateInFlight
from atoll.island.saved_state import AppliedOutcome
from atoll.island.snapshot import exact_state
from atoll.protocol import JoinReply, JoinRequest, Reception, WorkDecision
from atoll.testing import VectorView, vector_model
from atoll.wire import FrameKind, Verdict
from tests.island.scripted import BUFFER, ISLAND, ScriptedRun

EVERY, OVERLAP = 4, 2


def settings(**tables: dict[str, Any]) -> RunSettings:
    return RunSettings.from_dict(
        {
            "sync": {"mode": "async", "sync_every": EVERY, "overlap_steps": OVERLAP},
            "wire": {"up": "fp32", "down": "fp32"},
            "outer": {"optimizer": "sgd", "lr": 1.0},
            **tables,
        }
    )


class FaultyRun(ScriptedRun):
    """A scripted run with one fault: a lost or a damaged outcome, or an early end."""

    def __init__(
        self,
        fates: Iterator[str],
        *,
        run: RunSettings | None = None,
        lost: int = 0,
        damaged: int = 0,
        ends_after: int = 0,
        spoken_for: tuple[int, ...] = (),
    ) -> None:
        super().__init__(run or settings(), fates)
        self._lost, self._damaged, self._ends_after = lost, damaged, ends_after
        self._spoken_for = spoken_for

    def join(self, request: JoinRequest) -> JoinReply:
        return replace(super().join(request), spoken_for=self._spoken_for)

    def publish(self, frame: Frame) -> Reception:
        if frame.header.kind is not FrameKind.STATE and self._ends_after:
            self.pass_rounds(self._ends_after)
            return Reception.COMMITTED
        return super().publish(frame)

    def outcome(
        self, fragment: int, round: int, *, wait_s: float, has_body: bool = True
    ) -> Outcome | None:
        if round == self._lost:
            raise OutcomeLost(f"Round {round} is over, and its outcome is lost.")
        if self._ends_after and round > self._ends_after:
            raise RunEnded(f"Round {round} will not open.")
        outcome = super().outcome(fragment, round, wait_s=wait_s, has_body=has_body)
        if outcome is None or round != self._damaged:
            return outcome
        header = replace(outcome.agreed.header, base=bytes(16))
        return replace(outcome, agreed=replace(outcome.agreed, header=header))


def island_at(run: ScriptedRun) -> tuple[Host, VectorView]:
    view = VectorView()
    request = JoinRequest(model=vector_model({"w": (3,)}), island=ISLAND)
    return Host(run, view, request), view


def train(host: Host, view: VectorView, steps: int) -> None:
    """Make steps of -1 each."""
    for _ in range(steps):
        view.local[0] -= np.float32(1.0)
        host.stepped()


def after_one_window(run: ScriptedRun) -> tuple[Host, float, float]:
    """Train until the first receipt is taken; return anchor and live weights too."""
    host, view = island_at(run)
    train(host, view, EVERY + OVERLAP)
    anchor, local = host.slots[0].state.anchor, view.local[0]
    assert len(set(anchor)) == len(set(local)) == 1
    return host, float(anchor[0]), float(local[0])


COUNTED = -EVERY / BUFFER
"""The anchor after one update of a whole window."""


def test_an_update_is_looked_for_in_every_roster() -> None:
    """Round 1 does not list it, and round 2 does: both are in the anchor."""
    run = ScriptedRun(settings(), iter(["missed"]))
    host, anchor, local = after_one_window(run)

    assert run.asked == [(1, True), (2, True)]
    assert (anchor, local) == (COUNTED, COUNTED - OVERLAP)
    assert (host.counters.counted, host.counters.carried, host.counters.dropped) == (
        1,
        0,
        0,
    )
    host.leave(depart=False)


def test_the_next_update_is_for_the_round_after_those_that_were_taken() -> None:
    """The receipt was round 1, and round 2 was over too: the next label is 3."""
    run = ScriptedRun(settings(), iter(["passed", "counted"]))
    host, view = island_at(run)
    train(host, view, 2 * EVERY + OVERLAP)

    assert [frame.header.round for frame in run.published] == [1, 3]
    assert host.slots[0].state.round == 3
    host.leave(depart=False)


def test_work_since_the_seal_is_kept_whatever_has_passed() -> None:
    """With adopt="mix" the weights are mixed if nothing has passed, else rebased."""
    sync = {"adopt": "mix", "keep_local": 0.5}
    sync |= {"mode": "async", "sync_every": EVERY, "overlap_steps": OVERLAP}
    locals_after = [
        after_one_window(ScriptedRun(settings(sync=sync), iter([fate])))[2]
        for fate in ("counted", "missed", "passed")
    ]

    mixed = (COUNTED - EVERY - OVERLAP) / 2
    assert locals_after == [mixed, mixed, COUNTED - OVERLAP]


def test_an_island_that_is_far_behind_takes_the_state_and_reads_rosters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bodies of rounds 2 to 9 would be larger than the state."""
    monkeypatch.setattr("atoll.exchange.memory.KEPT_BODIES", 9)
    run = ScriptedRun(settings(), iter(["counted"]))
    host, view = island_at(run)
    run.pass_rounds(8)
    train(host, view, EVERY + OVERLAP)

    assert run.asked == [(1, True)] + [(round, False) for round in range(2, 10)]
    assert run.states == 1
    assert host.slots[0].state.round == 9
    assert float(view.local[0][0]) == COUNTED - OVERLAP
    assert [header.round for header in host.slots[0].outcomes] == [8, 9]
    host.leave(depart=False)


class CopyingRun(ScriptedRun):
    """A scripted run whose outcomes have separate bodies, as over a wire."""

    def __init__(self, fates: Iterator[str]) -> None:
        super().__init__(settings(), fates)
        self.bodies: list[weakref.ref[np.ndarray]] = []
        self.most_alive = 0

    def outcome(
        self, fragment: int, round: int, *, wait_s: float, has_body: bool = True
    ) -> Outcome | None:
        outcome = super().outcome(fragment, round, wait_s=wait_s, has_body=has_body)
        assert outcome is not None
        body = outcome.agreed.body.copy()
        self.bodies.append(weakref.ref(body))
        alive = sum(reference() is not None for reference in self.bodies)
        self.most_alive = max(self.most_alive, alive)
        return replace(outcome, agreed=Frame(outcome.agreed.header, body))


def test_one_outcome_at_a_time_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is applied and released before the next one is requested."""
    monkeypatch.setattr("atoll.exchange.memory.KEPT_BODIES", 9)
    run = CopyingRun(iter(["missed", "passed"]))
    host, view = island_at(run)
    train(host, view, 2 * EVERY + OVERLAP)

    assert len(run.bodies) == 4
    assert run.most_alive == 1
    host.leave(depart=False)


def test_an_outcome_without_a_body_is_not_needed() -> None:
    """The run has dropped the first bodies: the state contains their means."""
    run = ScriptedRun(settings(), iter(["passed thrice"]))
    host, anchor, local = after_one_window(run)

    assert run.states == 1
    assert (anchor, local) == (COUNTED, COUNTED - OVERLAP)
    assert host.counters.counted == 1
    host.leave(depart=False)


def test_an_outcome_of_another_state_is_replaced_by_the_state() -> None:
    """The receipt is found in the same rosters."""
    run = FaultyRun(iter(["missed"]), damaged=1)
    host, anchor, local = after_one_window(run)

    assert run.states == 1
    assert (anchor, local) == (COUNTED, COUNTED - OVERLAP)
    assert host.counters.counted == 1
    host.leave(depart=False)


def test_an_update_that_its_receipt_refuses_leaves_the_anchor() -> None:
    """Refused in round 2: all work since the anchor is lost, with the residual."""
    wire = {"up": "int8", "down": "fp32", "error_feedback": True}
    run = ScriptedRun(settings(wire=wire), iter(["counted", "missed"]))
    host, view = island_at(run)
    train(host, view, EVERY)
    view.local[0][:] += [0.3, 0.1, 0.7]
    train(host, view, EVERY - 1)
    slot = host.slots[0]
    assert slot.residual is not None
    view.local[0][1] = np.nan
    with pytest.warns(
        AtollWarning, match="Round 3 refused fragment 0 of island 'i': non-finite"
    ):
        train(host, view, 1 + OVERLAP)

    assert slot.state.round == 3
    assert (view.local[0] == slot.state.anchor).all()
    assert not slot.residual.any()
    assert host.counters.refused == 1
    host.leave(depart=False)


def test_a_lost_outcome_may_have_listed_the_update() -> None:
    """The island takes the anchor: its work must not count twice."""
    run = FaultyRun(iter(["missed"]), lost=2)
    host, view = island_at(run)
    with pytest.warns(AtollWarning, match="Round 2 is over, and its outcome is lost"):
        train(host, view, EVERY + OVERLAP)

    assert host.slots[0].state.round == 2
    assert (view.local[0] == host.slots[0].state.anchor).all()
    host.leave(depart=False)


def test_an_update_that_no_round_lists_ends_with_the_run() -> None:
    """Rounds 1 to 3 were taken in search of it; the weights are on the last anchor."""
    run = FaultyRun(repeat("counted"), ends_after=3)
    host, view = island_at(run)
    train(host, view, EVERY + OVERLAP)

    assert host.has_ended
    assert host.slots[0].state.round == 3
    assert set(view.local[0]) == {-OVERLAP}
    assert host.counters.not_counted_steps == EVERY + OVERLAP
    host.leave()


def test_a_name_that_is_spoken_for_waits_for_the_open_round_only() -> None:
    """Its own work goes with its next update, all of it, to the round after those."""
    run = FaultyRun(iter(["counted"]), spoken_for=(0,))
    host, view = island_at(run)
    run.pass_rounds(2)
    train(host, view, EVERY + OVERLAP)
    assert run.published == []
    assert host.slots[0].state.round == 2
    assert set(view.local[0]) == {-EVERY - OVERLAP}
    train(host, view, EVERY)

    assert [frame.header.round for frame in run.published] == [3]
    assert set(host.slots[0].state.anchor) == {2 * COUNTED}
    host.leave(depart=False)


def test_a_checkpoint_has_the_outcome_of_an_update_from_its_receipt_on() -> None:
    """Later rounds are still being taken, and the update must not count twice."""
    host, _ = island_at(ScriptedRun(settings(), iter([])))
    receipt = AppliedOutcome(
        decision=WorkDecision.ADOPT,
        verdict=Verdict.COUNTED,
        reason="",
        through=1,
        position=None,
    )
    (slot,) = host.slots
    slot.sealed = UpdateInFlight(
        round=1,
        base=np.zeros(3, np.float32),
        inner_steps=EVERY,
        tokens=0,
        weight=1,
        arrival=Future(),
        receipt=receipt,
    )
    saved = exact_state(slot).update
    slot.sealed = None
    host.leave(depart=False)

    assert saved
    assert (saved.arrival, saved.frame) == (receipt, None)


def test_a_heartbeat_of_a_waiting_island_has_the_round_that_it_waits_for() -> None:
    """It is the round after the one that the island holds then."""
    run = ScriptedRun(settings(), iter(["passed"]))
    host, _, _ = after_one_window(run)
    worker = host._driver.worker
    beat = host._driver._beat((0, 1))

    assert host.slots[0].state.round == 2
    assert worker.renewed(beat).waits_for == (0, 3)
    host.leave(depart=False)
