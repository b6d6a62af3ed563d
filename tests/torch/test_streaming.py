"""Fragments in flight while training goes on: overlap, rebase, mix, many fragments."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial

import pytest

import atoll.torch
from atoll.errors import AtollWarning
from atoll.exchange import MemoryRun
from tests.torch.runs import Blocks, Weights, anchor_of, run_of, sgd, together, train

pytestmark = pytest.mark.torch


def overlapping(every: int, overlap: int, **sync: object) -> Mapping[str, object]:
    return {"sync_every": every, "overlap_steps": overlap, **sync}


def test_rebase_keeps_what_was_learnt_in_flight() -> None:
    """Local is the anchor plus local now minus local at the seal, for each island."""
    run = run_of(2, sync=overlapping(4, 2))

    def live(name: str, slope: float) -> list[object]:
        model = Weights(32.0)
        seen = []
        with atoll.torch.join(model, optimizer := sgd(model), run, island=name) as i:
            for _ in range(6):
                train(model, optimizer, slope=slope)
                seen.append(model.w.item())
            i.leave()
        return [*seen, i.round]

    a, b = together(partial(live, "a", 1.0), partial(live, "b", 3.0))

    # Sealed after step 4: pseudo-gradients 4 and 12, mean 8, anchor 24. Taken after
    # step 6: a is at 26, 2 below its seal: 24 - 2. b is at 14, 6 below: 24 - 6.
    assert a == [31.0, 30.0, 29.0, 28.0, 27.0, 22.0, 1]
    assert b == [29.0, 26.0, 23.0, 20.0, 17.0, 18.0, 1]


def test_work_in_flight_counts_in_the_next_round_once() -> None:
    """With outer lr 1 nothing is lost: the anchor is always at work already sealed."""
    run, model = run_of(sync=overlapping(4, 3)), Weights(32.0)
    with atoll.torch.join(model, optimizer := sgd(model), run):
        train(model, optimizer, steps=11)
        # Sealed after 4 and 8, taken after 7 and 11: anchor 32 - 8, local 32 - 11.
        assert (anchor_of(run), model.w.tolist()) == ([24.0], [21.0])


def test_mix_blends_by_keep_local() -> None:
    """Local is keep * local + (1 - keep) * anchor, at the step it is taken."""
    run = run_of(
        sync=overlapping(4, 2, adopt="mix", keep_local=0.25), outer={"lr": 0.5}
    )
    model = Weights(32.0)
    with atoll.torch.join(model, optimizer := sgd(model), run):
        train(model, optimizer, steps=6)

        # Sealed at 28: anchor 32 - 4/2 = 30. Taken at 26: 26/4 + 3 * 30/4 = 29.
        assert model.w.tolist() == [29.0]
        train(model, optimizer, steps=2)

    # Sealed again at 27: pseudo-gradient 3, anchor 30 - 3/2.
    assert anchor_of(run) == [28.5]


def test_mix_that_keeps_nothing_discards_the_flight_and_says_so() -> None:
    """The warning tells how many steps; the anchor shows that they are gone."""
    with pytest.warns(AtollWarning, match="discards the 2 inner steps made in flight"):
        run = run_of(sync=overlapping(4, 2, adopt="mix"))
    model = Weights(32.0)
    with atoll.torch.join(model, optimizer := sgd(model), run):
        train(model, optimizer, steps=8)

    # Sealed at 28, overwritten after step 6, then two steps by 1: 26, not 24.
    assert (anchor_of(run), model.w.tolist()) == ([26.0], [26.0])


def test_each_fragment_has_its_own_round_and_window() -> None:
    """Fragment p of P is sent after ceil((p + 1) H / P) steps, every H."""
    run, model = run_of(sync={"sync_every": 4, "num_fragments": 2}), Blocks(4, 16.0)
    rounds = []
    with atoll.torch.join(model, optimizer := sgd(model), run) as island:
        for _ in range(8):
            train(model, optimizer)
            rounds.append([run.state(f).header.round for f in (0, 1)])
            assert island.round == min(rounds[-1])

        # Blocks 0 and 2 after steps 2 and 6, blocks 1 and 3 after steps 4 and 8.
        assert [first for first, _ in rounds] == [0, 1, 1, 1, 1, 2, 2, 2]
        assert [last for _, last in rounds] == [0, 0, 0, 1, 1, 1, 1, 2]
        assert (anchor_of(run, 0), anchor_of(run, 1)) == ([10.0, 10.0], [8.0, 8.0])


def several_in_flight(run: MemoryRun, name: str, slope: float) -> list[float]:
    model = Blocks(4, 64.0)
    with atoll.torch.join(model, optimizer := sgd(model), run, island=name):
        while True:
            train(model, optimizer, slope=slope)
    return model.values()


def test_several_fragments_may_be_in_flight_at_once() -> None:
    """With 4 fragments sent 2 steps apart and 5 steps of overlap, 3 are in the air."""
    run = run_of(
        2,
        run={"end_rounds": 2},
        sync=overlapping(8, 5, num_fragments=4, fragment_order="sequential"),
    )

    a, b = together(
        partial(several_in_flight, run, "a", 1.0),
        partial(several_in_flight, run, "b", 3.0),
    )

    # Fragment p is sealed after steps 2(p+1) and 2(p+1) + 8; the mean step is 2. Its
    # second seal holds everything since the first, so the anchor is at
    # 64 - 2 * (8 + 2(p+1)) = 44, 40, 36, 32.
    anchors = [anchor_of(run, fragment)[0] for fragment in range(4)]
    assert anchors == [44.0, 40.0, 36.0, 32.0]
    # The last is taken after step 16 + 5: a has made 21 - 8 - 2(p+1) steps since.
    steps_since = [11, 9, 7, 5]
    assert a == [anchor - s for anchor, s in zip(anchors, steps_since, strict=True)]
    assert b == [anchor - 3 * s for anchor, s in zip(anchors, steps_since, strict=True)]


def test_more_fragments_than_inner_steps() -> None:
    """With H = 2 and P = 3, one goes after odd steps and two after even ones."""
    run, model = run_of(sync={"sync_every": 2, "num_fragments": 3}), Blocks(3, 16.0)
    rounds = []
    with atoll.torch.join(model, optimizer := sgd(model), run):
        for _ in range(4):
            train(model, optimizer)
            rounds.append([run.state(f).header.round for f in range(3)])

        # ceil((p + 1) * 2 / 3) = 1, 2, 2.
        assert rounds == [[1, 0, 0], [1, 1, 1], [2, 1, 1], [2, 2, 2]]
        assert [anchor_of(run, f) for f in range(3)] == [[13.0], [12.0], [12.0]]


def test_overlap_across_the_end_of_a_run() -> None:
    """The last round is taken overlap steps after its seal, and then the loop ends."""
    run = run_of(run={"end_rounds": 2}, sync=overlapping(3, 2))
    model = Weights(16.0)
    with atoll.torch.join(model, optimizer := sgd(model), run) as island:
        train(model, optimizer, steps=99)

    # Sealed after steps 3 and 6; the two steps made in flight are the model's own.
    assert (island.inner_steps, island.round) == (8, 2)
    assert (anchor_of(run), model.w.tolist()) == ([10.0], [8.0])
    assert island.metrics()["atoll/not_counted_steps"] == 2


def test_the_wait_is_for_outcomes_only() -> None:
    """A step between a seal and its outcome waits for nobody."""
    run = run_of(2, sync=overlapping(2, 1))
    models = [Weights(8.0), Weights(8.0)]
    islands = [
        atoll.torch.join(model, sgd(model), run, island=name, count="manual")
        for model, name in zip(models, "ab", strict=True)
    ]
    # One thread plays both islands: were a to wait at its seal, b would never publish.
    for island in islands:
        island.stepped()
        island.stepped()
    for island in islands:
        island.stepped()

    assert [island.round for island in islands] == [1, 1]
    for island in islands:
        island.leave()


@pytest.mark.parametrize(
    ("up", "down"), [("bf16", "int8"), ("e3m0", "bf16"), ("topk-2bit", "fp32")]
)
def test_every_codec_streams(up: str, down: str) -> None:
    """Islands agree bit for bit on every fragment, whatever the wire loses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AtollWarning)
        run = run_of(
            2,
            run={"end_rounds": 3},
            sync=overlapping(4, 2, num_fragments=2),
            wire={"up": up, "down": down},
            outer={"optimizer": "sgd", "lr": 0.5},
        )

    def live(name: str, slope: float) -> str:
        model = Blocks(4, 1.0)
        with atoll.torch.join(model, optimizer := sgd(model), run, island=name) as i:
            while True:
                train(model, optimizer, slope=slope)
        return i.digest

    a, b = together(partial(live, "a", 0.125), partial(live, "b", 0.375))
    assert a == b
    assert all(value < 1.0 for f in (0, 1) for value in anchor_of(run, f))
