"""However many threads and whichever kernels: the same bytes, digests and errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from atoll.errors import CorruptError
from atoll.settings import RunSettings
from atoll.testing import vector_model
from atoll.weights import (
    Contribution,
    FragmentLayout,
    FragmentState,
    Terms,
    agree,
    reduce,
    seal,
    terms_of,
)
from atoll.weights.reduce import Framed
from atoll.wire import (
    PIECE_ELEMENTS,
    FrameKind,
    Header,
    OuterValues,
    Roster,
    RosterEntry,
    Verdict,
    codec,
    verify_body,
    with_body,
)
from tests.kernels.vectors import KINDS, serving

ELEMENTS = 2 * PIECE_ELEMENTS + 4099
"""Two pieces and a rest: three threads have one each."""

LAYOUT = FragmentLayout(vector_model({"w": (ELEMENTS,)}).tensors)
THREADS = (1, 2, 3)
WIRES = [("fp32", "fp32"), ("bf16", "bf16"), ("e3m0", "int8"), ("topk-2bit", "e3m0")]

wires = pytest.mark.parametrize(("up", "down"), WIRES)


def normal(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(ELEMENTS, np.float32)


def updates(up: str, weights: list[int]) -> list[Contribution]:
    """Return what islands of these weights have sealed."""
    found = []
    for seed, weight in enumerate(weights):
        body = np.empty(codec(up).body_bytes(ELEMENTS), np.uint8)
        codec(up).encode(normal(seed), body, seed=seed)
        found.append(Contribution(codec(up), body, weight))
    return found


def every_way(work: Callable[[int], object]) -> list[object]:
    """Return what every kind of kernel gives on every number of threads."""
    found = []
    for kind in KINDS:
        with serving(kind):
            found += [work(threads) for threads in THREADS]
    return found


@wires
@pytest.mark.parametrize("weights", [[1], [7, 7], [1, 2, 4]], ids=str)
def test_a_round_is_reduced_to_the_same_bytes(
    up: str, down: str, weights: list[int]
) -> None:
    """Neither threads nor kernels show in the agreed body."""
    given = updates(up, weights)
    found = every_way(
        lambda threads: reduce(
            LAYOUT, given, down=codec(down), threads=threads
        ).tobytes()
    )

    assert found == found[:1] * len(found)


@pytest.mark.parametrize("merge", ["trimmed", "radial"])
def test_so_is_a_round_that_is_merged_another_way(merge: str) -> None:
    """A merge that sees all values of a coordinate depends on threads neither."""
    given = updates("bf16", [1, 1, 1])
    found = [
        reduce(LAYOUT, given, down=codec("int8"), merge=merge, threads=each).tobytes()
        for each in THREADS
    ]

    assert found == found[:1] * len(found)


@pytest.mark.parametrize("down", ["fp32", "bf16", "int8", "e3m0"])
@pytest.mark.parametrize("optimizer", ["sgd", "heavy_ball", "nesterov", "adam"])
def test_an_outcome_leaves_the_same_state(down: str, optimizer: str) -> None:
    """Anchor, moments and digest are the same after the same agreed frame."""
    momentum = 0.0 if optimizer == "sgd" else 0.75
    outer = OuterValues(optimizer=optimizer, lr=0.5, momentum=momentum)

    def applied(threads: int) -> tuple[bytes, ...]:
        state = FragmentState.found(normal(9), optimizer)
        state.apply(*frame_of(state, down, outer), threads=threads)
        return (state.digest, *(vector.tobytes() for vector in state.vectors))

    found = every_way(applied)
    assert found == found[:1] * len(found)


def frame_of(state: FragmentState, down: str, outer: OuterValues) -> Framed:
    """Return an agreed frame for the next round."""
    body = np.empty(codec(down).body_bytes(ELEMENTS), np.uint8)
    codec(down).encode(normal(1), body)
    header = Header(
        kind=FrameKind.AGREED,
        run="run",
        fragment=0,
        round=state.round + 1,
        base=state.digest,
        codec=down,
        elements=ELEMENTS,
        weight=0,
        outer=outer,
        roster=Roster((counted("a"),)),
    )
    return with_body(header, body), body


def counted(island: str) -> RosterEntry:
    return RosterEntry(
        island=island,
        incarnation=1,
        digest=bytes(32),
        weight=1,
        verdict=Verdict.COUNTED,
    )


@pytest.mark.parametrize("threads", THREADS)
def test_the_agreed_frame_knows_its_body(threads: int) -> None:
    """Digests taken on the way are those of the body, piece by piece."""
    terms = terms_of(LAYOUT, RunSettings.from_dict({"wire": {"down": "int8"}}))
    header, body = agreed_by(terms, threads)

    verify_body(header, body)
    unsealed = replace(header, body_bytes=0, pieces=())
    assert with_body(unsealed, body) == header


def agreed_by(terms: Terms, threads: int) -> Framed:
    """Return what two islands agree on."""
    came = {}
    for name, update in zip("ab", updates(terms.up.name, [1, 1]), strict=True):
        header = Header(
            kind=FrameKind.UPDATE,
            run="run",
            fragment=0,
            round=1,
            island=name,
            incarnation=1,
            codec=terms.up.name,
            elements=ELEMENTS,
            weight=1,
            norm=1.0,
        )
        came[name] = header, update.body
    return agree(
        LAYOUT,
        terms,
        Roster((counted("a"), counted("b"))),
        came,
        run="run",
        fragment=0,
        round=1,
        base=bytes(16),
        outer=terms.outer,
        threads=threads,
    )


def test_blocks_are_told_of_one_at_a_time() -> None:
    """Who gives back memory after a block is never called by two threads at once."""
    busy, calls = threading.Lock(), []

    def after_block() -> None:
        assert busy.acquire(blocking=False)
        calls.append(threading.get_ident())
        busy.release()

    given = updates("e3m0", [1, 1])
    reduce(LAYOUT, given, down=codec("int8"), after_block=after_block, threads=3)

    assert len(calls) >= -(-ELEMENTS // PIECE_ELEMENTS)


@pytest.mark.parametrize("threads", THREADS)
def test_the_first_element_that_does_not_decode_is_named(threads: int) -> None:
    """Of several bad blocks the lowest is told, whoever came across another first."""
    state = FragmentState.found(normal(2), "nesterov")
    outer = OuterValues(optimizer="nesterov", lr=0.5, momentum=0.75)
    header, body = frame_of(state, "fp32", outer)
    body.view(np.float32)[[PIECE_ELEMENTS + 5, 2 * PIECE_ELEMENTS + 1]] = np.nan

    with pytest.raises(CorruptError, match=f"Element {PIECE_ELEMENTS + 5} of the"):
        state.apply(header, body, threads=threads)
    assert state.digest == bytes(16)


@pytest.mark.parametrize("down", ["fp32", "int8"])
def test_a_body_of_another_length_is_refused(down: str) -> None:
    """The kernels read no further than the bytes that are there."""
    state = FragmentState.found(normal(2), "nesterov")
    outer = OuterValues(optimizer="nesterov", lr=0.5, momentum=0.75)
    header, body = frame_of(state, down, outer)

    with pytest.raises(CorruptError, match=rf"a body of {len(body) - 4} bytes, and"):
        state.apply(header, body[:-4])


@pytest.mark.parametrize("up", ["fp32", "bf16", "bf16-stochastic", "int8", "e3m0"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_feedback", [False, True])
def test_an_update_is_sealed_to_the_same_bytes(
    up: str, dtype: str, has_feedback: bool
) -> None:
    """Body, norm and residual are the same whichever kernels seal."""
    layout = FragmentLayout(vector_model({"w": (70_001,)}, dtype=dtype).tensors)
    anchor, local, residual = (normal(seed)[:70_001] for seed in (1, 2, 3))
    found = []
    for kind in KINDS:
        body = np.empty(codec(up).body_bytes(70_001), np.uint8)
        after = np.zeros(70_001, np.float32)
        with serving(kind):
            norm = seal(
                layout,
                anchor,
                local,
                body,
                up=codec(up),
                seed=5,
                residual=residual if has_feedback else None,
                residual_after=after if has_feedback else None,
                decay=0.95,
            )
        found.append((norm, body.tobytes(), after.tobytes()))

    assert found[0] == found[1]
