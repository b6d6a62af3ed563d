"""A restarted island has the work that no round has counted, exactly once."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from atoll.errors import UsageError
from atoll.exchange import MemoryRun
from atoll.island.saved_state import to_tree
from atoll.weights.layout import F32
from tests.island.incarnations import Checkpoint, Incarnation, run_of, saved_in

EVERY, OVERLAP = 5, 3


def empty(**wire: Any) -> MemoryRun:
    return run_of(
        run={"start_islands": 2},
        sync={"sync_every": EVERY, "overlap_steps": OVERLAP},
        wire={"up": "fp32", "down": "fp32", **wire},
        outer={"optimizer": "sgd", "lr": 1.0},
    )


def two_islands(**wire: Any) -> tuple[MemoryRun, Incarnation, Incarnation]:
    """Return a run in which two islands wait for each other, in one thread."""
    run = empty(**wire)
    return run, Incarnation(run, island="a"), Incarnation(run, island="b")


def work_of(incarnation: Incarnation) -> F32:
    """Return the difference of local weights and anchor."""
    return incarnation.view.local[0] - incarnation.host.slots[0].state.anchor


def rejoined(run: MemoryRun, checkpoint: Checkpoint) -> Incarnation:
    incarnation = Incarnation(run, island="a", checkpoint=checkpoint)
    assert incarnation.host.resumed
    assert not incarnation.host.resumed.is_exact
    return incarnation


def close(actual: F32, expected: F32) -> bool:
    return bool(np.allclose(actual, expected, atol=1e-5))


def test_what_nobody_counted_is_put_on_the_present_anchor() -> None:
    """Work since the last round is kept, though the anchor has moved since."""
    run, a, b = two_islands()
    a.train(EVERY + OVERLAP - 1)
    b.train(EVERY + OVERLAP)
    a.train(1)
    a.train(1)
    checkpoint, work = a.save(is_exact=False), work_of(a)
    a.die()
    b.train(EVERY)  # round 2 closes without the dead
    again = rejoined(run, checkpoint)

    assert again.host.slots[0].state.round == 2
    assert close(work_of(again), work)
    assert again.steps == EVERY + OVERLAP + 1
    assert again.host.slots[0].settled_steps == EVERY
    again.die()
    b.die()


def test_an_update_that_counted_after_the_death_is_not_sent_again() -> None:
    """Of a saved update that has counted, only the work since its seal remains."""
    run, a, b = two_islands()
    a.train(EVERY)
    at_seal = a.view.local[0].copy()
    a.train(2)
    checkpoint, local = a.save(is_exact=False), a.view.local[0].copy()
    assert saved_in(checkpoint).fragments[0].update
    a.die()
    b.train(EVERY + OVERLAP)
    again = rejoined(run, checkpoint)

    assert again.host.slots[0].state.round == 1
    assert close(work_of(again), local - at_seal)
    assert again.host.slots[0].settled_steps == EVERY
    again.die()
    b.die()


def test_work_that_a_later_update_brought_is_dropped() -> None:
    """The dead incarnation counted after its checkpoint: its work is in the anchor."""
    run, a, b = two_islands(up="int8", error_feedback=True)
    a.train(2)
    checkpoint = a.save(is_exact=False)
    a.train(EVERY)
    b.train(EVERY + OVERLAP)
    a.die()
    again = rejoined(run, checkpoint)

    assert not work_of(again).any()
    assert again.host.slots[0].residual is not None
    assert not again.host.slots[0].residual.any()
    assert again.host.resumed
    assert again.host.resumed.counted == (EVERY, 7 * EVERY)
    assert again.steps == EVERY
    again.die()
    b.die()


def test_a_saved_update_that_stands_is_waited_for() -> None:
    """Until its outcome the work since is held back, and the island trains."""
    run, a, b = two_islands()
    a.train(EVERY)
    at_seal = a.view.local[0].copy()
    a.train(1)
    checkpoint, since = a.save(is_exact=False), a.view.local[0] - at_seal
    a.die()
    again = rejoined(run, checkpoint)
    assert not work_of(again).any()

    again.train(2)
    trained = work_of(again)
    b.train(EVERY + OVERLAP)
    again.idle(EVERY + OVERLAP)

    assert again.host.slots[0].state.round == 1
    assert close(work_of(again), trained + since)
    assert again.host.slots[0].settled_steps == EVERY
    again.die()
    b.die()


def test_another_update_that_stands_takes_the_saved_work_along() -> None:
    """The update published after the checkpoint contains all saved work."""
    run, a, b = two_islands()
    a.train(2)
    checkpoint = a.save(is_exact=False)
    a.train(EVERY - 2)
    a.die()
    again = rejoined(run, checkpoint)
    again.train(2)
    trained = work_of(again)
    b.train(EVERY + OVERLAP)
    again.idle(EVERY + OVERLAP)

    assert again.host.slots[0].state.round == 1
    assert close(work_of(again), trained)
    assert again.host.slots[0].settled_steps == 2
    again.die()
    b.die()


def test_work_on_an_unknown_base_is_reported_as_lost() -> None:
    """In a run with another history it is unknown which work has counted."""
    _, a, b = two_islands()
    a.train(3)
    checkpoint = a.save(is_exact=False)
    a.die()
    b.die()
    other, c, d = two_islands()
    c.train(EVERY)
    d.train(EVERY + OVERLAP)
    checkpoint.island["fragments"][0]["digest"] = bytes(16)
    c.die()
    again = rejoined(other, checkpoint)

    assert not work_of(again).any()
    assert again.host.resumed
    assert again.host.resumed.lost == (3, 21)
    again.die()
    d.die()


def test_a_checkpoint_of_another_run_is_refused() -> None:
    """Both runs are named; nothing is joined."""
    run, a, b = two_islands()
    a.train(1)
    checkpoint = a.save(is_exact=False)
    a.die()
    checkpoint.island["run"] = "elsewhere"
    with pytest.raises(UsageError, match=r"of run 'elsewhere', and this is 'run-"):
        Incarnation(run, island="a", checkpoint=checkpoint)
    Incarnation(run, island="a").die()
    b.die()


def test_an_island_that_saved_its_counts_alone_takes_the_anchor_and_counts_on() -> None:
    """A trainer of several ranks saves no work: it is reported as lost."""
    run, a, b = two_islands()
    a.train(EVERY + OVERLAP - 1)
    b.train(EVERY + OVERLAP)
    a.train(2)
    full_checkpoint = a.save(is_exact=False)
    counts = to_tree(replace(saved_in(full_checkpoint), fragments=[]))
    a.die()
    again = rejoined(run, replace(full_checkpoint, island=counts))

    assert not work_of(again).any()
    assert again.steps == EVERY + OVERLAP + 1
    assert again.host.resumed
    assert again.host.resumed.lost[0] == OVERLAP + 1
    again.die()
    b.die()


def test_an_empty_run_is_not_founded_by_chance() -> None:
    """Neither the run nor the checkpoint has weights: the live ones are random."""
    _, a, b = two_islands()
    a.train(1)
    checkpoint = a.save(is_exact=False)
    a.die()
    b.die()
    with pytest.raises(UsageError, match="has no weights, and the checkpoint"):
        Incarnation(empty(), checkpoint=checkpoint)


LONG = 10**6
"""Inner steps of an earlier run: more than the new one has room for by far."""


def of_a_long_run(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint as an island has it that came late to its run."""
    island = {**checkpoint.island, "before_steps": LONG, "before_tokens": 7 * LONG}
    return replace(checkpoint, island=island)


def counted_progress(run: MemoryRun, round: int) -> dict[str, tuple[int, int]]:
    outcome = run.outcome(0, round, wait_s=0.0)
    assert outcome
    assert outcome.agreed.header.roster
    entries = outcome.agreed.header.roster.counted
    return {entry.island: (entry.inner_steps, entry.tokens) for entry in entries}


def test_a_run_founded_from_a_checkpoint_counts_its_own_steps() -> None:
    """The island continues its counts; the run counts only the work made in it."""
    _, a, b = two_islands()
    a.train(1)
    checkpoint = of_a_long_run(a.save(is_exact=True))
    a.die()
    b.die()
    run = empty()
    again, b = Incarnation(run, checkpoint=checkpoint), Incarnation(run, island="b")
    assert again.steps == LONG + 1
    for _ in range(EVERY + OVERLAP):
        again.train(1)
        b.train(1)

    assert again.steps == LONG + 1 + EVERY + OVERLAP
    assert counted_progress(run, 1) == {
        "a": (EVERY, 7 * EVERY),
        "b": (EVERY, 7 * EVERY),
    }
    saved = saved_in(again.save(is_exact=True))
    assert saved.earlier == (LONG + 1, 7 * (LONG + 1))
    again.die()
    b.die()


def test_a_founder_that_resumes_counts_on_in_its_run() -> None:
    """A second checkpoint has the counts with and without those of the run."""
    _, a, b = two_islands()
    a.train(1)
    checkpoint = of_a_long_run(a.save(is_exact=True))
    a.die()
    b.die()
    run = empty()
    founder, b = Incarnation(run, checkpoint=checkpoint), Incarnation(run, island="b")
    for _ in range(EVERY + OVERLAP):
        founder.train(1)
        b.train(1)
    later = founder.save(is_exact=False)
    founder.die()
    again = rejoined(run, later)
    assert again.steps == LONG + 1 + EVERY + OVERLAP
    b.die()
    again.train(2 * EVERY)
    steps, tokens = counted_progress(run, 2)["a"]

    assert EVERY < steps <= again.steps - LONG - 1
    assert tokens == 7 * steps
    again.die()


def test_an_island_of_a_longer_past_goes_on_in_a_run_that_began_anew() -> None:
    """Nothing of its work is in this run, which counts it from its beginning."""
    _, a, b = two_islands()
    for _ in range(EVERY + OVERLAP):
        a.train(1)
        b.train(1)
    checkpoint = of_a_long_run(a.save(is_exact=True))
    a.die()
    b.die()
    run = empty()
    b = Incarnation(run, island="b")
    again = rejoined(run, checkpoint)
    assert again.steps == LONG + EVERY + OVERLAP
    for _ in range(EVERY + OVERLAP):
        again.train(1)
        b.train(1)

    assert counted_progress(run, 1)["a"] == (EVERY, 7 * EVERY)
    again.die()
    b.die()


def test_a_checkpoint_has_the_bytes_of_an_update_that_waits_to_be_sent() -> None:
    """The sender is busy: the update is sent after the checkpoint was taken."""
    run, a, b = two_islands(up="int8", error_feedback=True)
    may_send, has_sent = threading.Event(), threading.Event()
    sender = a.host._driver.worker._sender
    sender.submit(may_send.wait)
    a.train(EVERY)
    at_seal = a.view.local[0].copy()
    a.train(2)
    assert a.host.slots[0].sealed is not None
    assert a.host.slots[0].sealed.frame is None
    checkpoint, local = a.save(is_exact=False), a.view.local[0].copy()
    may_send.set()
    sender.submit(has_sent.set)
    assert has_sent.wait(10.0)
    a.die()
    b.train(EVERY + OVERLAP)
    again = rejoined(run, checkpoint)

    assert close(work_of(again), local - at_seal)
    residual = again.host.slots[0].residual
    assert residual is not None
    assert residual.any()
    again.die()
    b.die()


def test_an_update_that_0_1_0_saved_without_its_bytes_counts_once() -> None:
    """It cannot be known in the roster, so nothing of the checkpoint is added."""
    run, a, b = two_islands(up="int8", error_feedback=True)
    a.train(EVERY + 2)
    checkpoint = a.save(is_exact=False)
    update = checkpoint.island["fragments"][0]["update"]
    update["frame"] = update["residual_after"] = None
    a.die()
    b.train(EVERY + OVERLAP)
    again = rejoined(run, checkpoint)

    assert not work_of(again).any()
    again.die()
    b.die()


def test_two_deaths_while_an_update_stands_lose_nothing() -> None:
    """Held-back work is in the next checkpoint, with the update that it waits for."""
    run, a, b = two_islands()
    a.train(EVERY)
    at_seal = a.view.local[0].copy()
    a.train(1)
    first, since = a.save(is_exact=False), a.view.local[0] - at_seal
    a.die()
    second = rejoined(run, first)
    second.train(2)
    trained = work_of(second)
    checkpoint = second.save(is_exact=False)
    second.die()
    third = rejoined(run, checkpoint)
    assert not work_of(third).any()

    b.train(EVERY + OVERLAP)
    third.idle(EVERY + OVERLAP)

    assert third.host.slots[0].state.round == 1
    assert close(work_of(third), since + trained)
    third.die()
    b.die()


def test_what_an_outcome_has_taken_along_is_not_saved_again() -> None:
    """A checkpoint between an outcome and its taking holds no work that counted."""
    run, a, b = two_islands()
    a.train(2)
    first = a.save(is_exact=False)
    a.train(EVERY - 2)
    a.die()
    second = rejoined(run, first)
    second.train(1)
    trained = work_of(second)
    b.train(EVERY)
    slot = second.host.slots[0]
    while slot.sealed is None:
        second.idle(1)
    slot.sealed.arrival.result()
    assert slot.held_back is not None  # not taken yet
    checkpoint = second.save(is_exact=False)
    second.die()
    third = rejoined(run, checkpoint)

    assert close(work_of(third), trained)
    third.die()
    b.die()
