"""A run beside the model: advice only where both agree."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.errors import UsageError
from atoll.plan import ExchangeKind, IslandLink, MeasuredRun, compare
from atoll.settings import RunSettings

LINK = IslandLink(up_bits_per_s=1e8, down_bits_per_s=1e8, delay_s=0.04)
SETTINGS = RunSettings.from_dict(
    {
        "sync": {"sync_every": 40, "num_fragments": 4},
        "wire": {"up": "e3m0", "down": "int8"},
    }
)
FRAGMENT_BYTES = 507_813  # 500,000 values in int8, and the scale of the last block


def status(
    *rows: tuple[str, float | None, float | None], fragments: int = 4
) -> dict[str, Any]:
    """Return a status document: islands with pace and utilisation."""
    return {
        "name": "lagoon",
        "islands": [
            {"island": name, "step_s": step_s, "utilisation": share}
            for name, step_s, share in rows
        ],
        "recent": [
            {"fragment": fragment, "round": 9, "bytes": FRAGMENT_BYTES}
            for fragment in range(fragments)
        ],
    }


def measured(document: dict[str, Any], **rest: Any) -> MeasuredRun:
    """Return the measured values of a run at a coordinator."""
    return MeasuredRun.of(document, SETTINGS, kind=ExchangeKind.COORDINATOR, **rest)


def test_the_model_is_as_large_as_its_outcomes() -> None:
    """Bytes of the last outcome of each fragment, by the bits of the codec."""
    run = measured(status(("a", 0.1, 0.8), ("b", 0.1, 0.8)))

    assert run.workload.parameters == pytest.approx(2_000_000, rel=1e-4)
    assert run.workload.steps_s == (0.1, 0.1)
    assert measured(status(("a", 0.1, 0.8)), parameters=5).workload.parameters == 5


def test_a_run_that_agrees_gets_other_settings() -> None:
    """81.7 % by the model and 81 % measured: overlap is the first thing to change."""
    rounds = [
        {"round": 8, "arrivals": {"a": 0.1, "b": 0.4}},
        {"round": 9, "arrivals": {"a": 0.1, "b": None}},
    ]
    run = measured(
        status(("a", 0.1, 0.81), ("b", 0.1, 0.81)), history={"rounds": rounds}
    )
    comparison = compare(run, LINK)

    first, *_, last = comparison.what_ifs
    assert comparison.is_explained
    assert first.change == "sync.overlap_steps 0 → 1"
    # The stall of 224 ms becomes 124 ms: 4 / (4 + 4 x 0.124).
    assert first.utilisation == pytest.approx(0.89, abs=0.005)
    assert last.change == "run.patience 3 → 2"
    assert last.utilisation is None
    lines = comparison.lines()
    assert lines[0] == "lagoon, measured over rounds 8 to 9"
    assert lines[1].startswith("busy      81.0 % measured, 81.7 % by the model: 0.7")
    assert lines[2].startswith("what if   sync.overlap_steps 0 → 1")
    assert comparison.document()["agrees"] is True


def test_a_run_more_than_five_points_apart_gets_no_advice() -> None:
    """The unexplained seconds are named, with the spread of arrivals beside them."""
    rounds = [{"round": 9, "arrivals": {"a": 0.1, "b": 3.1}}]
    run = measured(status(("a", 0.1, 0.5), ("b", 0.1, 0.5)), history={"rounds": rounds})
    comparison = compare(run, LINK)

    # A round of 8 s instead of 4.9 s, and its updates arrive within 3 s.
    text = comparison.lines()[-1]
    assert comparison.what_ifs == ()
    assert "more than 5 points, so there is no advice" in text
    assert "About 3.1 s of a round are not explained" in text
    assert "arrive within 3.0 s: islands wait for late ones" in text
    assert comparison.document()["what_ifs"] == []


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.5, "the link is slower than given"), (0.95, "slower than the real one")],
)
def test_the_given_link_may_be_wrong(share: float, text: str) -> None:
    """In both directions, where updates arrive together."""
    rounds = [{"round": 9, "arrivals": {"a": 0.1, "b": 0.11}}]
    run = measured(
        status(("a", 0.1, share), ("b", 0.1, share)), history={"rounds": rounds}
    )

    assert text in compare(run, LINK).lines()[-1]


def test_a_slow_island_is_named() -> None:
    """Without it the others would be busier; shorter windows would help as well."""
    run = measured(status(("a", 0.1, 0.46), ("b", 0.1, 0.46), ("oregon", 0.2, 0.9)))
    changes = {row.change: row.utilisation for row in compare(run, LINK).what_ifs}

    # 8 s at the slowest, and four stalls of 224 ms: 4 / 8.9 for two of three.
    without = "without oregon (step 0.2 s, others 0.1)"
    assert changes[without] == pytest.approx(0.817, abs=0.005)
    assert changes["sync.dynamic_local_updates = true"] is not None


def test_a_calm_run_needs_nothing() -> None:
    """No change gains half a point."""
    settings = SETTINGS.with_values({"sync.overlap_steps": 8})
    run = MeasuredRun.of(
        status(("a", 0.1, 0.99)), settings, kind=ExchangeKind.COORDINATOR
    )

    assert compare(run, LINK).lines()[-1].startswith("No change of these settings")


def test_a_run_without_reports_is_refused() -> None:
    """It tells to wait, or to give the numbers."""
    with pytest.raises(UsageError, match="No island of the run has reported"):
        measured(status(("a", None, None), ("b", 0.1, None)))


def test_a_run_without_outcomes_needs_the_size() -> None:
    """A fragment without an outcome hides the model's size."""
    with pytest.raises(UsageError, match=r"of 3 of 4 fragments.*Give --params"):
        measured(status(("a", 0.1, 0.8), fragments=3))


def test_an_ended_run_has_its_pace_in_its_history() -> None:
    """Seconds without the waits, by inner steps."""
    curves = {
        "a": {"seconds": [5, 50.0, None], "wait_s": [1, 10.0], "inner_steps": [9, 400]},
        "b": {"seconds": [None], "wait_s": [None], "inner_steps": [None]},
    }
    run = measured(
        status(("a", None, 0.8), ("b", None, 0.8)),
        history={"curves": {"islands": curves}},
    )

    assert run.islands == ("a",)
    assert run.workload.steps_s == (0.1,)
