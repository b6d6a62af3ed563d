"""Rounds of an asynchronous run: ages, shares, and the buffer that a state counts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.algorithm import merge
from atoll.algorithm import outer as text
from atoll.algorithm.arithmetic import fp32
from atoll.algorithm.pace import aged_weight, buffer_share
from atoll.protocol.rounds import refuse_all
from atoll.settings import (
    AsyncSection,
    OuterSection,
    RunSettings,
    SyncSection,
    WireSection,
)
from atoll.testing import vector_model
from atoll.weights import FragmentLayout, FragmentState, agree, lay_out, terms_of
from atoll.weights.reduce import Framed
from atoll.wire import (
    FrameKind,
    Header,
    OuterValues,
    Roster,
    RosterEntry,
    Verdict,
    codec,
    pack,
    state_digest,
    unpack,
    with_body,
)

ELEMENTS = 5
SGD = OuterSection(optimizer="sgd", lr=1.0)
eighths = st.integers(-1024, 1024).map(lambda n: n / 8)
"""Eleven bits: sums and quarters of a few are exact in fp32."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """What one island sends, and how old it is when it counts."""

    value: float
    age: int = 0
    weight: int = 1


@dataclass
class Fragment:
    """A fragment whose rounds come of given updates, as a run's exchange makes them."""

    outer: OuterSection = field(default_factory=lambda: OuterSection(lr=0.5))
    staleness: str = "none"
    elements: int = ELEMENTS
    down: str = "fp32"

    def __post_init__(self) -> None:
        self.settings = RunSettings(
            sync=SyncSection(mode="async"),
            wire=WireSection(up="fp32", down=self.down),
            outer=self.outer,
            asynchronous=AsyncSection(staleness=self.staleness),
        )
        model = vector_model({"w": (self.elements,)})
        (self.layout,) = lay_out(model, self.settings)
        self.terms = terms_of(self.layout, self.settings)
        anchor = np.zeros(self.elements, np.float32)
        self.state = FragmentState.found(anchor, self.outer.optimizer)

    def frame(self, *updates: Update, buffer: int) -> Framed:
        """Return the agreed frame of the next round."""
        framed = {f"i{n}": self._framed(f"i{n}", u) for n, u in enumerate(updates)}
        entries = [
            RosterEntry(
                island=name,
                incarnation=1,
                digest=bytes(32),
                weight=aged_weight(update.weight, update.age, kind=self.staleness),
                verdict=Verdict.COUNTED,
                age=update.age,
            )
            for name, update in zip(framed, updates, strict=True)
        ]
        return agree(
            self.layout,
            self.terms,
            Roster(tuple(entries)),
            framed,
            run="run",
            fragment=0,
            round=self.state.round + 1,
            base=self.state.digest,
            outer=self.terms.outer,
            buffer=buffer,
        )

    def take(self, *updates: Update, buffer: int) -> OuterValues:
        """Take the outer step of a round; return the values in its frame."""
        header, body = self.frame(*updates, buffer=buffer)
        self.state.apply(unpack(pack(header)), body)
        assert header.outer is not None
        return header.outer

    def _framed(self, island: str, update: Update) -> Framed:
        values = np.full(self.elements, update.value, np.float32)
        body = np.empty(codec("fp32").body_bytes(self.elements), np.uint8)
        codec("fp32").encode(values, body)
        header = Header(
            kind=FrameKind.UPDATE,
            run="run",
            fragment=0,
            round=1,
            island=island,
            incarnation=1,
            elements=self.elements,
            weight=update.weight,
        )
        return with_body(header, body), body


def first_of(state: FragmentState) -> tuple[float, float]:
    """Return the first element of anchor and velocity."""
    return state.anchor[0].item(), state.moments[0][0].item()


def test_updates_one_by_one_are_one_step_on_their_mean() -> None:
    """Updates 1, 2, 3, 4 with a buffer of 4 end where one synchronous step ends."""
    # Identity: with lr = momentum = 0.5 velocity 2.5 and anchor -1.875, worked out in
    # tests/algorithm/test_outer.py.
    single, together = (
        Fragment(outer=OuterSection(lr=0.5, momentum=0.5)) for _ in range(2)
    )
    updates = [Update(value=value) for value in (1.0, 2.0, 3.0, 4.0)]
    counts = []
    for update in updates:
        single.take(update, buffer=4)
        counts.append(single.state.count)
    together.take(*updates, buffer=0)

    assert counts == [1, 2, 3, 0]
    assert first_of(single.state) == first_of(together.state) == (-1.875, 2.5)
    assert single.state.digest == together.state.digest


@given(
    st.lists(eighths, min_size=8, max_size=8),
    st.sampled_from([(4, 4), (1, 3), (2, 2), (2, 1), (1, 1)]),
)
def test_any_grouping_of_fresh_updates_is_nesterov_to_rounding(
    values: list[float], sizes: tuple[int, int]
) -> None:
    """Two buffers of 4 move as two synchronous steps, however rounds group them."""
    # Means of three are rounded, so that only dyadic groups have equal bits.
    grouped, synchronous = Fragment(), Fragment()
    updates = [Update(value=value) for value in values]
    for filling in (updates[:4], updates[4:]):
        start = 0
        while start < 4:
            size = sizes[start > 0]
            grouped.take(*filling[start : start + size], buffer=4)
            start += size
        synchronous.take(*filling, buffer=0)

    assert grouped.state.count == 0
    np.testing.assert_allclose(
        first_of(grouped.state), first_of(synchronous.state), rtol=1e-5, atol=1e-4
    )


@given(
    st.lists(
        st.lists(st.tuples(eighths, st.integers(0, 9)), min_size=1, max_size=5),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from(["fp32", "bf16", "int8"]),
)
def test_a_buffer_of_one_is_the_synchronous_law(
    rounds: list[list[tuple[float, int]]], down: str
) -> None:
    """With buffer 1 every roster gives the bits of a synchronous round, at any age."""
    delayed, synchronous = Fragment(down=down), Fragment(down=down)
    for members in rounds:
        updates = [Update(value=value, age=age) for value, age in members]
        values = delayed.take(*updates, buffer=1)
        synchronous.take(*updates, buffer=0)

        assert (values.share, values.buffer) == (1.0, 1)
        assert delayed.state.digest == synchronous.state.digest
        assert delayed.state.count == 0


@pytest.mark.parametrize("staleness", ["none", "inverse", "inverse_root"])
@pytest.mark.parametrize("optimizer", ["nesterov", "sgd"])
@pytest.mark.parametrize("merge_name", ["mean", "radial"])
def test_a_round_is_the_text(staleness: str, optimizer: str, merge_name: str) -> None:
    """Weights by age, share, step and count are those of the texts, round by round."""
    outer = OuterSection(optimizer=optimizer, lr=0.7, merge=merge_name)
    fragment = Fragment(outer=outer, staleness=staleness)
    anchor, velocity, count = (*np.zeros((2, ELEMENTS), np.float32), 0)
    rng = np.random.default_rng(3)
    for _ in range(12):
        updates = [
            Update(value=rng.normal(), age=int(age), weight=int(weight))
            for age, weight in rng.integers(1, 9, (rng.integers(1, 4), 2))
        ]
        ages = [update.age for update in updates]
        weights = [aged_weight(u.weight, u.age, kind=staleness) for u in updates]
        values = [np.full(ELEMENTS, u.value, np.float32) for u in updates]
        mean = (merge.radial if merge_name == "radial" else merge.weighted)(
            values, weights
        )
        share = buffer_share(ages, kind=staleness, buffer=5)
        is_last = count + len(updates) >= 5
        if optimizer == "sgd":
            change = text.sgd(mean, lr=fp32(0.7), share=share)
        else:
            change, velocity = text.delayed_nesterov(
                mean,
                velocity,
                lr=fp32(0.7),
                momentum=fp32(0.9),
                share=share,
                is_first=count == 0,
                is_last=is_last,
            )
            count = 0 if is_last else count + len(updates)
        anchor = text.apply(anchor, change)
        moments = [velocity] if optimizer == "nesterov" else []

        shown = fragment.take(*updates, buffer=5)

        assert (shown.share, shown.buffer) == (share, 5)
        assert fragment.state.count == count
        assert fragment.state.digest == state_digest(anchor, moments, count)


def test_only_the_mean_knows_the_weights() -> None:
    """Tokens weigh updates in the mean, and each update fills the buffer alike."""
    # Weights 3 and 1: mean (3 * 4 + 0) / 4 = 3. Two of four updates: share 0.5, and
    # lr 1 moves the anchor by -0.5 * 3.
    fragment = Fragment(outer=SGD)
    fragment.take(Update(value=4.0, weight=3), Update(value=0.0), buffer=4)

    assert fragment.state.anchor[0] == -1.5


def test_sgd_has_no_buffer_to_count() -> None:
    """Plain descent keeps no count: N updates of d move by d, whoever sends them."""
    fragment = Fragment(outer=SGD)
    for age in (0, 7, 3, 1):
        fragment.take(Update(value=8.0, age=age), buffer=4)

    assert fragment.state.count == 0
    assert fragment.state.anchor[0] == -8.0


def test_a_buffer_may_change_while_it_is_filled() -> None:
    """A buffer that became smaller, as an island left, ends with the next round."""
    # lr = momentum = 0.5. x = 8/4 = 2: b 2, anchor -1. Then N = 2 and x = 8/2 = 4:
    # count 1 + 1 >= 2, b 2 + 4 = 6, anchor -1 - (4 + 3) / 2 = -4.5.
    fragment = Fragment(outer=OuterSection(lr=0.5, momentum=0.5))
    fragment.take(Update(value=8.0), buffer=4)
    assert (first_of(fragment.state), fragment.state.count) == ((-1.0, 2.0), 1)
    fragment.take(Update(value=8.0), buffer=2)

    assert (first_of(fragment.state), fragment.state.count) == ((-4.5, 6.0), 0)


def test_more_updates_than_the_buffer_holds_are_one_step() -> None:
    """A round larger than the rest of the buffer ends it, with its own share."""
    # Buffer 2 after 1: two updates make count 3 >= 2, and their share is 2/2 = 1.
    fragment = Fragment(outer=OuterSection(lr=0.5, momentum=0.5))
    fragment.take(Update(value=2.0), buffer=2)
    values = fragment.take(Update(value=2.0), Update(value=6.0), buffer=2)

    # x = 2/2 = 1: b 1, anchor -0.5. x = 4: b 5, anchor -0.5 - (4 + 2.5)/2 = -3.75.
    assert values.share == 1.0
    assert (first_of(fragment.state), fragment.state.count) == ((-3.75, 5.0), 0)


def test_a_void_round_keeps_the_count() -> None:
    """A round in which nothing counted has no share, and leaves the buffer as it is."""
    fragment = Fragment()
    fragment.take(Update(value=2.0), buffer=4)
    digest, count = fragment.state.digest, fragment.state.count
    header, _ = fragment.frame(Update(value=2.0), buffer=4)
    assert header.roster is not None
    roster = refuse_all(header.roster, "norm: the mean overflows")
    void, body = agree(
        fragment.layout,
        fragment.terms,
        roster,
        {},
        run="run",
        fragment=0,
        round=2,
        base=digest,
        outer=fragment.terms.outer,
        buffer=4,
    )
    fragment.state.apply(void, body)

    assert void.outer == fragment.terms.outer
    assert (fragment.state.round, fragment.state.digest) == (2, digest)
    assert fragment.state.count == count == 1


def test_a_mean_that_overflows_has_no_share() -> None:
    """A round that turns out void while it is reduced is sealed as a void one."""
    # Finite updates whose sum is beyond fp32.
    fragment = Fragment()
    header, body = fragment.frame(*[Update(value=3e38)] * 2, buffer=4)

    assert header.outer is not None
    assert header.roster is not None
    assert (header.outer.share, header.outer.buffer) == (0.0, 0)
    assert (header.roster.counted, len(body)) == ((), 0)


def test_the_count_of_a_buffer_is_in_the_digest_and_survives_a_frame() -> None:
    """States that differ only in their count differ, and a frame keeps the count."""
    fragment = Fragment()
    values = fragment.take(Update(value=2.0), Update(value=4.0), buffer=4)
    state = fragment.state
    header, body = state.to_frame(run="run", fragment=0, outer=values)
    again = FragmentState.from_frame(unpack(pack(header)), body)

    assert header.outer == replace(fragment.terms.outer, count=2)
    assert (again.count, again.digest) == (2, state.digest)
    assert state.digest != state_digest(state.anchor, state.moments, 0)


def test_nesterov_on_a_constant_drift_in_closed_form() -> None:
    """The k-th buffer moves lr d (1 + mu (1 - mu**k) / (1 - mu)), at any grouping."""
    # lr 0.5, d 8, mu 0.5: 8 - 4 / 2**k.
    fragment = Fragment(outer=OuterSection(lr=0.5, momentum=0.5))
    anchors = [0.0]
    for k in range(8):
        for size in ((1, 1, 1, 1), (2, 2), (1, 1, 2), (4,))[k % 4]:
            fragment.take(*[Update(value=8.0)] * size, buffer=4)
        anchors.append(fragment.state.anchor[0].item())

    moves = [after - before for before, after in pairwise(anchors)]
    assert moves == [-(8 - 4 / 2**k) for k in range(1, 9)]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("down", ["fp32", "bf16", "int8"])
def test_threads_leave_the_same_bits(threads: int, down: str) -> None:
    """A share and a place in the buffer reach every block of a large fragment."""
    elements = 4 * 65536 + 4099
    fragments = [Fragment(elements=elements, down=down) for _ in range(2)]
    for fragment, count in zip(fragments, (1, threads), strict=True):
        for value in (1.5, -0.3, 0.7):
            header, body = fragment.frame(Update(value=value), buffer=3)
            fragment.state.apply(header, body, threads=count)

    assert fragments[0].state.digest == fragments[1].state.digest


def test_the_buffers_fragment_moves_by_its_share() -> None:
    """A model's buffers follow the mean by the share of the round, without velocity."""
    settings = RunSettings(sync=SyncSection(mode="async"))
    layout = FragmentLayout(vector_model({"mean": (3,)}).tensors, is_buffers=True)
    terms = terms_of(layout, settings)
    fragment = Fragment(outer=SGD, elements=3)
    fragment.layout, fragment.terms = layout, terms
    fragment.take(Update(value=8.0), buffer=4)

    assert fragment.state.anchor.tolist() == [-2.0, -2.0, -2.0]
