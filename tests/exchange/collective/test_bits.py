"""A collective gives the bits of a run in memory, for any owner of a share."""

from __future__ import annotations

import pytest

from atoll.exchange import MemoryRun
from atoll.exchange.calls import OutcomeCall, PublishCall
from atoll.settings import RunSettings
from atoll.testing import vector_model
from atoll.wire import PIECE_ELEMENTS
from tests.exchange.collective.ranks import (
    Bureau,
    attached,
    collective,
    runs_of,
    train,
)

MODEL = vector_model({"h.0.w": (600_000,), "h.1.w": (90_000,), "h.2.w": (1_000,)})
ROUNDS = 3


def settings(
    islands: int, up: str, down: str, **more: dict[str, object]
) -> RunSettings:
    """Return fragments of several pieces and of one, and an overlap."""
    said: dict[str, dict[str, object]] = {
        "run": {"start_islands": islands, "end_rounds": ROUNDS, "quorum": islands},
        "sync": {"sync_every": 6, "num_fragments": 3, "overlap_steps": 2},
        "wire": {"up": up, "down": down},
        "outer": {"weight": "tokens"},
    }
    for table, values in more.items():
        said[table] |= values
    return RunSettings.from_dict(said)


def both(given: RunSettings, islands: int) -> tuple[set[object], set[object], Bureau]:
    """Return the digests of a run in memory, and of a collective."""
    memory, bureau = MemoryRun(given), Bureau(given)
    ranks = collective(bureau, islands)
    one = train(dict.fromkeys(ranks, memory), MODEL)
    two = train(ranks, MODEL)
    assert len(one) == len(two) == islands
    return set(one.values()), set(two.values()), bureau


CODECS = ["fp32", "bf16", "int8", "e3m0", "topk-2bit"]


@pytest.mark.parametrize("up", CODECS)
@pytest.mark.filterwarnings("ignore::atoll.errors.AtollWarning")
def test_every_codec_gives_the_bits_of_a_run_in_memory(up: str) -> None:
    """Three ranks, several fragments, overlap, weights by tokens and error feedback."""
    down = up if up in ("fp32", "int8") else "bf16"
    memory, found, bureau = both(settings(3, up, down), 3)

    assert found == memory
    assert len(found) == 1
    assert bureau.agreed() == 3 * ROUNDS


@pytest.mark.parametrize("islands", [1, 2, 4])
def test_any_number_of_ranks_gives_the_bits_of_a_run_in_memory(islands: int) -> None:
    """More ranks than pieces, and fewer: the mean is summed in the order of names."""
    memory, found, bureau = both(settings(islands, "bf16", "bf16"), islands)

    assert found == memory
    assert len(found) == 1
    assert bureau.agreed() == 3 * ROUNDS


@pytest.mark.parametrize("merge", ["radial", "trimmed"])
def test_every_merge_gives_the_bits_of_a_run_in_memory(merge: str) -> None:
    """A radial mean needs whole tensors, so that one rank reduces it."""
    given = settings(3, "fp32", "bf16", outer={"merge": merge, "weight": "uniform"})
    memory, found, _ = both(given, 3)

    assert found == memory


def test_the_coordinator_holds_what_the_islands_hold() -> None:
    """Its state after the last round has the digest of everybody's anchor."""
    _, found, bureau = both(settings(2, "int8", "bf16"), 2)
    states = tuple(state.digest for state in bureau.service.weights)

    assert found == {states}


@pytest.mark.parametrize("islands", [2, 4])
def test_each_rank_sends_all_but_its_own_share(islands: int) -> None:
    """2 (N-1)/N payloads up and as many down, within a percent for headers.

    The coordinator takes in one payload for all of them, and gives out none.
    """
    given = settings(islands, "fp32", "fp32", sync={"num_fragments": 1})
    bureau, runs = Bureau(given), runs_of(islands)
    model = vector_model({"w": (8 * PIECE_ELEMENTS,)})
    train(attached(bureau, runs), model)
    payload = 4 * 8 * PIECE_ELEMENTS * ROUNDS
    share = 2 * (islands - 1) / islands

    for run in runs:
        costs = run.costs()
        assert costs["atoll/collective_bytes_up"] == pytest.approx(
            share * payload, rel=0.01
        )
        assert costs["atoll/collective_bytes_down"] == pytest.approx(
            share * payload, rel=0.01
        )
    assert not any(isinstance(call, PublishCall | OutcomeCall) for call in bureau.calls)
    assert bureau.agreed() == ROUNDS
