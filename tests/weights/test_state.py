"""The production outer step is the text of `algorithm.outer`, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from atoll import kernels
from atoll.algorithm import outer as text
from atoll.errors import CorruptError
from atoll.weights import FragmentState
from atoll.wire import (
    FrameKind,
    Header,
    OuterValues,
    Roster,
    RosterEntry,
    Verdict,
    codec,
    state_digest,
    verify_body,
    with_body,
)

ELEMENTS = 65536 + 4099
"""More than one piece of a state digest, and no multiple of a codec's block."""


def f32(value: float) -> float:
    return float(np.float32(value))


OUTERS = [
    OuterValues(optimizer="sgd", lr=f32(0.7), momentum=0.0),
    OuterValues(optimizer="nesterov", lr=f32(0.7), momentum=f32(0.9)),
    OuterValues(optimizer="heavy_ball", lr=f32(0.3), momentum=f32(0.9)),
    OuterValues(optimizer="adam", lr=f32(0.01), momentum=f32(0.9)),
]


def agreed(
    state: FragmentState, mean: np.ndarray, outer: OuterValues, down: str = "fp32"
) -> tuple[Header, np.ndarray]:
    """Return the frame of the next round whose one island sent `mean`."""
    entry = RosterEntry(
        island="a", incarnation=1, digest=bytes(32), weight=1, verdict=Verdict.COUNTED
    )
    body = np.empty(codec(down).body_bytes(len(mean)), np.uint8)
    codec(down).encode(mean, body)
    header = Header(
        kind=FrameKind.AGREED,
        run="run",
        fragment=0,
        round=state.round + 1,
        base=state.digest,
        codec=down,
        elements=len(mean),
        weight=0,
        outer=outer,
        roster=Roster((entry,)),
    )
    return with_body(header, body), body


def text_step(
    outer: OuterValues, anchor: np.ndarray, moments: list[np.ndarray], mean: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray]]:
    if outer.optimizer == "sgd":
        return text.apply(anchor, text.sgd(mean, lr=outer.lr)), []
    if outer.optimizer == "adam":
        change, (first, second) = text.adam(
            mean,
            (moments[0], moments[1]),
            lr=outer.lr,
            momentum=outer.momentum,
            count=outer.count,
            sqrt=np.sqrt,
        )
        return text.apply(anchor, change), [first, second]
    step = text.nesterov if outer.optimizer == "nesterov" else text.heavy_ball
    change, velocity = step(mean, moments[0], lr=outer.lr, momentum=outer.momentum)
    return text.apply(anchor, change), [velocity]


@pytest.fixture(params=["numba", "numpy"])
def kernel(request: pytest.FixtureRequest) -> object:
    """Run the test with the compiled kernels, and with the fallback."""
    kernels.use(request.param)
    yield
    kernels.use("numba")


@pytest.mark.parametrize("outer", OUTERS, ids=lambda outer: outer.optimizer)
@pytest.mark.parametrize("down", ["fp32", "bf16", "int8", "e3m0"])
@pytest.mark.usefixtures("kernel")
def test_three_rounds_are_three_steps_of_the_text(
    outer: OuterValues, down: str
) -> None:
    """Anchor, velocity and digest agree with the text, for every codec down."""
    rng = np.random.default_rng(5)
    anchor = rng.normal(size=ELEMENTS).astype(np.float32)
    state = FragmentState.found(anchor.copy(), outer.optimizer)
    moments = [np.zeros_like(anchor) for _ in state.moments]
    for count in (1, 2, 3):
        # Ranges over 60 powers of two, so that flushing has something to do.
        scale = np.exp2(rng.integers(-130, 20, ELEMENTS))
        mean = (rng.normal(size=ELEMENTS) * scale).astype(np.float32)
        header, body = agreed(state, mean, outer, down)
        codec(down).decode(body, mean)
        state.apply(header, body)

        counted = OuterValues(
            optimizer=outer.optimizer,
            lr=outer.lr,
            momentum=outer.momentum,
            count=count if outer.optimizer == "adam" else 0,
        )
        anchor, moments = text_step(counted, anchor, moments, mean)
        assert state.anchor.tobytes() == anchor.tobytes()
        assert [m.tobytes() for m in state.moments] == [m.tobytes() for m in moments]
        assert state.digest == state_digest(anchor, moments, counted.count)


@given(
    values=arrays(
        np.float32,
        st.integers(1, 70),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    )
)
def test_any_finite_mean_gives_the_bits_of_the_text(values: np.ndarray) -> None:
    """Subnormals, signed zeros and huge values included."""
    outer = OUTERS[1]
    state = FragmentState.found(np.flip(values).copy(), "nesterov")
    anchor, moments = state.anchor.copy(), [state.moments[0].copy()]
    header, body = agreed(state, values, outer)
    state.apply(header, body)
    with np.errstate(over="ignore", invalid="ignore"):
        anchor, moments = text_step(outer, anchor, moments, values)

    assert state.anchor.tobytes() == anchor.tobytes()
    assert state.moments[0].tobytes() == moments[0].tobytes()


def test_a_state_survives_its_frame() -> None:
    """Anchor, moments, round, count and digest come back from the bytes."""
    rng = np.random.default_rng(1)
    state = FragmentState.found(rng.normal(size=99).astype(np.float32), "adam")
    state.apply(*agreed(state, np.ones(99, np.float32), OUTERS[3]))

    header, body = state.to_frame(run="run", fragment=2, outer=OUTERS[3])
    verify_body(header, body)
    again = FragmentState.from_frame(header, body)

    assert (again.round, again.count, again.digest) == (1, 1, state.digest)
    assert again.anchor.tobytes() == state.anchor.tobytes()


def test_a_state_frame_with_another_digest_is_corrupt() -> None:
    """The digest in the header is checked against the vectors themselves."""
    state = FragmentState.found(np.ones(9, np.float32), "sgd")
    header, body = state.to_frame(run="run", fragment=2, outer=OUTERS[0])
    body[0] ^= 1

    with pytest.raises(CorruptError, match=r"fragment 2 at round 0 has digest"):
        FragmentState.from_frame(header, body)


def test_a_void_round_uses_its_number_and_moves_nothing() -> None:
    """State unchanged, round number used (no. 26)."""
    state = FragmentState.found(np.ones(9, np.float32), "nesterov")
    digest = state.digest
    header, _ = agreed(state, np.ones(9, np.float32), OUTERS[1])
    void = Header(
        kind=FrameKind.AGREED,
        run="run",
        fragment=0,
        round=1,
        base=digest,
        weight=0,
        outer=header.outer,
        roster=Roster(()),
    )
    state.apply(void, np.empty(0, np.uint8))

    assert (state.round, state.digest, state.anchor[0]) == (1, digest, 1.0)


def test_an_outcome_of_another_round_or_state_is_refused_untouched() -> None:
    """Applying a round twice, or one from another history, changes nothing."""
    state = FragmentState.found(np.ones(9, np.float32), "sgd")
    header, body = agreed(state, np.ones(9, np.float32), OUTERS[0])
    state.apply(header, body)
    digest = state.digest

    with pytest.raises(CorruptError, match=r"is for round 1 .* this is round 2"):
        state.apply(header, body)
    assert state.digest == digest
