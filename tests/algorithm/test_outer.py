"""The outer optimizers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.algorithm import outer
from atoll.algorithm.arithmetic import fp32
from atoll.algorithm.merge import mean
from atoll.errors import UsageError
from tests.algorithm.vectors import array, eighths, equal

vectors = st.lists(eighths, min_size=3, max_size=3)


@given(vectors, vectors)
def test_first_nesterov_step_moves_by_one_plus_momentum(
    anchor: list[float], drift: list[float]
) -> None:
    """From zero velocity the anchor moves by -lr (1 + momentum) mean, exactly."""
    # b = D; change = -lr (D + mu D) = -0.75 D at lr 0.5, mu 0.5.
    change, velocity = outer.nesterov(
        array(*drift), array(0, 0, 0), lr=0.5, momentum=0.5
    )
    moved = outer.apply(array(*anchor), change)

    assert moved.tolist() == [a - 0.75 * d for a, d in zip(anchor, drift, strict=True)]
    assert velocity.tolist() == drift


def test_three_steps_worked_out_by_hand() -> None:
    """Nesterov, heavy ball and SGD on 4, 2, 0 with lr 0.5 and momentum 0.5."""
    # nesterov:   b 4, 4, 2; D + b/2 = 6, 4, 1; anchor 8 -> 5 -> 3 -> 2.5
    # heavy ball: b 4, 4, 2;                    anchor 8 -> 6 -> 4 -> 3
    # sgd:                                      anchor 8 -> 6 -> 5 -> 5
    paths: dict[str, list[float]] = {"nesterov": [], "heavy_ball": [], "sgd": []}
    for name, path in paths.items():
        anchor, velocity = array(8), array(0)
        for drift in (4.0, 2.0, 0.0):
            if name == "sgd":
                change = outer.sgd(array(drift), lr=0.5)
            else:
                step = outer.nesterov if name == "nesterov" else outer.heavy_ball
                change, velocity = step(array(drift), velocity, lr=0.5, momentum=0.5)
            anchor = outer.apply(anchor, change)
            path.append(anchor.item())

    assert paths == {
        "nesterov": [5.0, 3.0, 2.5],
        "heavy_ball": [6.0, 4.0, 3.0],
        "sgd": [6.0, 5.0, 5.0],
    }


def test_constant_drift_in_closed_form() -> None:
    """Round k of a steady drift moves as far as the geometric sum says, exactly."""
    # eta a H (1 + mu (1 - mu^k) / (1 - mu)) with
    # eta 0.5, a H = 8, mu 0.5: 4 (1 + (1 - 2**-k)) = 8 - 4 / 2**k.
    velocity = array(0)
    for k in range(1, 12):
        change, velocity = outer.nesterov(array(8), velocity, lr=0.5, momentum=0.5)
        assert change.item() == -(8 - 4 / 2**k)


@pytest.mark.parametrize(("lr", "gain"), [(0.7, 7), (0.4, 4), (0.3, 3), (0.1, 1)])
def test_a_steady_drift_is_amplified(lr: float, gain: float) -> None:
    """With momentum 0.9 the limit of the step is lr / (1 - 0.9) times the drift."""
    velocity = array(0)
    for _ in range(400):
        change, velocity = outer.nesterov(
            array(1), velocity, lr=fp32(lr), momentum=fp32(0.9)
        )

    assert change.item() == pytest.approx(-gain, rel=1e-5)


@pytest.mark.parametrize(
    ("q", "lr", "radius"),
    [
        (0.1, 0.4, 0.930),
        (0.1, 0.7, 0.915),
        (0.1, 1.0, 0.900),
        (1.0, 0.4, 0.735),
        (1.0, 0.7, 0.520),
        (1.0, 1.0, 0.0),
    ],
)
def test_nesterov_on_a_quadratic_contracts_as_its_matrix(
    q: float, lr: float, radius: float
) -> None:
    """On a quadratic, rounds follow a 2 by 2 matrix whose radius is the known one."""
    # D = q x, b' = q x + mu b, x' = x - eta (D + mu b').
    mu = 0.9
    matrix = np.array([[1 - lr * (1 + mu) * q, -lr * mu**2], [q, mu]])
    x, velocity, state = array(1), array(0), np.array([1.0, 0.0])
    for _ in range(12):
        change, velocity = outer.nesterov(
            x * np.float32(q), velocity, lr=fp32(lr), momentum=fp32(mu)
        )
        x, state = outer.apply(x, change), matrix @ state
        assert [x.item(), velocity.item()] == pytest.approx(state.tolist(), abs=2e-6)

    # A double eigenvalue (q 0.1, lr 1) is found by eigvals to half the digits only.
    assert max(abs(np.linalg.eigvals(matrix))) == pytest.approx(radius, abs=6e-4)


@given(vectors, vectors, st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.integers(0, 9))
def test_a_buffer_of_one_is_nesterov(
    drift: list[float], velocity: list[float], activation: float, arrival: int
) -> None:
    """Delayed Nesterov with one arrival per step is Nesterov, to the bit, for any c."""
    # share = 1 - 0 c = 1, D/1 = D, S/1 = D; the same products and sums remain.
    scalars = {"lr": fp32(0.7), "momentum": fp32(0.9)}
    delay = outer.Delay(buffer=1, activation=activation)
    change, moved, pending = outer.delayed_nesterov(
        array(*drift),
        array(*velocity),
        array(0, 0, 0),
        arrival=arrival,
        delay=delay,
        **scalars,
    )
    expected, expected_velocity = outer.nesterov(
        array(*drift), array(*velocity), **scalars
    )

    assert equal(change, expected)
    assert equal(moved, expected_velocity)
    assert equal(pending, array(0, 0, 0))


@given(st.lists(eighths, min_size=4, max_size=4), eighths, eighths)
def test_a_full_buffer_is_one_step_on_the_mean(
    drifts: list[float], anchor: float, velocity: float
) -> None:
    """With c = 0, four arrivals move the anchor as one Nesterov step on their mean."""
    # N - 1 times -eta D_t/N, then -eta (D_N/N + mu b): -eta (mean + mu b). All dyadic.
    x, v, pending = array(anchor), array(velocity), array(0)
    for arrival, drift in enumerate(drifts):
        change, v, pending = outer.delayed_nesterov(
            array(drift),
            v,
            pending,
            arrival=arrival,
            delay=outer.Delay(buffer=4),
            lr=0.5,
            momentum=0.5,
        )
        x = outer.apply(x, change)
    change, once = outer.nesterov(
        mean([array(d) for d in drifts]), array(velocity), lr=0.5, momentum=0.5
    )

    assert equal(v, once)
    assert equal(x, outer.apply(array(anchor), change))


@given(st.lists(eighths, min_size=4, max_size=4), eighths)
def test_activation_spreads_the_momentum_step(
    drifts: list[float], velocity: float
) -> None:
    """The momentum part of a buffer is mu ((N-1) c b_old + (1 - (N-1) c) b_new)."""
    # N 4, c 1/8, mu 0.5, eta 1: the rest of the displacement is the mean.
    x, v, pending = array(0), array(velocity), array(0)
    for arrival, drift in enumerate(drifts):
        change, v, pending = outer.delayed_nesterov(
            array(drift),
            v,
            pending,
            arrival=arrival,
            delay=outer.Delay(buffer=4, activation=0.125),
            lr=1.0,
            momentum=0.5,
        )
        x = outer.apply(x, change)
    average = sum(drifts) / 4
    moved = 0.5 * velocity + average

    assert v.item() == moved
    assert x.item() == -(average + 0.5 * (0.375 * velocity + 0.625 * moved))


@pytest.mark.parametrize(
    ("buffer", "activation", "message"),
    [
        (0, 0.0, "buffer=0 must be at least 1"),
        (4, 0.3, "activation=0.3 must lie between 0 and 1/buffer=0.25"),
        (4, -0.1, "activation=-0.1"),
        (4, math.nan, "activation=nan"),
    ],
)
def test_an_impossible_delay_is_an_error(
    buffer: int, activation: float, message: str
) -> None:
    """Momentum is spread over one arrival or more, and at most once."""
    with pytest.raises(UsageError, match=message):
        outer.Delay(buffer=buffer, activation=activation)


@given(vectors, vectors, vectors, vectors)
def test_stepping_commutes_with_averaging(
    drift: list[float], other: list[float], velocity: list[float], slower: list[float]
) -> None:
    """For linear optimizers the mean of two steps is the step on the means, exactly."""
    # Linear maps; every value is a multiple of 2**-6 below 2**10: 16 bits, all exact.
    drifts, velocities = (
        [array(*drift), array(*other)],
        [array(*velocity), array(*slower)],
    )
    for step in (outer.nesterov, outer.heavy_ball):
        apart = [
            step(d, v, lr=0.5, momentum=0.5)
            for d, v in zip(drifts, velocities, strict=True)
        ]
        together = step(mean(drifts), mean(velocities), lr=0.5, momentum=0.5)
        assert equal(mean([change for change, _ in apart]), together[0])
        assert equal(mean([moved for _, moved in apart]), together[1])
    assert equal(
        mean([outer.sgd(d, lr=0.5) for d in drifts]), outer.sgd(mean(drifts), lr=0.5)
    )


def test_zero_pseudo_gradient_moves_nothing_at_rest() -> None:
    """A round in which nobody trained leaves anchor and velocity as they are."""
    anchor, rest = array(1.5, -3e-8, 2.0**90), array(0, 0, 0)
    for step in (outer.nesterov, outer.heavy_ball):
        change, velocity = step(rest, rest, lr=fp32(0.7), momentum=fp32(0.9))
        assert equal(outer.apply(anchor, change), anchor)
        assert equal(velocity, rest)


def test_a_mean_below_tiny_is_zero() -> None:
    """The decoded mean is flushed before it is used."""
    change, velocity = outer.nesterov(
        array(2.0**-101), array(0), lr=2.0**20, momentum=0.5
    )

    assert equal(change, array(0))
    assert equal(velocity, array(0))


def test_adam_moves_first_by_lr() -> None:
    """Adam's first change is -lr times the sign, whatever the size."""
    # m / c1 = D, sqrt(v / c2) = |D|, and eps is 1e-8 of D at 1.
    change, (first, second) = outer.adam(
        array(1, -1, 0),
        (array(0, 0, 0), array(0, 0, 0)),
        lr=0.5,
        momentum=0.5,
        count=1,
        sqrt=np.sqrt,
    )

    assert change.tolist() == pytest.approx([-0.5, 0.5, 0.0], rel=1e-6)
    assert first.tolist() == [0.5, -0.5, 0.0]
    assert second.tolist() == pytest.approx([0.01, 0.01, 0.0], rel=1e-6)


def test_adam_follows_its_equations() -> None:
    """Twenty steps agree with fp64 arithmetic of the textbook to fp32 precision."""
    rng = np.random.default_rng(0)
    x, moments = array(1, 2, 3), (array(0, 0, 0), array(0, 0, 0))
    y, m, v = x.astype(float), np.zeros(3), np.zeros(3)
    for count in range(1, 21):
        drift = rng.normal(size=3).astype(np.float32)
        change, moments = outer.adam(
            drift, moments, lr=0.25, momentum=fp32(0.9), count=count, sqrt=np.sqrt
        )
        x = outer.apply(x, change)
        m = 0.9 * m + 0.1 * drift
        v = 0.99 * v + 0.01 * drift.astype(float) ** 2
        hat = np.sqrt(v / (1 - 0.99**count))
        y = y - 0.25 * (m / (1 - 0.9**count)) / (hat + 1e-8)

    assert x.tolist() == pytest.approx(y.tolist(), rel=1e-5)


def test_adam_corrections_are_exact_in_fp32() -> None:
    """Every scalar of a step is an fp32 number, and the corrections grow to one."""
    for count in (1, 2, 3, 100, 10**6):
        scalars = outer.adam_corrections(momentum=fp32(0.9), count=count)
        assert [fp32(value) for value in scalars] == list(scalars)

    # 1 - 0.5**3
    assert outer.adam_corrections(momentum=0.5, count=3).correction1 == 0.875
    assert outer.adam_corrections(momentum=0.0, count=1).correction1 == 1.0
    assert outer.adam_corrections(momentum=0.9, count=10**6).correction1 == 1.0


def test_adam_counts_from_one() -> None:
    """A count of zero would divide by zero, and is refused."""
    with pytest.raises(UsageError, match="count=0 is not the number"):
        outer.adam_corrections(momentum=0.9, count=0)
