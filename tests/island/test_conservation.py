"""Nothing a survivor did is lost, nothing counts twice: the law of DESIGN section 3."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll import RunSettings
from atoll.errors import AtollWarning, Refused
from atoll.island import Host
from atoll.protocol import JoinRequest
from atoll.testing import VectorView, vector_model
from atoll.wire import codec
from tests.island.scripted import ISLAND, ScriptedRun

CODECS = ("fp32", "bf16", "bf16-stochastic", "int8", "e3m0", "topk-2bit")
ELEMENTS = 4100
"""More than one block of every codec, and no multiple of any."""


class Ledger:
    """The work of the island, and the parts that the run took, refused or dropped."""

    def __init__(self, host: Host, view: VectorView, run: ScriptedRun) -> None:
        self.host, self.view, self.run = host, view, run
        zero = np.zeros(ELEMENTS)
        self.work, self.committed, self.lost, self.error = (zero.copy() for _ in "1234")

    def train(self, rng: np.random.Generator) -> None:
        step = rng.normal(size=ELEMENTS).astype(np.float32)
        before = self.view.local[0].astype(np.float64)
        self.view.local[0] -= step
        self.work += before - self.view.local[0]

    def in_hand(self) -> np.ndarray:
        """Return residual plus anchor minus local: all that is still the island's."""
        slot = self.host.slots[0]
        loaded = np.empty(ELEMENTS, np.float32)
        slot.layout.load(slot.state.anchor, loaded)
        residual = 0.0 if slot.residual is None else slot.residual
        return np.asarray(loaded.astype(np.float64) - self.view.local[0] + residual)

    def settle(self, in_hand_before: np.ndarray, verdicts: dict[str, int]) -> None:
        """Book the outcome of one round of which `in_hand_before` was sealed."""
        frame = self.run.published[-1]
        if verdicts["counted"]:
            sent = np.empty(ELEMENTS, np.float32)
            codec(frame.header.codec).decode(frame.body, sent)
            self.committed += sent
            if self.host.slots[0].residual is None:
                self.error += in_hand_before - sent
        elif verdicts["refused"]:
            self.lost += in_hand_before
        elif verdicts["dropped"]:
            residual = self.host.slots[0].residual
            self.lost += in_hand_before - (0.0 if residual is None else residual)

    def worst_balance(self) -> float:
        """Return the largest difference between the two sides, over all elements."""
        total = self.committed + self.in_hand() + self.error
        return float(np.abs(total - (self.work - self.lost)).max())


def counts(host: Host) -> dict[str, int]:
    counters = host.counters
    return {
        "counted": counters.counted,
        "carried": counters.carried,
        "refused": counters.refused,
        "dropped": counters.dropped,
    }


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("up", CODECS)
@given(
    fates=st.lists(
        st.sampled_from(["counted", "missed", "refused", "passed"]), max_size=9
    ),
    feedback=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=25)
def test_work_is_conserved(
    mode: str, up: str, fates: list[str], feedback: bool, seed: int
) -> None:
    """Committed, in hand and codec error add up to work less refused and dropped.

    In an asynchronous run none is carried or dropped.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AtollWarning)
        run_settings = RunSettings.from_dict(
            {
                "sync": {"sync_every": 2, "mode": mode},
                "wire": {"up": up, "down": "fp32", "error_feedback": feedback},
            }
        )
        run, view = ScriptedRun(run_settings, iter(fates)), VectorView()
        host = Host(
            run,
            view,
            JoinRequest(model=vector_model({"w": (ELEMENTS,)}), island=ISLAND),
        )
        ledger, rng = Ledger(host, view, run), np.random.default_rng(seed)
        try:
            for fate in fates:
                _one_round(host, view, ledger, rng, fate)
                # fp32 rounding of values of order 10 over a few rounds.
                assert ledger.worst_balance() < 1e-4
                assert (
                    mode == "sync" or not host.counters.carried + host.counters.dropped
                )
        except Refused:
            assert host.counters.refused >= 2
        finally:
            host.leave(depart=False)


def test_the_weight_of_carried_work_has_its_tokens() -> None:
    """Round 1 misses 10 tokens, which are in the 15 of round 2; round 3 has its own."""
    tables = {"sync": {"sync_every": 2}, "outer": {"weight": "tokens"}}
    fates = iter(["missed", "counted", "counted"])
    run, view = ScriptedRun(RunSettings.from_dict(tables), fates), VectorView()
    request = JoinRequest(model=vector_model({"w": (3,)}), island=ISLAND)
    host = Host(run, view, request)
    for tokens in (5, 5, 2, 3, 4, 4):
        view.local[0] -= np.float32(1)
        host.count_tokens(tokens)
        host.stepped()
    host.leave()

    assert [frame.header.weight for frame in run.published] == [10, 15, 8]


def _one_round(
    host: Host, view: VectorView, ledger: Ledger, rng: np.random.Generator, fate: str
) -> None:
    before = counts(host)
    ledger.train(rng)
    host.stepped()
    ledger.train(rng)
    in_hand_before = ledger.in_hand()
    if fate == "refused":
        view.local[0][7] = np.nan
    host.stepped()
    after = counts(host)
    ledger.settle(in_hand_before, {name: after[name] - before[name] for name in after})
