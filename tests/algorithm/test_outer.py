"""The outer optimizers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.algorithm import outer
from atoll.algorithm.arithmetic import fp32
from atoll.algorithm.merge import mean
from atoll.errors import UsageError
from tests.algorithm.vectors import F32, array, eighths, equal

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


shares = st.sampled_from([1.0, 0.75, 0.25, 2.0**-36])


@given(vectors, vectors)
def test_a_round_that_fills_the_buffer_alone_is_nesterov(
    drift: list[float], velocity: list[float]
) -> None:
    """With share 1, first and last, delayed Nesterov is Nesterov, to the bit."""
    scalars = {"lr": fp32(0.7), "momentum": fp32(0.9)}
    delayed = outer.delayed_nesterov(
        array(*drift),
        array(*velocity),
        share=1.0,
        is_first=True,
        is_last=True,
        **scalars,
    )
    plain = outer.nesterov(array(*drift), array(*velocity), **scalars)

    assert all(map(equal, delayed, plain))


def after_buffer(
    drifts: list[float], sizes: list[int], anchor: float, velocity: float
) -> tuple[F32, F32]:
    """Return anchor and velocity after rounds that hold `sizes` of the updates."""
    x, v = array(anchor), array(velocity)
    first = 0
    for size in sizes:
        members = [array(drift) for drift in drifts[first : first + size]]
        change, v = outer.delayed_nesterov(
            mean(members),
            v,
            lr=0.5,
            momentum=0.5,
            share=size / len(drifts),
            is_first=first == 0,
            is_last=first + size == len(drifts),
        )
        x, first = outer.apply(x, change), first + size
    return x, v


@given(
    st.lists(eighths, min_size=4, max_size=4),
    st.sampled_from([[1, 1, 1, 1], [2, 2], [1, 2, 1], [2, 1, 1], [1, 1, 2], [4]]),
    eighths,
    eighths,
)
def test_a_full_buffer_is_one_step_on_the_mean(
    drifts: list[float], sizes: list[int], anchor: float, velocity: float
) -> None:
    """However rounds group four updates, they move as one step on their mean."""
    # A round of k of N updates adds (k/N) mean_k = (sum of its D) / N to the velocity.
    # -eta (sum of all x) - eta mu b with b = mu b_old + mean: one Nesterov step. Every
    # number is a multiple of 2**-8 below 2**10, hence exact.
    moved, once = after_buffer(drifts, sizes, anchor, velocity)
    change, expected = outer.nesterov(
        mean([array(drift) for drift in drifts]),
        array(velocity),
        lr=0.5,
        momentum=0.5,
    )

    assert equal(once, expected)
    assert equal(moved, outer.apply(array(anchor), change))


def test_four_updates_worked_out_by_hand() -> None:
    """Updates 1, 2, 3, 4 in a buffer of 4, lr and momentum 0.5, end where they must."""
    # b 0.25, 0.75, 1.5, 2.5; change -0.125, -0.25, -0.375, -(1 + 2.5/2)/2 = -1.125.
    # The mean is 2.5: b = 2.5, change -(2.5 + 1.25)/2 = -1.875 in one step.
    anchor, velocity = after_buffer([1.0, 2.0, 3.0, 4.0], [1, 1, 1, 1], 0.0, 0.0)

    assert velocity.item() == 2.5
    assert anchor.item() == -1.875


def test_buffers_on_a_constant_drift_in_closed_form() -> None:
    """The k-th full buffer of a steady drift moves as the k-th Nesterov step."""
    # lr d (1 + mu (1 - mu**k) / (1 - mu)) with lr 0.5, d 8, mu 0.5: 8 - 4 / 2**k.
    anchor, velocity = array(0), array(0)
    for k in range(1, 12):
        start = anchor
        anchor, velocity = after_buffer(
            [8.0, 8.0], [1, 1], anchor.item(), velocity.item()
        )
        assert (anchor - start).item() == -(8 - 4 / 2**k)


@given(vectors, shares)
def test_sgd_moves_by_its_share_of_the_mean(drift: list[float], share: float) -> None:
    """Plain descent multiplies the mean by its share, and by nothing if that is 1."""
    # eighths times a multiple of 1/4 or a power of two: exact in fp32.
    change = outer.sgd(array(*drift), lr=0.5, share=share)

    assert change.tolist() == [-0.5 * share * d for d in drift]
    assert equal(
        outer.sgd(array(*drift), lr=fp32(0.7), share=1.0),
        outer.sgd(array(*drift), lr=fp32(0.7)),
    )


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
