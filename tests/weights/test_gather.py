"""A gathered outcome moves a state exactly as the mean of its updates in fp32 does."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.algorithm import merge as text
from atoll.errors import CorruptError
from atoll.settings import RunSettings
from atoll.testing import vector_model
from atoll.weights import (
    Contribution,
    FragmentLayout,
    FragmentState,
    Terms,
    agree,
    gather,
    reduce,
    terms_of,
)
from atoll.weights.reduce import SUM_BLOCK, Framed, mean_reader
from atoll.wire import (
    FrameKind,
    Header,
    Roster,
    RosterEntry,
    Verdict,
    codec,
    update_digest,
    verify_body,
    with_body,
)

# A tensor in several blocks of the sum, small ones at odd offsets, and an odd end.
LAYOUT = FragmentLayout(
    vector_model(
        {"a": (3,), "b": (2 * SUM_BLOCK + 77,), "c": (1,), "d": (9001,)}
    ).tensors
)
ISLANDS_OF = {"fp32": 1, "bf16": 2, "int8": 3, "e3m0": 5, "topk-2bit": 9}
"""How many updates of each codec are gathered: fewer bytes than their mean in fp32."""


def terms(up: str, *, merge: str = "mean", optimizer: str = "nesterov") -> Terms:
    outer = {"merge": merge, "optimizer": optimizer, "lr": 0.5, "momentum": 0.0}
    if merge != "trimmed":
        outer["weight"] = "tokens"
    tables = {"wire": {"up": up, "down": "gather"}, "outer": outer}
    return terms_of(LAYOUT, RunSettings.from_dict(tables))


def updates_of(
    up: str, weights: list[int], layout: FragmentLayout = LAYOUT, scale: float = 1.0
) -> dict[str, Framed]:
    """Return an update of each island, with normal values times `scale`."""
    packing, updates = codec(up), {}
    for number, weight in enumerate(weights):
        rng = np.random.default_rng(number)
        values = rng.normal(size=layout.elements).astype(np.float32)
        body = np.empty(packing.body_bytes(layout.elements), np.uint8)
        packing.encode(values * np.float32(scale), body)
        header = Header(
            kind=FrameKind.UPDATE,
            run="lagoon",
            fragment=0,
            round=1,
            island=f"i{number}",
            codec=up,
            elements=layout.elements,
            weight=weight,
        )
        updates[header.island] = with_body(header, body), body
    return updates


def roster_of(updates: dict[str, Framed]) -> Roster:
    """Return the roster that counts every update, with an island that is late."""
    entries = [
        RosterEntry(
            island=name,
            incarnation=1,
            digest=update_digest(header),
            weight=header.weight,
            verdict=Verdict.COUNTED,
        )
        for name, (header, _) in updates.items()
    ]
    late = replace(entries[0], island="h", verdict=Verdict.LATE, digest=b"")
    return Roster((late, *sorted(entries, key=lambda entry: entry.island)))


def agreed(its: Terms, updates: dict[str, Framed], base: bytes) -> Framed:
    """Return the agreed frame with the mean in fp32."""
    return agree(
        LAYOUT,
        its,
        roster_of(updates),
        updates,
        run="lagoon",
        fragment=0,
        round=1,
        base=base,
        outer=its.outer,
    )


def a_state(optimizer: str) -> FragmentState:
    anchor = np.random.default_rng(99).normal(size=LAYOUT.elements)
    return FragmentState.found(anchor.astype(np.float32), optimizer)


def gathered(its: Terms, updates: dict[str, Framed], base: bytes) -> Framed:
    """Return the gathered frame of a round, its body as one."""
    header, _ = agreed(its, updates, base)
    frame = gather(header, its, updates)
    assert frame is not None
    return frame[0], np.concatenate(frame[1])


@pytest.mark.parametrize("merge", ["mean", "radial", "trimmed"])
@pytest.mark.parametrize("up", sorted(ISLANDS_OF))
def test_a_gathered_outcome_gives_the_state_of_its_mean_in_fp32(
    up: str, merge: str
) -> None:
    """Anchor, velocity and digest are equal bit for bit, with any number of threads."""
    its = terms(up, merge=merge)
    weights = [1] * 9 if merge == "trimmed" else [3, 1, 4, 1, 5, 9, 2, 6, 5]
    updates = updates_of(up, weights[: ISLANDS_OF[up]])
    expected, states = a_state("nesterov"), [a_state("nesterov") for _ in range(2)]
    mean = agreed(its, updates, expected.digest)
    frame = gathered(its, updates, expected.digest)

    expected.apply(*mean)
    for threads, state in zip((1, 3), states, strict=True):
        state.apply(*frame, layout=LAYOUT, threads=threads)

    assert (mean[0].codec, mean[0].gathered) == ("fp32", "")
    assert (frame[0].codec, frame[0].gathered) == (up, merge)
    verify_body(*frame)
    for state in states:
        assert state.digest == expected.digest
        assert [vector.tobytes() for vector in state.vectors] == [
            vector.tobytes() for vector in expected.vectors
        ]


@pytest.mark.parametrize("optimizer", ["sgd", "heavy_ball", "adam"])
def test_every_optimizer_takes_a_gathered_outcome(optimizer: str) -> None:
    """The step is the one on the mean in fp32, whatever the optimizer."""
    its, updates = terms("e3m0", optimizer=optimizer), updates_of("e3m0", [1, 2, 3])
    expected, state = a_state(optimizer), a_state(optimizer)

    expected.apply(*agreed(its, updates, expected.digest))
    state.apply(*gathered(its, updates, state.digest))

    assert state.digest == expected.digest


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.lists(st.integers(1, 700), min_size=1, max_size=5),
    weights=st.lists(st.integers(1, 2**64 - 1), min_size=2, max_size=7),
    first=st.integers(0, 20),
)
def test_radial_in_blocks_is_the_text_tensor_by_tensor(
    sizes: list[int], weights: list[int], first: int
) -> None:
    """Wherever tensors begin and blocks end, the bits are those of whole tensors."""
    layout = FragmentLayout(
        vector_model({f"{n}": (size,) for n, size in enumerate(sizes)}).tensors
    )
    updates = list(updates_of("fp32", weights, layout).values())
    contributions = [
        Contribution(codec("fp32"), body, header.weight) for header, body in updates
    ]

    merged = reduce(layout, contributions, down=codec("fp32"), merge="radial")

    values = [body.view(np.float32) for _, body in updates]
    expected = [
        text.radial([value[start:stop] for value in values], weights)
        for start, stop in zip(layout.offsets[:-1], layout.offsets[1:], strict=True)
    ]
    assert merged.tobytes() == np.concatenate(expected).tobytes()


def test_radial_keeps_its_bits_over_block_edges() -> None:
    """Lanes go on where a tensor straddles blocks, at an offset that is no lane's."""
    updates = list(updates_of("fp32", [1, 1, 7]).values())
    contributions = [
        Contribution(codec("fp32"), body, header.weight) for header, body in updates
    ]

    merged = reduce(LAYOUT, contributions, down=codec("fp32"), merge="radial")

    values = [body.view(np.float32)[3 : 3 + 2 * SUM_BLOCK + 77] for _, body in updates]
    expected = text.radial(values, [1, 1, 7])
    assert merged.view(np.float32)[3 : 3 + len(expected)].tobytes() == (
        expected.tobytes()
    )


@pytest.mark.parametrize(
    ("up", "islands"), [("fp32", 2), ("bf16", 3), ("int8", 4), ("e3m0", 8)]
)
def test_updates_larger_than_their_mean_are_not_gathered(up: str, islands: int) -> None:
    """One update more would take over 4 bytes per element: the mean is sent instead."""
    its = terms(up)
    fitting, too_many = (
        updates_of(up, [1] * (islands - 1)),
        updates_of(up, [1] * islands),
    )

    assert gather(agreed(its, fitting, bytes(16))[0], its, fitting) is not None
    assert gather(agreed(its, too_many, bytes(16))[0], its, too_many) is None


def test_a_void_round_gathers_nothing() -> None:
    """Without counted updates there is no body, and the frame is that of every run."""
    its, updates = terms("e3m0"), updates_of("e3m0", [1, 1])
    refused = Roster(
        tuple(
            replace(entry, verdict=Verdict.REFUSED, reason="norm")
            for entry in roster_of(updates).counted
        )
    )
    header, body = agree(
        LAYOUT,
        its,
        refused,
        updates,
        run="lagoon",
        fragment=0,
        round=1,
        base=bytes(16),
        outer=its.outer,
    )

    assert gather(header, its, updates) is None
    assert (header.gathered, header.elements, len(body)) == ("", 0, 0)


def test_the_roster_has_the_weights_of_a_gathered_mean() -> None:
    """The mean is that of the entries' weights, not of what the updates once said."""
    its, updates = terms("e3m0"), updates_of("e3m0", [1, 1])
    header, body = gathered(its, updates, bytes(16))
    assert header.roster is not None
    late, first, second = header.roster.entries
    heavier = Roster((late, first, replace(second, weight=3)))
    mean = np.empty(LAYOUT.elements, np.float32)

    mean_reader(replace(header, roster=heavier), body, None)(0, mean)

    values = []
    for part in np.split(body, 2):
        value = np.empty_like(mean)
        codec("e3m0").decode(part, value)
        values.append(value)
    assert mean.tobytes() == text.weighted(values, [1, 3]).tobytes()


def test_a_gathered_body_that_does_not_decode_is_corrupt() -> None:
    """E3m0 has no exponent 255: the second update is named by nothing but its bytes."""
    its, updates = terms("e3m0"), updates_of("e3m0", [1, 1])
    state = a_state("nesterov")
    header, body = gathered(its, updates, state.digest)
    body[len(body) // 2] = 255

    with pytest.raises(CorruptError, match="element 0 of a body in e3m0 is not someth"):
        state.apply(header, body)
    assert state.digest == bytes(16)


def test_a_gathered_body_of_another_length_is_corrupt() -> None:
    """Three quarters of two bodies are no outcome, and nothing moves."""
    its, updates = terms("e3m0"), updates_of("e3m0", [1, 1])
    state = a_state("nesterov")
    header, body = gathered(its, updates, state.digest)

    with pytest.raises(CorruptError, match=f"its 2 times {LAYOUT.elements} elements"):
        state.apply(header, body[: 3 * len(body) // 4])


def test_updates_whose_sum_is_not_finite_are_corrupt() -> None:
    """Both are finite in bf16, and 2^127 + 2^127 is not: no step is taken on it."""
    its, updates = terms("bf16"), updates_of("bf16", [1, 1])
    state = a_state("nesterov")
    header, body = gathered(its, updates, state.digest)
    body.view(np.uint16)[:] = 0x7F00  # 2^127

    with pytest.raises(
        CorruptError, match=r"The mean of the agreed frame .* is not fin"
    ):
        state.apply(header, body)


def test_a_radial_outcome_of_other_tensors_is_corrupt() -> None:
    """Lengths are those of tensors, which must have all of its elements."""
    its, updates = terms("e3m0", merge="radial"), updates_of("e3m0", [1, 1])
    state = a_state("nesterov")
    header, body = gathered(its, updates, state.digest)
    one_less = FragmentLayout(vector_model({"a": (LAYOUT.elements - 1,)}).tensors)

    with pytest.raises(CorruptError, match=f"its tensors {LAYOUT.elements - 1}"):
        state.apply(header, body, layout=one_less)


def test_the_memory_of_a_step_does_not_grow_with_the_updates() -> None:
    """Seven updates take the blocks of two: one more for each doubling of the sum."""
    peaks_bytes = {}
    for islands in (2, 7):
        its, updates = terms("e3m0"), updates_of("e3m0", [1] * islands)
        state = a_state("nesterov")
        frame = gathered(its, updates, state.digest)
        tracemalloc.start()
        state.apply(*frame)
        _, peaks_bytes[islands] = tracemalloc.get_traced_memory()
        tracemalloc.stop()

    # Depth 1 and depth 3: two blocks of 4 * SUM_BLOCK bytes between them.
    assert peaks_bytes[7] < peaks_bytes[2] + 3 * 4 * SUM_BLOCK
