"""Error feedback and tentative sealing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.algorithm.adopt import carry, pseudo_gradient, rebase
from atoll.algorithm.arithmetic import flush
from atoll.algorithm.compress import counted, missed, refused, seal
from tests.algorithm.vectors import F32, array

Codec = Callable[[F32], F32]


def lossless(x: F32) -> F32:
    """Return what went in."""
    return x


def coarse(x: F32) -> F32:
    """Keep multiples of four."""
    return np.round(x / np.float32(4)) * np.float32(4)


def signs(x: F32) -> F32:
    """Keep signs only, at a fixed size."""
    return np.sign(x) * np.float32(8)


def nothing(x: F32) -> F32:
    """Keep nothing."""
    return x * np.float32(0)


codecs = st.sampled_from([lossless, coarse, signs, nothing])
whole = st.integers(-64, 64).map(float)


@given(st.lists(st.floats(-(2.0**90), 2.0**90, width=32), min_size=1, max_size=9))
def test_a_lossless_codec_leaves_no_residual(drifts: list[float]) -> None:
    """What is decoded is the pseudo-gradient, and the residual stays zero."""
    residual = array(0)
    for drift in drifts:
        decoded, residual = seal(array(drift), residual, lossless, decay=1.0)
        assert decoded.tobytes() == flush(array(drift)).tobytes()
        assert residual.tobytes() == array(0).tobytes()


@given(st.lists(whole, min_size=1, max_size=8), codecs, st.sampled_from([1.0, 0.5]))
def test_sent_plus_residual_is_what_was_done(
    drifts: list[float], codec: Codec, decay: float
) -> None:
    """Decayed work equals decayed updates plus the residual, exactly."""
    # sum beta^(T-t) D_t = sum beta^(T-t) q_t + e_T: e_T = D_T + beta e_(T-1) - q_T,
    # unrolled. Whole numbers below 2**10 and
    # seven halvings need fewer than 24 bits, so nothing rounds.
    done, sent, residual = 0.0, 0.0, array(0)
    for drift in drifts:
        decoded, residual = seal(array(drift), residual, codec, decay=decay)
        done = decay * done + drift
        sent = decay * sent + decoded.item()

    assert done == sent + residual.item()


def test_what_a_codec_drops_comes_later() -> None:
    """A drift of 1 per round through steps of 4 is sent as 0, 0, 4, 0, ..."""
    # 1 -> 0 left 1; 2 -> 0 (0.5 rounds to even) left 2; 3 -> 4 left -1; 0 -> 0 left 0.
    sent, residual = [], array(0)
    for _ in range(4):
        decoded, residual = seal(array(1), residual, coarse, decay=1.0)
        sent.append(decoded.item())

    assert sent == [0.0, 0.0, 4.0, 0.0]
    assert residual.item() == 0.0


def test_a_codec_that_refuses_changes_nothing() -> None:
    """When encoding raises, the residual from before is still there."""
    residual = array(3)

    def refuse(x: F32) -> F32:
        raise ValueError("not finite")

    with pytest.raises(ValueError, match="not finite"):
        seal(array(np.inf), residual, refuse, decay=1.0)
    assert residual.item() == 3.0


def test_the_outcome_chooses_the_residual() -> None:
    """Counted keeps the new one, missed restores the old one, refused clears it."""
    before, after = array(-3, 2), array(5, 0)

    assert counted(before, after).tolist() == [5, 0]
    assert missed(before, after).tolist() == [-3, 2]
    assert refused(before, after).tobytes() == array(0, 0).tobytes()


@dataclass
class Ledger:
    """One island, and where its work went."""

    codec: Codec
    anchor: F32 = field(default_factory=lambda: array(0))
    local: F32 = field(default_factory=lambda: array(0))
    residual: F32 = field(default_factory=lambda: array(0))
    committed: float = 0.0
    refused: float = 0.0
    work: float = 0.0

    def train(self, by: float) -> None:
        self.local = self.local - np.float32(by)
        self.work += by

    def round(self, verdict: str, in_flight: float, anchor: float) -> None:
        """Seal, train on, and take an outcome that moves the anchor to `anchor`."""
        pseudo = pseudo_gradient(self.anchor, self.local)
        before, at_seal, old = self.residual, self.local, self.anchor
        decoded, after = seal(pseudo, before, self.codec, decay=1.0)
        self.train(in_flight)
        self.anchor = array(anchor)
        if verdict == "counted":
            self.local = rebase(self.anchor, self.local, at_seal)
            self.residual = counted(before, after)
            self.committed += decoded.item()
        elif verdict == "missed":
            self.local = carry(self.anchor, old, self.local)
            self.residual = missed(before, after)
        else:
            self.local = self.anchor
            self.residual = refused(before, after)
            self.refused += pseudo.item() + before.item() + in_flight

    @property
    def held(self) -> float:
        return float(self.residual[0] + pseudo_gradient(self.anchor, self.local)[0])


@given(
    codecs,
    st.lists(
        st.tuples(
            st.sampled_from(["counted", "missed", "refused"]), whole, whole, whole
        ),
        max_size=12,
    ),
)
def test_no_work_is_lost_and_none_counts_twice(
    codec: Codec, rounds: list[tuple[str, float, float, float]]
) -> None:
    """Work done is committed, held or refused, for every pattern of outcomes."""
    # committed + residual + (anchor - local) = work done - refused.
    # counted: residual' = D + e - q and D' = work in flight, so the sum loses q.
    # missed:  residual' = e and D' = D + work in flight: nothing is lost.
    # refused: both are zero: D + e + work in flight is lost, and said so.
    # Whole numbers below 2**12: nothing rounds.
    ledger = Ledger(codec)
    for verdict, before_seal, in_flight, anchor in rounds:
        ledger.train(before_seal)
        ledger.round(verdict, in_flight, anchor)

        assert ledger.committed + ledger.held == ledger.work - ledger.refused
