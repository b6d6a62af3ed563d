"""Whole runs in miniature: the text with a tiny inner loop, against known mathematics.

Where values are dyadic and short, fp32 rounds nothing and equality is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.algorithm import outer
from atoll.algorithm.adopt import mix, pseudo_gradient, rebase
from atoll.algorithm.arithmetic import fp32
from atoll.algorithm.fragments import split
from atoll.algorithm.merge import mean
from atoll.algorithm.schedule import due_fragments
from tests.algorithm.vectors import F32, array, eighths, equal

Gradient = Callable[[F32], F32]
OuterStep = Callable[[F32, F32], tuple[F32, F32]]


def nesterov(lr: float, momentum: float) -> OuterStep:
    """Return DiLoCo's outer step."""
    return lambda drift, velocity: outer.nesterov(
        drift, velocity, lr=lr, momentum=momentum
    )


def sgd(lr: float) -> OuterStep:
    """Return plain outer descent."""
    return lambda drift, velocity: (outer.sgd(drift, lr=lr), velocity)


def quadratic(curvature: float, centre: float) -> Gradient:
    """Return the gradient of curvature / 2 (x - centre)**2."""
    return lambda x: np.float32(curvature) * (x - np.float32(centre))


@dataclass(frozen=True)
class Inner:
    """Inner SGD: its rate and the inner steps of a window."""

    lr: float
    sync_every: int

    def train(self, local: F32, gradient: Gradient) -> F32:
        for _ in range(self.sync_every):
            local = local - np.float32(self.lr) * gradient(local)
        return local


def run(
    anchor: F32,
    gradients: Sequence[Gradient],
    inner: Inner,
    step: OuterStep,
    *,
    rounds: int,
    decode: Callable[[F32], F32] = lambda x: x,
) -> tuple[F32, F32]:
    """Return anchor and velocity after some rounds of DiLoCo."""
    velocity = np.zeros_like(anchor)
    for _ in range(rounds):
        drifts = [
            decode(pseudo_gradient(anchor, inner.train(anchor, gradient)))
            for gradient in gradients
        ]
        change, velocity = step(mean(drifts), velocity)
        anchor = outer.apply(anchor, change)
    return anchor, velocity


@given(eighths, st.lists(eighths, min_size=4, max_size=4))
def test_plain_descent_with_lr_one_averages_weights(
    anchor: float, centres: list[float]
) -> None:
    """With outer SGD and lr 1 the new anchor is the mean of the islands' weights."""
    # g - mean(g - x_m) = mean(x_m)
    inner = Inner(lr=0.5, sync_every=2)
    gradients = [quadratic(1, c) for c in centres]
    moved, _ = run(array(anchor), gradients, inner, sgd(1.0), rounds=1)
    locals_ = [inner.train(array(anchor), gradient) for gradient in gradients]

    assert equal(moved, mean(locals_))


@given(eighths, eighths, eighths, st.sampled_from([1.0, 0.5]))
def test_syncing_every_step_is_data_parallel_sgd(
    anchor: float, one: float, two: float, lr: float
) -> None:
    """Outer SGD after each inner SGD step is SGD on the mean gradient, rates times."""
    # Pseudo-gradients are a grad_m, so the anchor moves by -lr a mean(grad).
    moved, _ = run(
        array(anchor),
        [quadratic(1, one), quadratic(1, two)],
        Inner(lr=0.5, sync_every=1),
        sgd(lr),
        rounds=3,
    )
    x = anchor
    for _ in range(3):
        x -= 0.5 * lr * (x - (one + two) / 2)

    assert moved.item() == x


@given(eighths, eighths, eighths)
def test_syncing_every_step_with_nesterov_is_data_parallel_nesterov(
    anchor: float, one: float, two: float
) -> None:
    """Outer Nesterov after each inner SGD step is Nesterov on the mean gradient."""
    moved, velocity = run(
        array(anchor),
        [quadratic(1, one), quadratic(1, two)],
        Inner(lr=0.5, sync_every=1),
        nesterov(0.5, 0.5),
        rounds=2,
    )
    x, b = anchor, 0.0
    for _ in range(2):
        drift = 0.5 * (x - (one + two) / 2)
        b = 0.5 * b + drift
        x -= 0.5 * (drift + 0.5 * b)

    assert (moved.item(), velocity.item()) == (x, b)


def to_bf16(x: F32) -> F32:
    """Return values with 8 significant bits, as bf16 has (here cut, not rounded)."""
    return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


@pytest.mark.parametrize(
    ("num_islands", "decode"),
    [(2, lambda x: x), (4, lambda x: x), (8, to_bf16)],
    ids=["2 fp32", "4 fp32", "8 bf16"],
)
def test_identical_islands_are_one_island(
    num_islands: int, decode: Callable[[F32], F32]
) -> None:
    """Islands with the same data hold the state of one alone, to the bit."""
    # The mean of equal values is the value: see test_merge for why, and for 8 in fp32.
    start = np.random.default_rng(0).normal(size=500).astype(np.float32)
    inner, step = Inner(lr=0.1, sync_every=3), nesterov(fp32(0.7), fp32(0.9))
    gradient = quadratic(0.3, 0.7)
    one = run(start, [gradient], inner, step, rounds=6, decode=decode)
    many = run(start, [gradient] * num_islands, inner, step, rounds=6, decode=decode)

    assert equal(one[0], many[0])
    assert equal(one[1], many[1])


@given(st.floats(0.5, 1.0, width=32))
def test_one_island_with_lr_one_trains_as_if_alone(start: float) -> None:
    """A sync of a single island with outer SGD and lr 1 is no event at all."""
    # Each window ends within a factor of two of its anchor (0.9**2 = 0.81), so anchor
    # minus local is exact (Sterbenz), and anchor minus that is local again.
    inner, gradient = Inner(lr=0.1, sync_every=2), quadratic(1, 0)
    moved, _ = run(array(start), [gradient], inner, sgd(1.0), rounds=5)
    alone = Inner(lr=0.1, sync_every=10).train(array(start), gradient)

    assert equal(moved, alone)


def test_keeping_all_of_local_never_changes_an_island() -> None:
    """With keep_local 1 islands train on untouched while the anchor still moves."""
    inner, gradient = Inner(lr=0.1, sync_every=4), quadratic(1, 2)
    anchor, local, alone = array(8), array(8), array(8)
    for _ in range(3):
        local, alone = inner.train(local, gradient), inner.train(alone, gradient)
        change = outer.sgd(pseudo_gradient(anchor, local), lr=0.5)
        anchor = outer.apply(anchor, change)
        local = mix(anchor, local, keep_local=1.0)

    assert equal(local, alone)
    assert anchor.item() < 8


@pytest.mark.parametrize("order", ["strided", "sequential", "by_size"])
def test_a_partition_synchronised_at_once_is_the_whole(order: str) -> None:
    """Fragments that are sent together give what one fragment gives, to the bit."""
    rng = np.random.default_rng(1)
    shapes = [("embed", (9,)), *((f"h.{i}.w", (4,)) for i in range(5)), ("norm", (2,))]
    values = {n: rng.normal(size=s).astype(np.float32) for n, s in shapes}
    drifts = {n: rng.normal(size=s).astype(np.float32) for n, s in shapes}
    step = nesterov(fp32(0.7), fp32(0.9))

    def stepped(names: Sequence[str]) -> dict[str, float]:
        flat, drift = (np.concatenate([d[n] for n in names]) for d in (values, drifts))
        for velocity in [np.zeros_like(flat)]:
            for _ in range(3):
                change, velocity = step(drift, velocity)
                flat = outer.apply(flat, change)
        at = [f"{n}[{i}]" for n in names for i in range(values[n].size)]
        return dict(zip(at, flat.tolist(), strict=True))

    parts = split(shapes, num_fragments=3, order=order)
    together = [stepped(part) for part in parts]

    assert {k: v for part in together for k, v in part.items()} == stepped(
        [name for name, _ in shapes]
    )


@pytest.mark.parametrize("keep_local", [0.0, 0.25, 0.5])
def test_overlap_with_mix_follows_its_recursion(keep_local: float) -> None:
    """Under steady drift the pseudo-gradient follows its recursion to its limit."""
    # Delta' = alpha (1 - eta) Delta + a (H - (1 - alpha) tau), because:
    # Sent: Delta = g - x. At t + tau: g' = g - eta Delta, x' = alpha (x - a tau) +
    # (1 - alpha) g'. At t + H: g' - (x' - a (H - tau)). Limit at eta 0.5, a 1, H 8,
    # tau 2: (8 - 2 (1 - alpha)) / (1 - alpha / 2).
    drift, sync_every, overlap, lr = 1.0, 8, 2, 0.5
    anchor, local, expected = array(0), array(-drift * sync_every), 8.0
    for _ in range(6):
        delta = pseudo_gradient(anchor, local)
        assert delta.item() == expected
        local = local - np.float32(drift * overlap)
        anchor = outer.apply(anchor, outer.sgd(delta, lr=lr))
        local = mix(anchor, local, keep_local=keep_local)
        local = local - np.float32(drift * (sync_every - overlap))
        expected = keep_local * (1 - lr) * expected
        expected += drift * (sync_every - (1 - keep_local) * overlap)

    limit = (8 - 2 * (1 - keep_local)) / (1 - keep_local / 2)
    assert expected == pytest.approx(limit, abs=8 * (keep_local / 2) ** 5)


@pytest.mark.parametrize("overlap", [0, 1, 5, 7])
def test_overlap_with_rebase_loses_no_step(overlap: int) -> None:
    """However long the overlap, every window contributes all of its inner steps."""
    # x' = g' + (x_now - x_at_seal) = g' - a tau, so Delta' = a tau + a (H - tau) = a H.
    anchor, local = array(0), array(-8)
    for _ in range(6):
        delta = pseudo_gradient(anchor, local)
        assert delta.item() == 8.0
        now = local - np.float32(overlap)
        anchor = outer.apply(anchor, outer.sgd(delta, lr=0.5))
        local = rebase(anchor, now, local) - np.float32(8 - overlap)


def test_outer_descent_on_a_quadratic_in_closed_form() -> None:
    """x_(k+1) = (1 - eta (1 - rho)) x_k with rho = (1 - a lambda)^H, exactly."""
    # a lambda = 1/2, H = 2: rho = 1/4; eta = 1/2: factor 5/8. 4096 (5/8)**4 is whole.
    inner = Inner(lr=0.25, sync_every=2)
    for rounds in range(5):
        x, _ = run(array(4096), [quadratic(2, 0)], inner, sgd(0.5), rounds=rounds)
        assert x.item() == 4096 * 0.625**rounds


@pytest.mark.parametrize(("sync_every", "limit"), [(7, -0.061423), (1, -0.666667)])
def test_islands_that_differ_settle_where_the_mathematics_says(
    sync_every: int, limit: float
) -> None:
    """The fixed point is sum(1 - rho_m) c_m / sum(1 - rho_m); the optimum at H = 1."""
    gradients = [quadratic(1, 1), quadratic(3, -2), quadratic(0.5, 4)]
    inner = Inner(lr=0.1, sync_every=sync_every)
    x, _ = run(array(0), gradients, inner, sgd(1.0), rounds=200)

    assert x.item() == pytest.approx(limit, abs=2e-6)


@pytest.mark.parametrize("killed_at", [0, 1, 13, 39])
def test_a_run_resumed_from_its_bytes_goes_on_as_if_never_stopped(
    killed_at: int,
) -> None:
    """Anchor, velocity, local weights and the inner step are all there is to save."""
    fragments, steps = 3, 40

    def advance(state: list[F32], first: int, last: int) -> list[F32]:
        anchor, velocity, local = (x.copy() for x in state)
        for s in range(first + 1, last + 1):
            local = local - np.float32(0.1) * quadratic(0.7, 0.2)(local)
            for p in due_fragments(s, sync_every=7, num_fragments=fragments):
                change, velocity[p::fragments] = outer.nesterov(
                    pseudo_gradient(anchor[p::fragments], local[p::fragments]),
                    velocity[p::fragments],
                    lr=fp32(0.7),
                    momentum=fp32(0.9),
                )
                anchor[p::fragments] = outer.apply(anchor[p::fragments], change)
                local[p::fragments] = anchor[p::fragments]
        return [anchor, velocity, local]

    start = np.random.default_rng(2).normal(size=20).astype(np.float32)
    state = [start, np.zeros_like(start), start]
    saved = [x.tobytes() for x in advance(state, 0, killed_at)]
    restored = [np.frombuffer(x, np.float32) for x in saved]
    resumed = advance(restored, killed_at, steps)

    assert [x.tobytes() for x in resumed] == [
        x.tobytes() for x in advance(state, 0, steps)
    ]
