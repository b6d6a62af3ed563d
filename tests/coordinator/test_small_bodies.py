"""Small outcomes lie in a file that they share, and each is sent as itself."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from atoll.exchange import Exchange, Frame, Outcome
from atoll.island.numpy_model import vector_model
from atoll.protocol import JoinReply, JoinRequest
from atoll.testing.fixtures import OUTER, plain_settings
from atoll.weights import FragmentState
from atoll.wire import FrameKind, Header, with_body
from tests.coordinator.serving import Islands, serving

ISLAND = "oslo"


def founded(island: Exchange, elements: int) -> JoinReply:
    """Join with a model of so many elements, all zero."""
    model = vector_model({"w": (elements,)})
    joined = island.join(JoinRequest(model=model, island=ISLAND))
    state = FragmentState.found(np.zeros(elements, np.float32), "sgd")
    island.publish(
        Frame(
            *state.to_frame(
                run=joined.run,
                fragment=0,
                outer=OUTER,
                island=ISLAND,
                incarnation=joined.incarnation,
            )
        )
    )
    return joined


def outcome(island: Exchange, joined: JoinReply, elements: int, round: int) -> Outcome:
    """Publish ones, and return what the round came to."""
    body = np.ones(elements, np.float32).view(np.uint8)
    header = Header(
        kind=FrameKind.UPDATE,
        run=joined.run,
        fragment=0,
        round=round,
        island=ISLAND,
        incarnation=joined.incarnation,
        base=island.state(0).header.base,
        elements=elements,
        norm=float(np.sqrt(elements)),
    )
    island.publish(Frame(with_body(header, body), body))
    found = island.outcome(0, round, wait_s=30.0)
    assert found is not None
    return found


def test_an_outcome_is_sent_without_its_body_if_asked(tmp_path: Path) -> None:
    """Who reads only the roster gets the header alone."""
    with ExitStack() as stack:
        settings = plain_settings(start_islands=1)
        coordinator = stack.enter_context(serving(tmp_path / "run", settings))
        island = Islands(coordinator, stack)(key=b"key")
        whole = outcome(island, founded(island, 20), 20, 1)
        short = island.outcome(0, 1, wait_s=0.0, has_body=False)

        assert short is not None
        assert (short.has_body, len(short.agreed.body)) == (False, 0)
        assert short.agreed.header == whole.agreed.header


@pytest.mark.parametrize("elements", [20, 40, 80])
def test_an_outcome_is_sent_whole_wherever_it_lies(
    elements: int, tmp_path: Path
) -> None:
    """Also where its place in the file is as far in as its header is long."""
    with ExitStack() as stack:
        settings = plain_settings(start_islands=1)
        coordinator = stack.enter_context(serving(tmp_path / "run", settings))
        island = Islands(coordinator, stack)(key=b"key")
        joined = founded(island, elements)
        for round in range(1, 8):
            agreed = outcome(island, joined, elements, round).agreed

            assert agreed.header.round == round
            assert (agreed.body.view(np.float32) == 1.0).all()
