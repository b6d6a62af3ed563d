"""What a loop can ask its island: the anchor, an evaluation, metrics, a sync now."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch

import atoll.torch
from atoll.errors import UsageError
from tests.torch.runs import Weights, anchor_of, bits, run_of, sgd, together, train

pytestmark = pytest.mark.torch


class Everything(torch.nn.Module):
    """fp32, bf16 and fp16 parameters, a saved buffer and one that is not."""

    saved: torch.Tensor
    unsaved: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.full = torch.nn.Parameter(torch.tensor([1.0, -0.0, 1e-40]))
        self.brain = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.bfloat16))
        self.short = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float16))
        self.frozen = torch.nn.Parameter(torch.tensor([7.0]), requires_grad=False)
        self.drop = torch.nn.Dropout(0.5)
        self.register_buffer("saved", torch.tensor([2.0]))
        self.register_buffer("unsaved", torch.tensor([3.0]), persistent=False)

    def forward(self, slope: float) -> torch.Tensor:
        trained = (self.full, self.brain, self.short)
        return torch.stack([(p.float() * slope).sum() for p in trained]).sum()


def everything(model: Everything, optimizer: torch.optim.Optimizer) -> list[bytes]:
    """Return all that an evaluation must leave as it was, bit for bit."""
    tensors = [*model.parameters(), *model.buffers()]
    for state in optimizer.state.values():
        tensors += [
            value for value in state.values() if isinstance(value, torch.Tensor)
        ]
    return [bits(tensor) for tensor in tensors]


def test_evaluating_holds_the_anchor_and_restores_everything() -> None:
    """Inside, the model is the anchor cast to its dtypes; after, not a bit differs."""
    run, model = run_of(every=2, outer={"lr": 0.375}), Everything()
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=1.0, momentum=0.5
    )
    with atoll.torch.join(model, optimizer, run) as island:
        train(model, optimizer, steps=3, slope=2.0**-7)
        before = everything(model, optimizer)
        with island.evaluating() as at:
            # SGD with momentum 1/2 moves by s and 3s/2, s = 2**-7: 5s/2 by round 1,
            # times 3/8 is 15 * 2**-11. bf16, 2**-8 apart below 1, loads 1 - 2 * 2**-8.
            assert at.round == 1
            assert model.full[0].item() == 1 - 15 * 2.0**-11
            assert model.short.item() == 1 - 15 * 2.0**-11
            assert model.brain.item() == 1 - 2 * 2.0**-8
            assert model.saved.item() == 2.0
            model.eval()
            model.saved.fill_(9.0)
            model.unsaved.fill_(9.0)
        assert everything(model, optimizer) == before
        assert model.training
        assert model.drop.training


def test_a_report_inside_an_evaluation_is_of_the_anchor() -> None:
    """It has the anchor's round, and neither tokens nor the loop's loss change."""
    run, model = run_of(every=2), Weights(8.0)
    with atoll.torch.join(model, optimizer := sgd(model), run) as island:
        island.report(tokens=3, loss=2.0)
        train(model, optimizer, steps=3)
        before = island.metrics()
        with island.evaluating():
            island.report(loss=torch.tensor(1.5), accuracy=0.25)
        stats = island._handle.counters.stats(1.0)
        assert island.metrics() == before

    assert (stats.anchor_round, stats.loss) == (1, 2.0)
    assert stats.anchor_metrics == {"eval_loss": 1.5, "accuracy": 0.25}
    assert stats.machine == f"cpu, torch {torch.__version__}"


def evaluate_badly(model: torch.nn.Module, island: atoll.torch.Island) -> None:
    with island.evaluating():
        model.eval()
        raise ZeroDivisionError


def test_evaluating_restores_everything_after_an_error_too() -> None:
    """The error is the caller's, and the weights are local again."""
    run, model = run_of(every=2, outer={"lr": 0.375}), Everything()
    optimizer = sgd(model)
    with atoll.torch.join(model, optimizer, run) as island:
        train(model, optimizer, steps=3, slope=2.0**-7)
        model.drop.eval()
        before = everything(model, optimizer)
        with pytest.raises(ZeroDivisionError):
            evaluate_badly(model, island)
        assert everything(model, optimizer) == before
        assert model.training
        assert not model.drop.training


def test_training_goes_on_after_an_evaluation_as_if_there_had_been_none() -> None:
    """The next update holds the whole window's work."""
    run, model = run_of(every=4), Weights(8.0)
    with atoll.torch.join(model, optimizer := sgd(model), run) as island:
        for _ in range(4):
            train(model, optimizer)
            with island.evaluating():
                pass

    # Four steps by 1, and one round.
    assert (anchor_of(run), island.round) == ([4.0], 1)


def test_the_anchor_is_a_copy_by_name_in_fp32() -> None:
    """Changing what `anchor()` returns changes nothing of the run."""
    run, model = run_of(), Everything()
    with atoll.torch.join(model, sgd(model), run) as island:
        anchor = island.anchor()
        assert {name: value.dtype for name, value in anchor.items()} == {
            "full": torch.float32,
            "brain": torch.float32,
            "short": torch.float32,
            "saved": torch.float32,
        }
        assert bits(anchor["full"]) == bits(model.full)
        digest = island.digest
        anchor["full"].fill_(9.0)
        assert island.anchor()["full"][0] == 1.0
        assert island.digest == digest


class Unreadable:
    """A loss that is still being computed: reading it would wait for a device."""

    def __float__(self) -> float:
        raise AssertionError("report() has read a value")

    item = __float__


def test_report_never_reads_what_it_is_given() -> None:
    """A loss may be a tensor on a device; only `metrics()` reads it."""
    run, model = run_of(), Weights(8.0)
    with atoll.torch.join(model, optimizer := sgd(model), run) as island:
        island.report(tokens=3, loss=Unreadable(), accuracy=Unreadable())
        train(model, optimizer, steps=2)
        with pytest.raises(AssertionError, match="has read"):
            island.metrics()
        island.report(tokens=4, loss=torch.tensor(0.5), lr=0.25)
        metrics = island.metrics()

    assert (metrics["atoll/loss"], metrics["atoll/lr"]) == (0.5, 0.25)
    assert metrics["atoll/tokens"] == 7
    assert "atoll/accuracy" not in metrics


def test_a_reported_loss_does_not_keep_its_graph() -> None:
    """The island holds the value; what computed it can be freed."""
    run, model = run_of(), Weights(8.0)
    with atoll.torch.join(model, sgd(model), run) as island:
        loss = model(2.0)
        kept = weakref.ref(loss)
        island.report(loss=loss)
        del loss

        assert kept() is None
        assert island.metrics()["atoll/loss"] == 16.0


@pytest.mark.parametrize("tokens", [torch.tensor(3), 3.0, -1, True, None])
def test_tokens_are_a_whole_number(tokens: object) -> None:
    """A tensor would have to be read; the remedy is in the message."""
    run, model = run_of(), Weights(8.0)
    with (
        atoll.torch.join(model, sgd(model), run) as island,
        pytest.raises(UsageError, match=r"tokens=.*whole number.*batch\.numel\(\)"),
    ):
        island.report(tokens=tokens)  # type: ignore[arg-type]


def test_metrics_have_stable_names() -> None:
    """They are what dashboards are built on."""
    run, model = run_of(every=2), Weights(8.0)
    with atoll.torch.join(model, optimizer := sgd(model), run) as island:
        for _ in range(5):
            island.report(tokens=10)
            train(model, optimizer)
        metrics = island.metrics()

    assert set(metrics) == {
        "atoll/round",
        "atoll/run_steps",
        "atoll/run_tokens",
        "atoll/inner_steps",
        "atoll/dropped_steps",
        "atoll/tokens",
        "atoll/wait_s",
        "atoll/bytes_up",
        "atoll/bytes_down",
        "atoll/updates_counted",
        "atoll/updates_carried",
        "atoll/updates_refused",
        "atoll/updates_dropped",
        "atoll/not_counted_steps",
    }
    # Two rounds of two steps and one step more; 40 of 50 tokens are in the anchor.
    assert metrics["atoll/round"] == metrics["atoll/updates_counted"] == 2
    assert metrics["atoll/run_steps"] == metrics["atoll/inner_steps"] == 5
    assert (metrics["atoll/tokens"], metrics["atoll/run_tokens"]) == (50, 40)
    assert metrics["atoll/bytes_up"] > 0
    assert metrics["atoll/bytes_down"] > 0
    assert metrics["atoll/wait_s"] >= 0.0


def test_tokens_of_all_islands_add_up() -> None:
    """`run_tokens` sums what has reached the anchor, whoever trained on it."""
    run = run_of(2, every=2, run={"end_rounds": 2})

    def live(name: str, tokens: int) -> int:
        model = Weights(8.0)
        with atoll.torch.join(model, optimizer := sgd(model), run, island=name) as i:
            while True:
                i.report(tokens=tokens)
                train(model, optimizer)
        return i.run_tokens

    # Four steps each, of 1 and of 100 tokens.
    assert together(partial(live, "a", 1), partial(live, "b", 100)) == [404, 404]


def test_sync_now_puts_all_work_into_the_anchor() -> None:
    """Mid-window, alone: the anchor is the local weights, and the schedule goes on."""
    run, model = run_of(every=4), Weights(8.0)
    with atoll.torch.join(model, optimizer := sgd(model), run) as island:
        train(model, optimizer)
        island.sync_now()
        assert (anchor_of(run), model.w.tolist(), island.round) == ([7.0], [7.0], 1)
        train(model, optimizer, steps=3)
        # What was sent by hand stands for the send after step 4: a new window begins.
        assert (anchor_of(run), island.round) == ([7.0], 1)
        train(model, optimizer)
        assert (anchor_of(run), island.round) == ([3.0], 2)


def test_sync_now_waits_for_updates_in_flight_and_for_every_fragment() -> None:
    """What was in flight is taken first, then everything is sealed again."""
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, 8.0)
    torch.nn.init.constant_(model.bias, 8.0)
    sync = {"num_fragments": 2, "fragment_order": "by_size", "overlap_steps": 2}
    run = run_of(every=4, sync=sync)
    optimizer = sgd(model)
    with atoll.torch.join(model, optimizer, run) as island:
        for _ in range(3):
            model(torch.ones(1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        # After step 3 the weight, sealed after step 2, is in flight; the bias is not.
        assert island.round == 0
        island.sync_now()

        assert (anchor_of(run, 0), anchor_of(run, 1)) == ([5.0], [5.0])
        assert (model.weight.item(), model.bias.item()) == (5.0, 5.0)
        # Round 1 of the weight was the one in flight, round 2 the one asked for.
        assert [run.state(f).header.round for f in (0, 1)] == [2, 1]


def test_sync_now_waits_for_the_others() -> None:
    """Others keep their schedule; the caller's work counts in their round."""
    run = run_of(2, every=3, run={"end_rounds": 1})

    def eager() -> object:
        model = Weights(8.0)
        with atoll.torch.join(model, optimizer := sgd(model), run, island="a") as i:
            train(model, optimizer)
            i.sync_now()
        return model.w.tolist()

    def steady() -> object:
        model = Weights(8.0)
        with atoll.torch.join(model, optimizer := sgd(model), run, island="b"):
            train(model, optimizer, steps=9)
        return model.w.tolist()

    # One step and three steps: mean 2.
    assert together(eager, steady) == [[6.0], [6.0]]


def test_settings_are_the_runs() -> None:
    """An island has none of its own."""
    run, model = run_of(every=7), Weights(8.0)
    with atoll.torch.join(model, sgd(model), run) as island:
        assert island.settings == run.settings
        assert island.settings.sync.sync_every == 7


def test_the_digest_is_the_same_on_every_island() -> None:
    """Anchor and velocity are, at any precision of the wire, after every round."""
    run = run_of(
        3,
        every=2,
        run={"end_rounds": 3},
        wire={"up": "e3m0", "down": "int8"},
        outer={"optimizer": "nesterov", "lr": 0.7, "momentum": 0.9},
    )

    models = [torch.nn.Linear(9, 7) for _ in "abc"]

    def live(name: str, seed: int) -> list[str]:
        model = models[seed]
        inputs = torch.randn(4, 9, generator=torch.Generator().manual_seed(seed))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        digests = []
        with atoll.torch.join(model, optimizer, run, island=name) as island:
            for _ in range(20):
                model(inputs).square().mean().backward()
                digests.append(island.digest)
                optimizer.step()
                optimizer.zero_grad()
        return [*digests, island.digest]

    a, b, c = together(*(partial(live, name, i) for i, name in enumerate("abc")))
    assert a == b == c
    assert len(set(a)) == 4


def test_nothing_but_evaluation_happens_while_evaluating() -> None:
    """The model holds the anchor then: an inner step or a sync would seal that."""
    run, model = run_of(every=4), Weights(8.0)
    with atoll.torch.join(model, optimizer := sgd(model), run) as island:
        train(model, optimizer)
        with island.evaluating():
            for act in (island.sync_now, island.leave, lambda: train(model, optimizer)):
                with pytest.raises(UsageError, match="holds the anchor"):
                    act()

        assert island.inner_steps == 1


def test_islands_that_sync_by_hand_at_different_steps_meet_again() -> None:
    """Whoever called early skips the send it made; nobody waits for ever."""
    settings = {"num_fragments": 2, "fragment_order": "by_size"}
    run = run_of(every=10, run={"start_islands": 2, "end_rounds": 3}, sync=settings)

    def go(name: str, by_hand_after: int) -> str:
        model = torch.nn.Linear(1, 1)
        with atoll.torch.join(model, optimizer := sgd(model), run, island=name) as own:
            while True:
                model(torch.ones(1)).sum().backward()
                optimizer.step()
                if own.inner_steps == by_hand_after:
                    own.sync_now()
        return own.digest

    digests: list[str] = []
    together(
        lambda: digests.append(go("x", 3)),
        lambda: digests.append(go("y", 7)),
    )
    assert len(digests) == 2
    assert len(set(digests)) == 1
