"""The kernels of the outer step and of the merge are the text of `algorithm`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll import kernels
from atoll.algorithm import outer as text
from atoll.algorithm.arithmetic import divide, flush, fp32
from tests.kernels.vectors import F32, KINDS, SHAPES, plain_vectors, same_bits, serving

LR, MOMENTUM = fp32(0.7), fp32(0.9)

kinds = pytest.mark.parametrize("kind", KINDS)
shapes = pytest.mark.parametrize("shape", [s for s in SHAPES if s != "huge"])


def after_text(optimizer: str, anchor: F32, velocity: F32, mean: F32) -> list[F32]:
    """Return anchor and velocity after one step of the text."""
    if optimizer == "sgd":
        return [text.apply(anchor, text.sgd(mean, lr=LR)), velocity]
    step: Callable[..., tuple[F32, F32]] = getattr(text, optimizer)
    change, velocity = step(mean, velocity, lr=LR, momentum=MOMENTUM)
    return [text.apply(anchor, change), velocity]


def after_kernel(optimizer: str, anchor: F32, velocity: F32, mean: F32) -> list[F32]:
    """Return anchor and velocity after one step of the serving kernel."""
    anchor, velocity = anchor.copy(), velocity.copy()
    if optimizer == "sgd":
        kernels.active().sgd(anchor, mean, LR)
    else:
        step = getattr(kernels.active(), optimizer)
        step(anchor, velocity, mean, LR, MOMENTUM)
    return [anchor, velocity]


@kinds
@shapes
@pytest.mark.parametrize("optimizer", ["sgd", "heavy_ball", "nesterov"])
@np.errstate(over="ignore", invalid="ignore")
def test_a_step_is_the_text(kind: str, shape: str, optimizer: str) -> None:
    """Anchor and velocity have the bits that the text gives them."""
    state = SHAPES["special"](5001), SHAPES[shape](5001)
    mean = SHAPES["gaussian"](5001)
    with serving(kind):
        served = after_kernel(optimizer, *state, mean)

    assert all(map(same_bits, served, after_text(optimizer, *state, mean)))


@kinds
@given(values=plain_vectors)
def test_a_nesterov_step_is_the_text_for_any_vector(kind: str, values: F32) -> None:
    """No vector tells kernel and text apart, whichever of the three it is."""
    state = values, values[::-1].copy()
    mean = np.roll(values, 1)
    with serving(kind):
        served = after_kernel("nesterov", *state, mean)

    assert all(map(same_bits, served, after_text("nesterov", *state, mean)))


@kinds
@shapes
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("share", [1.0, fp32(1 / 3), 2.0**-36])
@np.errstate(over="ignore", invalid="ignore")
def test_a_delayed_step_is_the_text(
    kind: str, shape: str, is_first: bool, is_last: bool, share: float
) -> None:
    """Wherever a round lies in its buffer, every bit is that of the text."""
    anchor, velocity = SHAPES["special"](5001), SHAPES[shape](5001)
    for mean in (SHAPES["gaussian"](5001), SHAPES["special"](5001)):
        change, moved = text.delayed_nesterov(
            mean,
            velocity,
            lr=LR,
            momentum=MOMENTUM,
            share=share,
            is_first=is_first,
            is_last=is_last,
        )
        served = anchor.copy(), velocity.copy()
        with serving(kind):
            kernels.active().nesterov(
                *served, mean, LR, MOMENTUM, share, is_first, is_last
            )

        assert same_bits(served[0], text.apply(anchor, change))
        assert same_bits(served[1], moved)


@kinds
@given(values=plain_vectors, share=st.floats(2.0**-36, 1.0, width=32))
def test_a_delayed_step_is_the_text_for_any_share(
    kind: str, values: F32, share: float
) -> None:
    """No vector and no share tell kernel and text apart, for Nesterov and for SGD."""
    anchor, velocity, mean = values, values[::-1].copy(), np.roll(values, 1)
    change, moved = text.delayed_nesterov(
        mean,
        velocity,
        lr=LR,
        momentum=MOMENTUM,
        share=share,
        is_first=False,
        is_last=True,
    )
    served, descended = (anchor.copy(), velocity.copy()), anchor.copy()
    with serving(kind):
        kernels.active().nesterov(*served, mean, LR, MOMENTUM, share, False, True)
        kernels.active().sgd(descended, mean, LR, share)

    assert same_bits(served[0], text.apply(anchor, change))
    assert same_bits(served[1], moved)
    assert same_bits(descended, text.apply(anchor, text.sgd(mean, lr=LR, share=share)))


@kinds
@pytest.mark.parametrize("share", [1.0, 0.25])
def test_a_delayed_step_decodes_bf16(kind: str, share: float) -> None:
    """A bf16 body gives the bits of its fp32 numbers, and refuses NaN, at any share."""
    half = (SHAPES["special"](5001).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    wide = (half.astype(np.uint32) << np.uint32(16)).view(np.float32)
    states = []
    for mean in (half, wide):
        states.append([SHAPES["gaussian"](5001), SHAPES["special"](5001)])
        with serving(kind):
            step = kernels.active().nesterov
            assert step(*states[-1], mean, LR, MOMENTUM, share, True, False) == -1
    assert all(map(same_bits, *states))

    half[[77, 99]] = 0x7FC0
    with serving(kind):
        refused = step(*states[0], half, LR, MOMENTUM, share, True, False)

    assert refused == 77


@kinds
@shapes
@pytest.mark.parametrize("count", [1, 7])
@np.errstate(over="ignore", invalid="ignore")
def test_adam_is_the_text(kind: str, shape: str, count: int) -> None:
    """Anchor and both moments have the bits that the text gives them."""
    anchor, first = SHAPES["gaussian"](5001), SHAPES["special"](5001)
    second, mean = abs(SHAPES["sparse"](5001)), SHAPES[shape](5001)
    change, moments = text.adam(
        mean, (first, second), lr=LR, momentum=MOMENTUM, count=count, sqrt=np.sqrt
    )
    expected = [text.apply(anchor, change), *moments]
    scalars = text.adam_corrections(momentum=MOMENTUM, count=count)
    with serving(kind):
        kernels.active().adam(anchor, first, second, mean, LR, MOMENTUM, *scalars)

    assert all(map(same_bits, expected, [anchor, first, second]))


@kinds
@given(values=plain_vectors, share=st.floats(2.0**-7, 1.0, width=32))
def test_sums_are_the_text(kind: str, values: F32, share: float) -> None:
    """Adding, adding a share and dividing are flushed after every operation."""
    total, x = values, values[::-1].copy()
    added, shared, divided = total.copy(), total.copy(), total.copy()
    both, scaled = total.copy(), total.copy()
    with serving(kind):
        kernels.active().accumulate(added, x)
        kernels.active().accumulate_scaled(shared, x, share)
        kernels.active().divide(divided, 3.0)
        kernels.active().accumulate_divided(both, x, 3.0)
        kernels.active().scale(scaled, share)

    assert same_bits(added, flush(total + x))
    assert same_bits(shared, flush(total + flush(x * share)))
    assert same_bits(divided, divide(total, 3.0))
    assert same_bits(both, divide(flush(total + x), 3.0))
    assert same_bits(scaled, flush(total * share))


@kinds
def test_scalars_may_be_any_float(kind: str) -> None:
    """A Python float is rounded to fp32: it never makes a loop fp64."""
    anchors = []
    for lr in (0.7, np.float32(0.7), np.float64(0.7)):
        anchors.append(SHAPES["gaussian"](300))
        with serving(kind):
            kernels.active().sgd(anchors[-1], SHAPES["gaussian"](300), lr)

    assert same_bits(anchors[0], anchors[1])
    assert same_bits(anchors[0], anchors[2])


@kinds
def test_flush_keeps_nan_and_drops_signs_of_zero(kind: str) -> None:
    """NaN stays NaN, both zeros become +0.0, and 2**-100 itself stays."""
    total = np.array([np.nan, -0.0, 2.0**-100, 2.0**-101, np.inf], np.float32)
    with serving(kind):
        kernels.active().accumulate(total, np.zeros(5, np.float32))

    assert np.isnan(total[0])
    assert total[1:].tolist() == [0.0, 2.0**-100, 0.0, np.inf]
    assert not np.signbit(total[1:]).any()


@kinds
def test_lanes_do_not_depend_on_how_a_vector_is_split(kind: str) -> None:
    """A norm taken in parts, each a multiple of 64 long, has the same lanes."""
    values = SHAPES["gaussian"](70000)
    whole, parts = np.zeros(64), np.zeros(64)
    with serving(kind):
        kernels.active().sum_squares(values, whole)
        for first in range(0, values.size, 6400):
            kernels.active().sum_squares(values[first : first + 6400], parts)

    assert whole.tobytes() == parts.tobytes()
    assert np.sqrt(whole.sum()) == pytest.approx(np.linalg.norm(values.astype("f8")))
