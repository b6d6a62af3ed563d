"""Islands of an asynchronous run over real connections."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from atoll import RunSettings
from atoll.exchange import CoordinatorExchange
from atoll.island import Host
from atoll.protocol import JoinRequest
from atoll.testing import VectorView, vector_model
from tests.coordinator.serving import line_to, serving

TOKENS, TIMEOUT_S = 600, 60.0
SETTINGS = RunSettings.from_dict(
    {
        "run": {"start_islands": 3, "end_tokens": TOKENS},
        "sync": {"mode": "async", "sync_every": 8, "overlap_steps": 3},
        "async": {"grace_s": 0.0},
        "wire": {"up": "e3m0", "down": "bf16"},
    }
)


@dataclass
class Ended:
    """An island at the end of its run."""

    digest: str
    losses: int
    counted: int
    tokens: int


def live(coordinator: object, name: str, ended: dict[str, Ended]) -> None:
    """Train to the end of the run; the islands i0, i1, i2 do more work each."""
    number = int(name[1:])
    rng, view = np.random.default_rng(number), VectorView()
    with ExitStack() as stack:
        line = stack.enter_context(line_to(coordinator))  # type: ignore[arg-type]
        exchange = CoordinatorExchange(line, key=name.encode(), nonce=b"1")
        request = JoinRequest(model=vector_model({"w": (3000,)}), island=name)
        host = Host(exchange, view, request)
        while not host.has_ended:
            for _ in range(1 + 20 * number):
                noise = rng.normal(size=3000).astype(np.float32)
            view.local[0] += noise - view.local[0] / 8
            host.count_tokens(1)
            host.stepped()
        host.leave()
    tally = host.tally
    losses = tally.carried + tally.dropped + tally.refused
    ended[name] = Ended(host.digest, losses, tally.counted, host.position.tokens)


def test_islands_of_an_asynchronous_run_end_on_one_state(tmp_path: Path) -> None:
    """Nothing is carried, dropped or refused; the run ends soon after its tokens."""
    ended: dict[str, Ended] = {}
    with serving(tmp_path / "run", SETTINGS) as coordinator:
        threads = [
            threading.Thread(target=live, args=(coordinator, f"i{number}", ended))
            for number in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)

    assert sorted(ended) == ["i0", "i1", "i2"]
    assert len({island.digest for island in ended.values()}) == 1
    for island in ended.values():
        assert island.losses == 0
        assert island.counted >= 2
        assert TOKENS <= island.tokens <= TOKENS + 2 * 3 * 8
