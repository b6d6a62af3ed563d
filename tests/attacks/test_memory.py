"""What an island declares costs the coordinator no memory before it is there."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from atoll.errors import UsageError
from atoll.exchange import CoordinatorExchange
from atoll.exchange.api import to_request
from atoll.exchange.calls import JoinCall
from atoll.island.numpy_model import vector_model
from atoll.protocol import JoinRequest
from atoll.routes import BodyKind
from atoll.testing.fixtures import OUTER
from atoll.wire import PIECE_ELEMENTS, FrameKind, Header, blake3_digest, pack
from atoll.wire.digests import view_of
from tests.attacks.conftest import Serve
from tests.coordinator.apart import Apart
from tests.coordinator.large import found
from tests.coordinator.serving import request
from tests.http.loopback import Dialogue

MB = 2**20
ELEMENTS = 2**26
"""Of a model whose state takes 256 MB."""

SENT_BYTES = 200 * MB
PART = bytes(4 * PIECE_ELEMENTS)


def state_header(run: str, island: str, incarnation: int, *, round: int) -> Header:
    """Return the header of a state of zeros."""
    return Header(
        kind=FrameKind.STATE,
        run=run,
        fragment=0,
        round=round,
        island=island,
        incarnation=incarnation,
        base=bytes(16),
        elements=ELEMENTS,
        weight=0,
        outer=OUTER,
        body_bytes=4 * ELEMENTS,
        pieces=(blake3_digest(PART),) * (ELEMENTS // PIECE_ELEMENTS),
    )


def asked(
    apart: Apart, line: str, size_bytes: int, kind: BodyKind, **headers: Any
) -> bytes:
    """Return the head of a request whose body has a size; keys are islands' names."""
    return request(
        apart, line, content_length=str(size_bytes), content_type=kind.value, **headers
    )


def say_most(dialogue: Dialogue, start: bytes) -> None:
    """Send the start of a body and most of what follows it, and no more."""
    dialogue.say(start)
    for _ in range(SENT_BYTES // len(PART)):
        dialogue.say(PART)


def largest_open_file_bytes(apart: Apart) -> int:
    """Return the size of the largest file that a coordinator has open."""
    return max(
        os.stat(handle.path).st_size
        for handle in os.scandir(f"/proc/{apart.process}/fd")
    )


def join(apart: Apart, name: str, **shapes: tuple[int, ...]) -> Any:
    with apart.line() as line:
        model = vector_model(shapes or {"w": (ELEMENTS,)})
        joining = JoinRequest(model=model, island=name)
        return line.call(JoinCall(joining, name.encode(), b"1"))


def test_a_founding_that_never_ends_stays_on_the_disk(serve: Serve) -> None:
    """200 MB of a state arrive, and memory grows by less than 48 MB."""
    apart = serve(start_islands=1)
    joined = join(apart, "a")
    packed = pack(state_header(joined.run, "a", joined.incarnation, round=0))
    line = f"POST /anchor?island=a&incarnation={joined.incarnation}"
    apart.forget_highest()
    before = apart.rss_bytes
    with Dialogue(apart.address) as dialogue:
        size = len(packed) + 4 * ELEMENTS
        start = asked(apart, line, size, BodyKind.FRAMES) + packed
        say_most(dialogue, start)
        grown = apart.highest_rss_bytes - before
        on_disk = largest_open_file_bytes(apart)

    assert on_disk > SENT_BYTES // 2
    assert grown <= 48 * MB


def test_a_second_founding_is_not_read_beside_the_first(serve: Serve) -> None:
    """Who founds the run sends its states once at a time, not by 32 connections."""
    apart = serve(start_islands=1)
    joined = join(apart, "a")
    packed = pack(state_header(joined.run, "a", joined.incarnation, round=0))
    line = f"POST /anchor?island=a&incarnation={joined.incarnation}"
    start = asked(apart, line, len(packed) + 4 * ELEMENTS, BodyKind.FRAMES) + packed
    with ExitStack() as stack:
        first, second = (stack.enter_context(Dialogue(apart.address)) for _ in range(2))
        say_most(first, start)
        second.say(start)
        heard = second.hear()

    assert (heard.status, heard.error) == (503, "unreachable")


def test_a_recovery_that_nobody_needs_is_not_read(serve: Serve) -> None:
    """It is answered by its header alone."""
    apart = serve(start_islands=1)
    with apart.line() as line:
        exchange = CoordinatorExchange(line, key=b"a", nonce=b"1")
        joined, _ = found(exchange, "a", np.zeros(ELEMENTS, np.float32))
    header = state_header(joined.run, "a", joined.incarnation, round=7)
    who = f"island=a&incarnation={joined.incarnation}"
    apart.forget_highest()
    before = apart.rss_bytes
    with Dialogue(apart.address) as dialogue:
        packed = pack(header)
        size = len(packed) + header.body_bytes
        dialogue.say(asked(apart, f"POST /state/0?{who}", size, BodyKind.FRAMES))
        dialogue.say(packed)
        heard = dialogue.hear()

    assert (heard.status, heard.error) == (409, "refused")
    assert apart.highest_rss_bytes - before <= 48 * MB


def test_a_model_that_cannot_be_founded_is_refused_at_joining(serve: Serve) -> None:
    """A model of a petabyte is names and shapes; the refusal says both numbers."""
    apart = serve(start_islands=1)
    with pytest.raises(UsageError, match=r"take 1125899906842624 bytes, and \d+ is"):
        join(apart, "a", w=(2**48,))

    assert join(apart, "b", w=(3,)).is_founder


def test_a_header_is_no_larger_than_its_fragment_has(serve: Serve) -> None:
    """64 MB that are declared for a header are refused before they are sent."""
    apart = serve(start_islands=1)
    with apart.line() as line:
        exchange = CoordinatorExchange(line, key=b"a", nonce=b"1")
        joined, _ = found(exchange, "a", np.zeros(3, np.float32))
    header = Header(
        kind=FrameKind.UPDATE,
        run=joined.run,
        fragment=0,
        round=1,
        island="a",
        incarnation=joined.incarnation,
        base=bytes(16),
        elements=2**30,
        body_bytes=2**32,
        pieces=(bytes(32),) * 2**12,
        norm=1.0,
    )
    packed = pack(header)
    with Dialogue(apart.address) as dialogue:
        target = "PUT /fragments/0/rounds/1/updates/a"
        start = asked(apart, target, 2**32 + len(packed), BodyKind.FRAME)
        dialogue.say(start + packed[:1024])
        heard = dialogue.hear()

    assert heard.error == "corrupt"
    assert "header_bytes=" in json.loads(heard.body)["message"]


def test_large_joinings_are_parsed_one_at_a_time(serve: Serve) -> None:
    """Eight at once cost less than four times what one costs: parsed JSON is large."""
    apart = serve(start_islands=1)
    model = vector_model({f"tensor.{number}": (1,) for number in range(20_000)})
    call = JoinCall(JoinRequest(model=model, island="a"), b"k", b"1")
    body = b"".join(view_of(part).tobytes() for part in to_request(call).body)
    no_proof = {"atoll_island_proof": None}
    start = apart.rss_bytes
    grown = []
    for count in (1, 8):
        apart.forget_highest()
        with ExitStack() as stack:
            crowd = [stack.enter_context(Dialogue(apart.address)) for _ in range(count)]
            for number, dialogue in enumerate(crowd):
                line = f"POST /islands/i{number}"
                size = len(body)
                request_head = asked(apart, line, size, BodyKind.JSON, **no_proof)
                dialogue.say(request_head + body)
            assert {dialogue.hear().status for dialogue in crowd} <= {200, 503}
        grown.append(apart.highest_rss_bytes - start)

    assert grown[1] <= 4 * grown[0]
