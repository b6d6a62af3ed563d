"""What a coordinator costs in memory, in a process of its own, so that it is honest.

Run with `-o log_cli=true --log-level=info` to see the figures.
"""

from __future__ import annotations

import json
import logging
import resource
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.exchange import CoordinatorExchange, Frame, Outcome
from atoll.exchange.calls import OutcomeCall, PublishCall
from atoll.exchange.over_http import HttpTransport
from atoll.island.numpy_model import vector_model
from atoll.protocol import JoinReply, JoinRequest, Reception
from atoll.routes import BodyKind
from atoll.testing.fixtures import OUTER
from atoll.wire import PIECE_ELEMENTS, FrameKind, Header, pack
from tests.coordinator.apart import Apart, serving_apart
from tests.coordinator.large import found, update
from tests.coordinator.serving import request
from tests.http.loopback import Dialogue

MB = 2**20
GB_ELEMENTS = 2**28
AT_ONCE = 50
NUM_WAITERS = 2000
ELEMENTS = 25_000_000
ROUNDS = 2

log = logging.getLogger(__name__)


def settings(
    num_islands: int, optimizer: str = "sgd", *, up: str = "fp32", down: str = "fp32"
) -> dict[str, Any]:
    return {
        "run": {"start_islands": num_islands, "quorum": num_islands},
        "wire": {"up": up, "down": down},
        "outer": {"optimizer": optimizer, "lr": 1.0},
    }


def test_an_upload_of_a_gigabyte_stays_on_the_disk(tmp_path: Path) -> None:
    """Memory grows by at most 32 MB while it arrives and is verified."""
    with ExitStack() as stack:
        apart = stack.enter_context(serving_apart(tmp_path / "run", settings(2)))
        line = stack.enter_context(apart.line())
        a = CoordinatorExchange(line, key=b"a", nonce=b"1")
        zeros = np.zeros(GB_ELEMENTS, np.float32)
        joined, base = found(a, "a", zeros)
        frame = update(joined, zeros, base=base)
        apart.forget_highest()
        before = apart.rss_bytes
        reception = line.call(PublishCall(frame))
        grown = apart.highest_rss_bytes - before

    log.info("1 GB upload: %.1f MB beyond %.0f MB", grown / MB, before / MB)
    assert (reception, frame.header.body_bytes) == (Reception.STAGED, 2**30)
    assert grown <= 32 * MB


def test_nothing_is_reserved_for_who_may_not_found(tmp_path: Path) -> None:
    """A gigabyte is announced, and refused before any of it is read."""
    header = Header(
        kind=FrameKind.STATE,
        run="run",
        fragment=0,
        round=0,
        island="a",
        incarnation=1,
        base=bytes(16),
        elements=GB_ELEMENTS,
        weight=0,
        outer=OUTER,
        body_bytes=4 * GB_ELEMENTS,
        pieces=(bytes(32),) * (GB_ELEMENTS // PIECE_ELEMENTS),
    )
    packed = pack(header)
    size = {"content-length": str(len(packed) + header.body_bytes)}
    with ExitStack() as stack:
        apart = stack.enter_context(serving_apart(tmp_path / "run", settings(2)))
        dialogue = stack.enter_context(Dialogue(apart.address))
        apart.forget_highest()
        before = apart.rss_bytes
        line = "POST /anchor?island=a&incarnation=1"
        frames = BodyKind.FRAMES.value
        dialogue.say(asked(apart, line, content_type=frames, **size) + packed)
        heard = dialogue.hear()
        grown = apart.highest_rss_bytes - before

    assert (heard.status, heard.error) == (410, "lease_lost")
    assert grown <= 32 * MB


def test_two_thousand_questions_cost_no_thread_each(tmp_path: Path) -> None:
    """Who waits for an outcome costs at most 64 MB in all, and gets it."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2 * (NUM_WAITERS + 100):
        pytest.skip("this process may not open two thousand connections")
    with ExitStack() as stack:
        served = serving_apart(tmp_path / "run", settings(1), is_still=True)
        apart = stack.enter_context(served)
        line = stack.enter_context(apart.line())
        a = CoordinatorExchange(line, key=b"a", nonce=b"1")
        joined, base = found(a, "a", np.zeros(3, np.float32))
        asking = stack.enter_context(Dialogue(apart.address))
        came = bytes_in(apart, asking)
        threads, before = apart.num_threads, apart.rss_bytes
        question = asked(apart, "GET /fragments/0/rounds/1/outcome?wait_s=60")
        crowd: list[Dialogue] = []
        for _ in range(NUM_WAITERS):
            crowd.append(stack.enter_context(Dialogue(apart.address)))
            crowd[-1].say(question)
            if len(crowd) % AT_ONCE == 0:  # few may wait that have shown no token
                while bytes_in(apart, asking) < came + len(crowd) * len(question):
                    pass
        grown, threads_then = apart.rss_bytes - before, apart.num_threads
        ones = np.ones(3, np.float32)
        line.call(PublishCall(update(joined, ones, base=base)))

        assert {dialogue.hear().status for dialogue in crowd} == {200}
    log.info("%d questions: %.1f MB", NUM_WAITERS, grown / MB)
    assert threads_then <= threads  # one that warms kernels may have ended
    assert grown <= 64 * MB


@pytest.mark.parametrize(
    ("up", "down", "most"), [("fp32", "fp32", 8), ("e3m0", "gather", 7)]
)
def test_the_memory_of_a_run_does_not_grow_with_its_islands(
    up: str, down: str, most: int, tmp_path: Path
) -> None:
    """At most 12 bytes per parameter, the mean's body and 64 MB, whoever takes part.

    Seven updates are gathered as they lie in their files.
    """
    highest = {
        num_islands: _highest_of(
            tmp_path / f"run-{num_islands}", num_islands, up=up, down=down
        )
        for num_islands in (2, most)
    }
    agreed_bytes = 4 * ELEMENTS
    for num_islands, (grown, idle) in highest.items():
        said = (num_islands, grown / MB, grown / ELEMENTS, idle / MB)
        log.info("%d islands: %.0f MB, %.1f per parameter, idle %.0f MB", *said)
        assert grown <= 12 * ELEMENTS + agreed_bytes + 64 * MB
    assert highest[most][0] - highest[2][0] <= 32 * MB


def _highest_of(
    directory: Path, num_islands: int, *, up: str, down: str
) -> tuple[int, int]:
    """Return the most memory of a run beyond an idle coordinator's, and that one's."""
    with ExitStack() as stack:
        chosen = settings(num_islands, "nesterov", up=up, down=down)
        served = serving_apart(directory, chosen)
        apart = stack.enter_context(served)
        line = stack.enter_context(apart.line())
        idle = apart.rss_bytes
        founder = CoordinatorExchange(line, key=b"0", nonce=b"1")
        values = np.random.default_rng(0).normal(size=ELEMENTS).astype(np.float32)
        first, base = found(founder, "island-0", values)
        frame = update(first, values, base=base, up=up)
        joined = [first, *(_join(line, each) for each in range(1, num_islands))]
        for round in range(1, ROUNDS + 1):
            _train(line, frame, joined, round=round, base=founder.state(0).header.base)
        return apart.highest_rss_bytes - idle, idle


def _join(line: HttpTransport, number: int) -> JoinReply:
    exchange = CoordinatorExchange(line, key=str(number).encode(), nonce=b"1")
    model = vector_model({"w": (ELEMENTS,)})
    return exchange.join(JoinRequest(model=model, island=f"island-{number}"))


def _train(
    line: HttpTransport,
    frame: Frame,
    joined: list[JoinReply],
    *,
    round: int,
    base: bytes,
) -> None:
    """Let every island publish the same, and wait for the outcome."""
    for each in joined:
        header = replace(
            frame.header,
            round=round,
            base=base,
            island=each.island,
            incarnation=each.incarnation,
        )
        line.call(PublishCall(Frame(header, frame.body)))
    while not isinstance(line.call(OutcomeCall(0, round, 2.0)), Outcome):
        continue


def asked(apart: Apart, line: str, **headers: str) -> bytes:
    """Return the head of an island's request."""
    given: dict[str, Any] = {**headers}
    return request(apart, line, **given)


def bytes_in(apart: Apart, dialogue: Dialogue) -> int:
    """Return how much the coordinator has read so far."""
    dialogue.say(asked(apart, "GET /status"))
    return int(json.loads(dialogue.hear().body)["bytes_in"])
