"""What an island fetches of its run."""

from __future__ import annotations

from atoll.exchange import Exchange
from atoll.weights import FragmentState
from atoll.wire import verify_body


def fetch_state(exchange: Exchange, fragment: int) -> FragmentState:
    """Return the run's own state of a fragment, verified."""
    frame = exchange.state(fragment)
    verify_body(frame.header, frame.body)
    return FragmentState.from_frame(frame.header, frame.body)
