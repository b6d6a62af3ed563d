"""An outcome that does not fit an island's state does not end the island."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

from atoll import RunSettings
from atoll.exchange import Frame, MemoryRun, Outcome
from atoll.island import Host
from atoll.protocol import JoinRequest
from atoll.testing import VectorView, vector_model
from atoll.wire import with_body

MODEL = vector_model({"w": (300,)})
SETTINGS = RunSettings.from_dict(
    {
        "run": {"start_islands": 1, "end_rounds": 4},
        "sync": {"sync_every": 2, "num_fragments": 1},
        "wire": {"up": "fp32", "down": "fp32"},
    }
)


class OneMisfit:
    """An exchange that gives the outcome of one round with a value that is none."""

    def __init__(self, inner: MemoryRun, round: int) -> None:
        self._inner, self._round = inner, round
        self.join, self.heartbeat = inner.join, inner.heartbeat
        self.publish, self.state, self.leave = inner.publish, inner.state, inner.leave

    def outcome(
        self, fragment: int, round: int, *, wait_s: float, has_body: bool = True
    ) -> Outcome | None:
        outcome = self._inner.outcome(fragment, round, wait_s=wait_s, has_body=has_body)
        if outcome is None or round != self._round:
            return outcome
        body = outcome.agreed.body.copy()
        body.view(np.float32)[7] = np.nan
        header = replace(outcome.agreed.header, body_bytes=0, pieces=())
        return replace(outcome, agreed=Frame(with_body(header, body), body))


def trained(misfit: int) -> tuple[bytes, bytes]:
    """Return the digests of the island and of the run at the end."""
    run, view = MemoryRun(SETTINGS), VectorView(fill=0.5)
    exchange = OneMisfit(run, misfit)
    request = JoinRequest(model=MODEL, island="a")
    host = Host(exchange, view, request)
    while not host.has_ended:
        for local in view.local:
            local -= np.float32(0.25)
        host.stepped()
    host.leave()
    return host.slots[0].read_digest(), run.state(0).header.base


@pytest.mark.parametrize("misfit", [1, 3])
def test_an_island_takes_the_runs_state_itself(
    misfit: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes on with the run's bits, and says what it did."""
    with caplog.at_level(logging.WARNING, logger="atoll"):
        mine, its = trained(misfit)

    assert mine == its
    told = [record.getMessage() for record in caplog.records]
    assert any("takes the run's state instead of its outcome" in each for each in told)
