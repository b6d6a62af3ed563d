"""A coordinator at hand, with one fragment of three elements that starts at zero.

Outer SGD with lr 1: the anchor moves by minus the mean of the updates.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from atoll.coordinator import Service
from atoll.exchange import Frame
from atoll.exchange.calls import FoundCall, JoinCall, PublishCall
from atoll.protocol import JoinReply, JoinRequest
from atoll.simulate import SimDisk
from atoll.testing.fixtures import MODEL, OUTER, plain_settings
from atoll.weights import FragmentState
from atoll.wire import FrameKind, Header, with_body


def coordinator(disk: SimDisk, *names: str) -> tuple[Service, list[JoinReply]]:
    """Return a run that these islands have joined; the first one founded it."""
    settings = plain_settings(start_islands=len(names))
    service = Service.create(disk, settings, run="run", now_s=0.0)
    return service, [join(service, name) for name in names]


def join(service: Service, name: str, nonce: bytes = b"1") -> JoinReply:
    """Join, after whatever life is known, and found the run if nobody has."""
    known = service.state.members.known.get(name)
    after = known.incarnation if known else 0
    request = JoinRequest(model=MODEL, island=name, after=after)
    reply = service.handle(JoinCall(request, name.encode(), nonce), 0.0)
    assert isinstance(reply, JoinReply)
    if reply.is_founder:
        service.handle(founding(reply), 0.0)
    return reply


def founding(joined: JoinReply) -> FoundCall:
    """Return the call that brings zeros."""
    state = FragmentState.found(np.zeros(3, np.float32), "sgd")
    header, body = state.to_frame(
        run=joined.run,
        fragment=0,
        outer=OUTER,
        island=joined.island,
        incarnation=joined.incarnation,
    )
    return FoundCall(joined.island, joined.incarnation, (Frame(header, body),))


def update(
    service: Service, joined: JoinReply, value: float, *, round: int = 1, **more: object
) -> PublishCall:
    """Return an update whose every element is `value`."""
    body = np.full(3, value, np.float32).view(np.uint8)
    header = Header(
        kind=FrameKind.UPDATE,
        run="run",
        fragment=0,
        round=round,
        island=joined.island,
        incarnation=joined.incarnation,
        base=service.weights[0].digest,
        elements=3,
        norm=float(np.sqrt(3.0) * abs(value)),
    )
    return PublishCall(Frame(replace(with_body(header, body), **more), body))  # type: ignore[arg-type]


def anchor(service: Service) -> float:
    """Return the first element of the anchor; all three are alike."""
    return float(service.weights[0].anchor[0])
