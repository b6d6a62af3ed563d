"""States and updates of one fragment, as large as a test needs them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atoll.exchange import Exchange, Frame
from atoll.island.numpy_model import vector_model
from atoll.protocol import JoinReply, JoinRequest
from atoll.weights import FragmentState, lay_out, terms_of
from atoll.weights.verify import Norm
from atoll.wire import FrameKind, Header, codec, with_body

F32 = NDArray[np.float32]


def found(exchange: Exchange, island: str, anchor: F32) -> tuple[JoinReply, bytes]:
    """Join as the first island, bring a model of one tensor, and return its digest."""
    model = vector_model({"w": (len(anchor),)})
    joined = exchange.join(JoinRequest(model=model, island=island))
    assert joined.is_founder
    (layout,) = lay_out(model, joined.settings)
    outer = terms_of(layout, joined.settings).outer
    header, body = FragmentState.found(anchor, outer.optimizer).to_frame(
        run=joined.run,
        fragment=0,
        outer=outer,
        island=island,
        incarnation=joined.incarnation,
    )
    exchange.publish(Frame(header, body))
    return joined, header.base


def update(
    joined: JoinReply, values: F32, *, base: bytes, round: int = 1, up: str = "fp32"
) -> Frame:
    """Return an update; one in fp32 is its values."""
    body, decoded = values.view(np.uint8), values
    if up != "fp32":
        body = np.empty(codec(up).body_bytes(len(values)), np.uint8)
        decoded = np.empty_like(values)
        codec(up).encode(values, body)
        codec(up).decode(body, decoded)
    norm = Norm()
    norm.add(decoded)
    header = Header(
        kind=FrameKind.UPDATE,
        run=joined.run,
        fragment=0,
        round=round,
        island=joined.island,
        incarnation=joined.incarnation,
        base=base,
        codec=up,
        elements=len(values),
        norm=norm.value(),
    )
    return Frame(with_body(header, body), body)
