"""The learning rate on the run's clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
)

import atoll.torch
from atoll.checkpoint import COMPONENTS, Policy
from atoll.errors import AtollWarning, UsageError
from atoll.exchange import MemoryRun
from atoll.island.progress import RunClock
from atoll.torch import WSD, Island
from atoll.torch.island import length_of
from atoll.torch.lr_schedule import decay_of, require_room
from tests.torch.runs import Weights, run_of, sgd, train
from tests.torch.test_resume import die

pytestmark = pytest.mark.torch


def rates_of(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler,
    island: Island,
    *,
    steps: int,
    tokens: int = 0,
) -> list[float]:
    """Make inner steps, and return the rate that each of them was made with."""
    rates = []
    for _ in range(steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        island.report(tokens=tokens)
        train(model, optimizer)
        scheduler.step()
    return rates


def solo(run: MemoryRun, *, steps: int, tokens: int = 0, **wsd: Any) -> list[float]:
    """Return the rates of the only island of a run, whose own rate is 1."""
    model = Weights(0.0)
    optimizer = sgd(model)
    with atoll.torch.join(model, optimizer, run, on_end="flag") as island:
        scheduler = WSD(optimizer, island, **wsd)
        rates = rates_of(
            model, optimizer, scheduler, island, steps=steps, tokens=tokens
        )
    return rates


def test_the_rate_rises_stays_and_falls_to_the_end() -> None:
    """Warm-up of 4 steps; of 20 steps the last 4 fall, each by a fifth."""
    rates = solo(run_of(every=4, run={"end_rounds": 5}), steps=20, warmup=4, decay=4)

    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:16] == [1.0] * 12
    assert rates[16:] == pytest.approx([0.8, 0.6, 0.4, 0.2])


def test_a_rate_does_not_fall_by_itself() -> None:
    """Without a decay, and without an end, there is no last phase."""
    assert solo(run_of(every=2, run={"end_rounds": 4}), steps=8, warmup=0) == [1.0] * 8
    assert solo(run_of(every=2), steps=8, warmup=0, decay=3) == [1.0] * 8


def test_a_decay_begins_with_the_first_inner_step_of_its_round() -> None:
    """Round 3 of 4 steps begins after step 8; it falls for `decay` steps, and stays."""
    run = run_of(every=4, run={"decay_round": 3})
    rates = solo(run, steps=14, warmup=0, decay=3)

    assert rates[:8] == [1.0] * 8
    assert rates[8:] == pytest.approx([0.75, 0.5, 0.25, 0.25, 0.25, 0.25])


def test_a_decay_of_a_round_ends_with_the_run() -> None:
    """One without a length takes all that is left; a longer one is cut short."""
    for decay in (0, 100):
        run = run_of(every=2, run={"decay_round": 2, "end_rounds": 3})
        rates = solo(run, steps=6, warmup=0, decay=decay)
        assert rates == pytest.approx([1.0, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_a_late_island_has_the_runs_rate_after_a_short_warm_up() -> None:
    """It rises in `rewarm_steps` to what the others have, and not from the start."""
    run = run_of(every=8, run={"end_rounds": 4})
    first, late = Weights(0.0), Weights(0.0)
    with atoll.torch.join(first, one := sgd(first), run, island="a") as a:
        mine = WSD(one, a, warmup=4, decay=16)
        rates_of(first, one, mine, a, steps=17)
        with atoll.torch.join(late, two := sgd(late), run, island="b") as b:
            theirs = WSD(two, b, warmup=4, decay=16, rewarm_steps=4)
            assert b.run_steps >= 16
            others = rates_of(first, one, mine, a, steps=6)
            rates = rates_of(late, two, theirs, b, steps=6)

    # Both are at schedule step 17, and of the decay from 16 to 32 at its second step.
    assert others == pytest.approx([1 - n / 17 for n in range(2, 8)])
    shares = [rate / other for rate, other in zip(rates, others, strict=True)]
    assert shares == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])
    assert rates[3:] == others[3:]


def test_moments_that_are_there_need_no_warm_up() -> None:
    """An island whose optimizer was restored takes the run's rate at once."""
    run = run_of(every=2)
    solo(run, steps=4, warmup=0)
    model = Weights(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    train(model, optimizer)
    with atoll.torch.join(model, optimizer, run) as island:
        scheduler = WSD(optimizer, island, warmup=0)

        assert scheduler.get_last_lr() == [1.0]


def test_tokens_of_all_islands_are_a_clock() -> None:
    """10 tokens a step: a warm-up of 40 takes 4 steps, and 60 of 120 are decayed."""
    run = run_of(every=2, run={"end_tokens": 120})
    rates = solo(run, steps=12, tokens=10, unit="tokens", warmup=40, decay=60)

    assert rates[:5] == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0])
    assert rates[5:7] == [1.0, 1.0]
    assert rates[7:] == pytest.approx([5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])


def test_the_clock_of_tokens_never_goes_back() -> None:
    """Smaller batches slow it down, though it had been reckoned to be further."""
    model = Weights(0.0)
    optimizer, run = sgd(model), run_of(every=4)
    with atoll.torch.join(model, optimizer, run) as island:
        wsd = WSD(optimizer, island, unit="tokens", warmup=1000)
        rates = rates_of(model, optimizer, wsd, island, steps=6, tokens=100)
        rates += rates_of(model, optimizer, wsd, island, steps=8, tokens=1)

    assert rates == sorted(rates)
    assert rates[-1] < 1.0


def test_a_clock_of_tokens_needs_tokens() -> None:
    """A rate that nobody moves would stay at zero for ever: that is an error."""
    with pytest.raises(UsageError, match=r"no tokens have been reported\. Call island"):
        solo(run_of(every=2), steps=2, unit="tokens", warmup=10)


@pytest.mark.parametrize(
    ("run", "wsd", "message"),
    [
        (
            {"end_rounds": 5},
            {"warmup": 6, "decay": 5},
            r"warmup=6 and decay=5 are longer than the run, which ends after 10 inner",
        ),
        (
            {"end_tokens": 50},
            {"warmup": 60, "unit": "tokens"},
            r"which ends after 50 tokens\. Make one of them shorter, or let the run",
        ),
        (
            {"decay_round": 5},
            {"warmup": 1},
            r"decay_round=5 begins .* is unknown\. Set run\.end_rounds, or give WSD",
        ),
        (
            {"decay_round": 5},
            {"warmup": 1, "decay": 100, "unit": "tokens"},
            r"Set run\.end_rounds, or give WSD\(\.\.\., decay=STEPS\) with unit='inner",
        ),
        ({}, {"warmup": -1}, r"warmup=-1 must be a whole number of at least 0"),
        ({}, {"warmup": 0.5}, r"warmup=0\.5 must be a whole number"),
        ({}, {"warmup": 1, "unit": "epochs"}, r"unit='epochs' is neither 'inner_st"),
    ],
)
def test_what_cannot_be_is_refused(
    run: dict[str, object], wsd: dict[str, Any], message: str
) -> None:
    """Each impossible combination says what to set instead."""
    with pytest.raises(UsageError, match=message):
        solo(run_of(every=2, run=run), steps=1, **wsd)


def lives(run: MemoryRun, folder: Path, stops: list[int]) -> list[float]:
    """Train up to each of the inner steps in a life of its own; return all rates."""
    rates: dict[int, float] = {}
    for stop in stops:
        torch.manual_seed(3)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        policy = Policy(folder, every_rounds=1, components=COMPONENTS)
        island = atoll.torch.join(
            model, optimizer, run, island="a", checkpoint=policy, on_end="flag"
        )
        wsd = WSD(optimizer, island, unit="tokens", warmup=90, decay=60)
        while island.inner_steps < stop:
            rates[island.run_steps] = float(wsd.get_last_lr()[0])
            model(torch.ones(3)).sum().backward()
            island.report(tokens=10 + island.inner_steps % 3)
            optimizer.step()
            wsd.step()
            optimizer.zero_grad()
        die(island)
    return [rates[step] for step in sorted(rates)]


def test_rounds_of_an_asynchronous_run_tell_no_steps() -> None:
    """A decay by steps is refused there, and a warm-up is not measured by rounds."""
    clock = RunClock(rounds=3, tokens=600, step=20, last_round=4)
    terms: dict[str, Any] = {"is_steps": True, "sync_every": None}
    with pytest.raises(UsageError, match=r"decay=5 .* no fixed steps\. Use unit='tok"):
        require_room(clock, warmup=0, decay=5, **terms)

    # The last round is 4, of 5 steps each in a synchronous run: 100 would not fit.
    require_room(clock, warmup=100, decay=0, **terms)
    assert decay_of(clock, decay=0, **terms).factor(10**6, 0.0) == 1.0


def test_an_asynchronous_decay_is_measured_in_tokens() -> None:
    """It ends with the run's end_tokens, like that of a synchronous run."""
    clock = RunClock(tokens=600, step=20, end_tokens=1000)
    terms: dict[str, Any] = {"is_steps": False, "sync_every": None}

    require_room(clock, warmup=500, decay=500, **terms)
    # From 500 to 1000: at 750 a half is left.
    assert decay_of(clock, decay=500, **terms).factor(0, 750.0) == 0.5


def test_the_clock_of_tokens_follows_the_islands_own_steps_in_async() -> None:
    """All islands' tokens per schedule step of this one, whatever rounds are open."""
    # 600 tokens in the 20 steps of this island: 30 per step, 690 after 23.
    clock = RunClock(rounds=7, tokens=600, step=20)
    assert clock.tokens_at(23, sync_every=None) == 690.0
    # 7 rounds of 5 steps in a synchronous run: 600 * 23 / 35.
    assert clock.tokens_at(23, sync_every=5) == pytest.approx(600 * 23 / 35)

    # Rounds of single updates may count without any island in every fragment.
    assert RunClock(rounds=1, step=4).tokens_at(5, sync_every=None) is None
    assert RunClock(rounds=0).tokens_at(5, sync_every=5) is None


@pytest.mark.parametrize("killed_at", [3, 6, 11])
def test_a_killed_island_goes_on_with_the_same_rates(
    tmp_path: Path, killed_at: int
) -> None:
    """Its schedule is in its checkpoint without a word, and goes on to the bit."""
    plain = lives(run_of(every=4, run={"end_tokens": 220}), tmp_path / "plain", [20])
    killed = lives(
        run_of(every=4, run={"end_tokens": 220}), tmp_path / "killed", [killed_at, 20]
    )

    assert killed == plain


def test_a_state_is_plain_and_survives_json() -> None:
    """No pickle is needed, and a scheduler that takes it goes on with its rate."""
    model = Weights(0.0)
    optimizer = sgd(model)
    with atoll.torch.join(model, optimizer, run_of(every=100)) as island:
        wsd = WSD(optimizer, island, warmup=10)
        rates_of(model, optimizer, wsd, island, steps=3)
        state = json.loads(json.dumps(wsd.state_dict()))
        again = WSD(optimizer, island, warmup=10)
        again.load_state_dict(state)

        assert again.state_dict() == wsd.state_dict()
        assert again.get_last_lr() == [0.4]
        with pytest.raises(UsageError, match="of 2 param groups, and the optimizer"):
            again.load_state_dict({**state, "base_lrs": [1.0, 2.0]})


def test_groups_and_optimizers_have_rates_of_their_own() -> None:
    """One factor for all of them; each param group keeps its own rate."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    slow = torch.optim.SGD(
        [
            {"params": [model[0].weight], "lr": 0.5},
            {"params": [model[0].bias], "lr": torch.tensor(0.25)},
        ]
    )
    fast = torch.optim.SGD(model[1].parameters(), lr=2.0)
    run = run_of(every=100)
    with atoll.torch.join(model, [slow, fast], run) as island:
        several = [WSD(each, island, warmup=4) for each in (slow, fast)]
        model(torch.ones(1)).sum().backward()
        slow.step()
        fast.step()
        for each in several:
            each.step()

        assert [float(g["lr"]) for g in slow.param_groups] == [0.25, 0.125]
        assert fast.param_groups[0]["lr"] == 1.0


def test_it_is_a_scheduler_among_others() -> None:
    """In a sequence it begins at its milestone, and on the clock of the run."""
    model = Weights(0.0)
    optimizer = sgd(model)
    with atoll.torch.join(model, optimizer, run_of(every=100)) as island:
        still = ConstantLR(optimizer, factor=0.125, total_iters=100)
        sequence = SequentialLR(
            optimizer, [still, WSD(optimizer, island, warmup=8)], milestones=[2]
        )
        rates = rates_of(model, optimizer, sequence, island, steps=5)
        chain = ChainedScheduler([WSD(optimizer, island, warmup=8)], optimizer)
        rates += rates_of(model, optimizer, chain, island, steps=2)

    assert rates == [0.125, 0.125, 3 / 8, 4 / 8, 5 / 8, 6 / 8, 7 / 8]


def fixed(optimizer: torch.optim.Optimizer, kind: str) -> Any:
    from transformers import optimization

    match kind:
        case "cosine":
            return CosineAnnealingLR(optimizer, T_max=70)
        case "one cycle":
            return OneCycleLR(optimizer, max_lr=1.0, total_steps=70)
        case "transformers":
            return optimization.get_cosine_schedule_with_warmup(optimizer, 10, 70)
        case "transformers wsd":
            return optimization.get_wsd_schedule(optimizer, 10, 20, 70)
    return LambdaLR(optimizer, lambda step: 1.0)


@pytest.mark.parametrize(
    "kind", ["cosine", "one cycle", "transformers", "transformers wsd"]
)
def test_a_schedule_that_ends_is_warned_of_in_a_run_that_does_not(kind: str) -> None:
    """A cosine of 70 steps is told of at the first step, and by name."""
    model = Weights(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    scheduler = fixed(optimizer, kind)
    name = type(scheduler).__name__
    with (
        atoll.torch.join(model, optimizer, run_of(every=100)),
        pytest.warns(AtollWarning, match=f"{name} ends after 70 steps of .*WSD"),
    ):
        train(model, optimizer)


def test_nothing_is_said_of_schedules_that_fit() -> None:
    """Neither of one that never ends, nor of a cosine in a run that ends."""
    model = Weights(0.0)
    optimizer = sgd(model)
    assert length_of(fixed(optimizer, "plain")) is None
    with atoll.torch.join(model, optimizer, run_of(every=100)):
        train(model, optimizer)
    cosine = fixed(optimizer, "cosine")
    with atoll.torch.join(model, optimizer, run_of(every=2, run={"end_rounds": 35})):
        train(model, optimizer)
        assert length_of(cosine) == 70
