"""What the parts of the demo found out becomes one set of results."""

from __future__ import annotations

import json
import math

import pytest

from atoll.demo.results import ring_bytes, summarise, thin
from tests.demo.small import SETTINGS, STATUS, results, trained

pytestmark = pytest.mark.torch


def test_a_ring_of_four_sends_one_and_a_half_gradients_a_step() -> None:
    """2(M - 1)/M is 1.5: ten parameters, 3 steps and 2 bytes are 90 bytes."""
    assert ring_bytes(10, 4, 3, 2) == 90


def test_the_order_in_which_islands_end_does_not_matter() -> None:
    """Results are sorted by shard."""
    first, second = trained()

    assert summarise([second, first], SETTINGS) == summarise([first, second], SETTINGS)


def test_the_ratio_counts_both_ways() -> None:
    """Data parallel sends and receives as much; islands receive more than they send."""
    found = results()
    moved_bytes = found["bytes_up"] + found["bytes_down"]

    assert found["ratio_bf16"] == 2 * found["ring_bytes_bf16"] / moved_bytes
    assert found["ratio_fp32"] == pytest.approx(2 * found["ratio_bf16"])


def test_loss_and_perplexity_are_those_of_the_last_anchor() -> None:
    """The first shard judged it."""
    found = results()

    assert found["loss"] == trained()[0]["held_out"][-1][1]
    assert found["perplexity"] == math.exp(found["loss"])


def test_stall_is_the_share_of_the_time_that_islands_waited() -> None:
    """One that waited 1 s of 10 and one that waited 2 s of 20 make a tenth."""
    first, second = trained()
    first["wait_s"], first["seconds"] = 1.0, 10.0
    second["wait_s"], second["seconds"] = 2.0, 20.0

    assert summarise([first, second], SETTINGS)["stall_share"] == pytest.approx(0.1)


def test_the_coordinators_status_is_summed_over_islands() -> None:
    """Verdicts of all islands, and the bytes as the coordinator counted them."""
    found = summarise(trained(), SETTINGS, status=STATUS)["coordinator"]

    assert found is not None
    assert (found["counted"], found["late"], found["refused"]) == (17, 1, 2)
    assert (found["bytes_in"], found["bytes_out"]) == (1000, 3000)


def test_a_run_in_memory_has_no_coordinator_and_needs_no_comparison() -> None:
    """Both may be left out; the bytes of data parallel are worked out all the same."""
    found = summarise(trained(), SETTINGS)

    assert found["coordinator"] is None
    assert found["parallel"] is None
    assert found["ratio_bf16"] > 1


def test_results_can_be_written_as_json() -> None:
    """A file of them holds everything that the report needs."""
    assert json.loads(json.dumps(results()))["rounds"] == 4


def test_a_thinned_curve_keeps_its_means() -> None:
    """Six points in stretches of two: (0, 1) becomes 0.5, and so on."""
    points = [(float(n), 10.0 * n) for n in range(6)]

    assert thin(points, max_points=3) == [(0.5, 5.0), (2.5, 25.0), (4.5, 45.0)]
    assert thin(points, max_points=6) == points
