"""Runs that known mathematics predicts, with real modules and optimizers.

In formulas a is the inner rate, eta the outer one, mu the outer momentum, H the inner
steps of a window, tau the overlap. Where every value is a short dyadic fraction, fp32
rounds nothing and equality is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import pytest
import torch

import atoll.torch
from atoll.exchange import MemoryRun
from tests.torch.networks import fit, networks, streamed
from tests.torch.runs import (
    Blocks,
    Quadratic,
    Table,
    Weights,
    anchor_of,
    bits,
    run_of,
    sgd,
    state_of,
    together,
    train,
)

pytestmark = pytest.mark.torch

NESTEROV = {"optimizer": "nesterov", "lr": 0.5, "momentum": 0.5}


def live(
    run: MemoryRun,
    name: str,
    make: Callable[[], torch.nn.Module],
    optimize: Callable[[torch.nn.Module], torch.optim.Optimizer],
    batches: Sequence[float],
) -> torch.nn.Module:
    """Train on the batches as one island, or until the run ends."""
    model = make()
    optimizer = optimize(model)
    with atoll.torch.join(model, optimizer, run, island=name):
        for batch in batches:
            train(model, optimizer, slope=batch)
    return model


def descend(model: torch.nn.Module) -> torch.optim.Optimizer:
    return sgd(model, lr=0.5)


@pytest.mark.parametrize("every", [1, 3])
def test_outer_descent_with_lr_one_averages_weights(every: int) -> None:
    """With eta = 1 and mu = 0 the new anchor is the mean of the islands' weights."""
    run = run_of(2, every=every, run={"end_rounds": 1})
    plain = []
    for centre in (1.0, 3.0):
        model = Quadratic(8.0, -4.0)
        train(model, sgd(model, lr=0.5), steps=every, slope=centre)
        plain.append(model.w.detach())

    together(
        *(
            partial(live, run, name, lambda: Quadratic(8.0, -4.0), descend, [c] * every)
            for name, c in (("a", 1.0), ("b", 3.0))
        )
    )

    # Each step halves the distance: at most 3 bits more than 8.0 has. No rounding.
    assert anchor_of(run) == ((plain[0] + plain[1]) / 2).tolist()


@pytest.mark.parametrize("eta", [1.0, 0.5])
def test_one_inner_step_is_data_parallel_descent(eta: float) -> None:
    """With H = 1, inner SGD a and outer SGD eta are SGD with a * eta on the mean."""
    run = run_of(2, outer={"lr": eta}, run={"end_rounds": 4})
    parallel = Quadratic(8.0, -4.0)
    for _ in range(4):
        # The mean of the gradients w - 1 and w - 3 is w - 2.
        train(parallel, sgd(parallel, lr=0.5 * eta), slope=2.0)

    models = together(
        *(
            partial(live, run, name, lambda: Quadratic(8.0, -4.0), descend, [c] * 9)
            for name, c in (("a", 1.0), ("b", 3.0))
        )
    )

    # Four steps with rates 1/4 add 8 bits to 4: no rounding.
    assert anchor_of(run) == parallel.w.tolist()
    assert [model.get_parameter("w").tolist() for model in models] == [
        anchor_of(run),
        anchor_of(run),
    ]


def test_one_inner_step_and_nesterov_is_data_parallel_nesterov() -> None:
    """Outer Nesterov is Nesterov SGD on the gradient times a."""
    run = run_of(2, outer=NESTEROV, run={"end_rounds": 4})
    parallel = Quadratic(8.0, -4.0)
    nesterov = torch.optim.SGD(
        parallel.parameters(), lr=0.5, momentum=0.5, nesterov=True
    )
    for _ in range(4):
        (parallel(2.0) / 2).backward()
        nesterov.step()
        nesterov.zero_grad()

    together(
        *(
            partial(live, run, name, lambda: Quadratic(8.0, -4.0), descend, [c] * 9)
            for name, c in (("a", 1.0), ("b", 3.0))
        )
    )

    # Each round multiplies by 1/2 four times at most: 16 bits beyond those of 8.
    assert anchor_of(run) == parallel.w.tolist()


def same_seed(islands: int, **tables: Table) -> bytes:
    run = run_of(islands, every=3, run={"end_rounds": 3}, **tables)
    models = networks(islands)
    together(*(partial(fit, run, f"i{n}", m, seed=7) for n, m in enumerate(models)))
    state = state_of(run)
    return b"".join(map(bits, (state.anchor, *state.moments)))


def test_islands_with_the_same_data_are_one_island() -> None:
    """Two, four and eight islands give the anchor and velocity of one, exactly."""
    # x + x, 2x + x, 3x + x: rounded or not, the fourth sum is 4x exactly, and so its
    # quarter is x, for any fp32 number. Eight need three spare bits, as bf16 leaves.
    assert same_seed(1) == same_seed(2) == same_seed(4)
    nesterov = {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.9}
    wire = {"up": "bf16", "down": "bf16"}
    assert same_seed(1, wire=wire, outer=nesterov) == same_seed(
        8, wire=wire, outer=nesterov
    )


def test_three_islands_with_the_same_data_are_one_island_to_ulps() -> None:
    """A division by three may round; nothing else differs."""
    one = torch.frombuffer(bytearray(same_seed(1)), dtype=torch.float32)
    three = torch.frombuffer(bytearray(same_seed(3)), dtype=torch.float32)

    # A third of a sum of three is off by at most an ulp of the pseudo-gradient, here
    # below 2**-4, in each of 3 rounds; AdamW answers with changes of that order.
    assert torch.allclose(one, three, rtol=0.0, atol=1e-6)


def test_equal_weights_are_the_plain_mean() -> None:
    """Islands that report the same tokens count as with uniform weights."""
    anchors = []
    for weight in ("uniform", "tokens"):
        run = run_of(3, every=2, outer={"weight": weight}, run={"end_rounds": 2})

        def train_with_tokens(name: str, slope: float, run: MemoryRun = run) -> None:
            model = Weights(1.0, 2.0)
            with atoll.torch.join(
                model, optimizer := sgd(model), run, island=name
            ) as i:
                while True:
                    i.report(tokens=5)
                    train(model, optimizer, slope=slope)

        together(
            *(
                partial(train_with_tokens, n, s)
                for n, s in zip("abc", (0.1, 0.2, 0.7), strict=True)
            )
        )
        anchors.append(bits(state_of(run).anchor))

    assert anchors[0] == anchors[1]


@pytest.mark.parametrize("every", [1, 4])
def test_alone_with_lr_one_is_uninterrupted_training(every: int) -> None:
    """With eta = 1 and mu = 0 a sync does nothing, also to Adam's state."""

    def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=2.0**-7)

    run = run_of(every=every)
    batches = [1.0, -0.5, 0.25, 2.0, 1.0, -3.0, 0.5, 1.0, 0.125, -1.0]
    plain = Weights(1.5, 1.25, 1.75)
    optimizer = adam(plain)
    for batch in batches:
        train(plain, optimizer, slope=batch)

    island = live(run, "a", lambda: Weights(1.5, 1.25, 1.75), adam, batches)

    # Weights stay between 1 and 2, so anchor - local is exact (both are within a factor
    # of 2), and anchor - (anchor - local) is local, bit for bit.
    assert all(1.0 < x < 2.0 for x in plain.w.tolist())
    assert bits(island.get_parameter("w")) == bits(plain.w)


def test_streaming_without_overlap_or_blend_is_diloco() -> None:
    """With P = 1 and tau = 0, mixing nothing in is DiLoCo, bit for bit."""
    assert streamed(adopt="mix", keep_local=0.0) == streamed(adopt="rebase")


def test_a_blend_is_not_diloco_even_without_overlap() -> None:
    """Keeping half of the local weights is another algorithm."""
    assert streamed(adopt="mix", keep_local=0.5) != streamed(adopt="rebase")


def test_keeping_everything_local_never_changes_an_island() -> None:
    """With keep_local = 1 islands train as if alone, and the anchor still moves."""
    sync = {"adopt": "mix", "keep_local": 1.0}
    run = run_of(2, every=2, sync=sync, run={"end_rounds": 2})

    a, b = together(
        partial(live, run, "a", lambda: Weights(16.0), sgd, [1.0] * 9),
        partial(live, run, "b", lambda: Weights(16.0), sgd, [3.0] * 9),
    )

    # Locals 14 and 10 after round 1: mean 12. Then 12 and 4; the pseudo-gradients from
    # 12 are 0 and 8, mean 4.
    assert (a.get_parameter("w").tolist(), b.get_parameter("w").tolist()) == ([12], [4])
    assert anchor_of(run) == [8.0]


@pytest.mark.parametrize("order", ["strided", "sequential", "by_size"])
@pytest.mark.parametrize("fragments", [2, 3, 5])
def test_any_partition_gives_the_same_anchor(fragments: int, order: str) -> None:
    """With all offsets equal (H = 1), fragments do not matter."""

    def final(num_fragments: int) -> dict[str, list[float]]:
        sync = {"num_fragments": num_fragments, "fragment_order": order}
        run = run_of(2, sync=sync, outer={**NESTEROV, "lr": 0.7}, run={"end_rounds": 3})

        def train_blocks(name: str, slope: float) -> dict[str, list[float]]:
            model = Blocks(5, 1.0)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            with atoll.torch.join(model, optimizer, run, island=name) as island:
                while True:
                    (model(slope) ** 2).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            return {name: w.tolist() for name, w in sorted(island.anchor().items())}

        a, b = together(
            partial(train_blocks, "a", 0.3), partial(train_blocks, "b", 0.7)
        )
        assert a == b
        return a

    # The outer step is the same arithmetic for each element, wherever it lies.
    assert final(fragments) == final(1)


@pytest.mark.parametrize("mu", [0.5, 0.75])
def test_a_steady_drift_in_closed_form(mu: float) -> None:
    """Round k moves eta a H (1 + mu (1 - mu**k) / (1 - mu))."""
    a, every, eta, rounds = 0.25, 2, 0.5, 4
    outer = {"optimizer": "nesterov", "lr": eta, "momentum": mu}
    run = run_of(every=every, outer=outer)
    model = Weights(64.0)
    expected: list[float] = []
    seen = []
    with atoll.torch.join(model, optimizer := sgd(model), run):
        for k in range(1, rounds + 1):
            train(model, optimizer, steps=every, slope=a)
            seen.append(anchor_of(run)[0])
            moved = eta * a * every * (1 + mu * (1 - mu**k) / (1 - mu))
            expected.append((expected[-1] if expected else 64.0) - moved)

    # The first is 64 - eta (1 + mu) aH. With mu = 3/4, mu**5 has 10 bits after
    # the point and 64 six before: exact.
    assert seen == expected
    assert seen[0] == 64 - eta * (1 + mu) * a * every


@pytest.mark.parametrize("keep", [0.5, 0.25])
@pytest.mark.parametrize("eta", [1.0, 0.5])
def test_drift_with_overlap_in_closed_form(keep: float, eta: float) -> None:
    """Drift D becomes keep (1 - eta) D + a (H - (1 - keep) tau), from D = aH."""
    every, tau = 4, 2
    sync = {"overlap_steps": tau, "adopt": "mix", "keep_local": keep}
    run = run_of(every=every, sync=sync, outer={"lr": eta})
    model = Weights(64.0)
    seen, expected, drift = [], [64.0], float(every)
    with atoll.torch.join(model, optimizer := sgd(model), run):
        train(model, optimizer, steps=tau)
        for _ in range(3):
            train(model, optimizer, steps=every)
            seen.append(anchor_of(run)[0])
            expected.append(expected[-1] - eta * drift)
            drift = keep * (1 - eta) * drift + (every - (1 - keep) * tau)

    # For eta = 1 every window loses (1 - keep) tau of its H steps.
    assert seen == expected[1:]


def test_bytes_fall_by_the_window_and_peaks_by_the_fragments() -> None:
    """It is 1/H of data parallel; fragments share it, a P-th each time."""
    elements, every = 4 * 1024, 8
    totals, peaks = [], []
    for fragments in (1, 4):
        run = run_of(every=every, sync={"num_fragments": fragments})
        model = Blocks(4, 1.0)
        for layer in model.layers:
            layer.register_parameter("w", torch.nn.Parameter(torch.ones(elements // 4)))
        sent = [0.0]
        with atoll.torch.join(model, optimizer := sgd(model), run) as island:
            for _ in range(2 * every):
                train(model, optimizer)
                sent.append(island.metrics()["atoll/bytes_up"])
        totals.append(sent[-1])
        peaks.append(max(after - before for before, after in pairwise(sent)))

    # Data parallel sends 4 bytes per element and step; we send 4 per element and
    # window, and a header of a few hundred bytes with every update.
    data_parallel = 4 * elements * 2 * every
    for updates, total in zip((2, 8), totals, strict=True):
        assert 0 < total - data_parallel / every < 500 * updates
    assert 0 < peaks[0] - 4 * elements < 500
    assert 0 < peaks[1] - 4 * elements / 4 < 500
