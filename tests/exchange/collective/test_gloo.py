"""Islands that are processes of one gloo world, at a real coordinator."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from atoll.exchange import MemoryRun
from atoll.settings import RunSettings
from tests.coordinator.serving import serving
from tests.exchange.collective.gloo_ranks import (
    MODEL,
    Rank,
    start,
    train_to_the_end,
)
from tests.exchange.collective.ranks import train

SILENCE_S = 10.0
"""A machine that compiles and tests much else may starve a process for seconds."""

NAMED_S = 3 * SILENCE_S
"""A silence, and what a busy machine may take to notice it."""


def settings(islands: int, rounds: int) -> RunSettings:
    """Return fragments of several pieces and of one, sent beside the training."""
    return RunSettings.from_dict(
        {
            "run": {"start_islands": islands, "end_rounds": rounds},
            "sync": {"sync_every": 4, "num_fragments": 2, "overlap_steps": 1},
            "wire": {"up": "e3m0", "down": "int8"},
            "outer": {"weight": "tokens"},
        }
    )


def test_processes_end_with_the_bits_of_a_run_in_memory(tmp_path: Path) -> None:
    """Two real ranks and threads give one anchor, which the coordinator has too."""
    given = settings(2, 3)
    with serving(tmp_path / "run", given) as coordinator:
        ranks = start(
            2, tmp_path, coordinator, silence_s=SILENCE_S, live=train_to_the_end
        )
        found = {rank.until("digests")[1] for rank in ranks}
        kept = tuple(state.digest for state in coordinator._service.weights)
    memory = MemoryRun(given)

    assert found == set(train({"i0": memory, "i1": memory}, MODEL).values())
    assert found == {kept}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_is_named_on_every_other(
    tmp_path: Path, how: signal.Signals, victim: int
) -> None:
    """Within the silence and some seconds, whoever leads; and the run goes on.

    What was committed is at the coordinator, whole, for who joins again.
    """
    with serving(tmp_path / "run", settings(3, 1000)) as coordinator:
        ranks = start(
            3, tmp_path, coordinator, silence_s=SILENCE_S, live=train_to_the_end
        )
        for rank in ranks:
            rank.until("round")
        died_s = time.monotonic()
        os.kill(ranks[victim].pid, how)
        try:
            told = [_raised(rank) for at, rank in enumerate(ranks) if at != victim]
        finally:
            ranks[victim].process.kill()
        state, _ = coordinator._threaded_service.look()

        for raised_s, kind, text in told:
            assert kind == "Unreachable"
            assert f"Island 'i{victim}' (rank {victim}) of the collective" in text
            assert raised_s - died_s < NAMED_S
        for fragment, round in enumerate(state.rounds):
            assert not round.staged
            assert round.base == coordinator._service.weights[fragment].digest


def _raised(rank: Rank) -> tuple[float, str, str]:
    while (said := rank.next())[0] != "raised":
        pass
    _, raised_s, kind, text = said
    return raised_s, kind, text
