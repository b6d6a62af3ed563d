"""How an island enters a run: it founds the run, or takes its weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress

import numpy as np

from atoll.errors import FoundingLost, NonFinite, Unreachable
from atoll.exchange import Exchange, Frame
from atoll.island.slot import Slot
from atoll.island.view import ParameterView
from atoll.protocol import JoinReply, JoinRequest
from atoll.weights import FragmentLayout, FragmentState, lay_out, terms_of
from atoll.weights.layout import first_non_finite
from atoll.wire import verify_body


def enter(
    exchange: Exchange,
    view: ParameterView,
    request: JoinRequest,
    *,
    leaving: AbstractContextManager[object],
) -> tuple[JoinReply, list[Slot]]:
    """Join, and return the reply with one slot per fragment.

    Afterwards the live weights are the run's. On an error, or when SIGTERM ends it, the
    island is no member: it says so within `leaving`, or its lease runs out.
    """
    while True:
        joined = exchange.join(request)
        try:
            return joined, _slots(exchange, view, request, joined)
        except FoundingLost:
            continue  # still a member: another island has founded the run, or it will
        except BaseException:
            with suppress(Unreachable), leaving:
                exchange.leave(joined.island, joined.incarnation)
            raise


def _slots(
    exchange: Exchange, view: ParameterView, request: JoinRequest, joined: JoinReply
) -> list[Slot]:
    layout = lay_out(request.model, joined.settings)
    view.lay_out(layout)
    return [
        _slot(exchange, view, joined, index, fragment)
        for index, fragment in enumerate(layout)
    ]


def _slot(
    exchange: Exchange,
    view: ParameterView,
    joined: JoinReply,
    index: int,
    layout: FragmentLayout,
) -> Slot:
    if joined.is_founder:
        state = _found(exchange, view, joined, index, layout)
    else:
        state = fetch_state(exchange, index)
        view.write(index, state.anchor)
    terms = terms_of(layout, joined.settings)
    residual = np.zeros(layout.elements, np.float32) if terms.has_feedback else None
    return Slot(index=index, layout=layout, state=state, up=terms.up, residual=residual)


def fetch_state(exchange: Exchange, fragment: int) -> FragmentState:
    """Return the run's own state of a fragment, verified."""
    frame = exchange.state(fragment)
    verify_body(frame.header, frame.body)
    return FragmentState.from_frame(frame.header, frame.body)


def _found(
    exchange: Exchange,
    view: ParameterView,
    joined: JoinReply,
    index: int,
    layout: FragmentLayout,
) -> FragmentState:
    anchor = np.empty(layout.elements, np.float32)
    view.read(index, anchor)
    if (bad := first_non_finite(anchor)) is not None:
        raise NonFinite(
            f"{layout.name_at(bad)!r} holds {anchor[bad]}, and a run cannot be founded "
            "on that. Initialise the model anew.",
            index=bad,
        )
    outer = terms_of(layout, joined.settings).outer
    state = FragmentState.found(anchor, outer.optimizer)
    header, body = state.to_frame(
        run=joined.run,
        fragment=index,
        outer=outer,
        island=joined.island,
        incarnation=joined.incarnation,
    )
    exchange.publish(Frame(header, body))
    return state
