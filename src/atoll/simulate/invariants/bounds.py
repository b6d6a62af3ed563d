"""What must stay small: updates held, bytes in flight, deadlines."""

from __future__ import annotations

from atoll.coordinator import Service
from atoll.exchange.calls import SMALL_BYTES
from atoll.protocol.rounds import Phase
from atoll.simulate.invariants.claims import BOUNDED, DEADLINES_BOUNDED, Report
from atoll.simulate.network import Network
from atoll.weights import Layout
from atoll.wire import Kind

STRANDS = 3
"""An island has at most so many calls under way: sending, receiving, a heartbeat."""

FRAME_BYTES = 4096
"""More than a frame's header with its roster takes."""


def most_bytes_in_flight(layout: Layout, *, islands: int, flight_s: float) -> int:
    """Return how many bytes can be under way at once.

    Each of an island's strands has one call or its answer under way, as large as the
    largest frame, a state: three fp32 vectors at most. It asks again after a timeout
    of at least 4 s, while what it sent before may be under way for `flight_s`; and
    any message may be there twice.
    """
    largest = SMALL_BYTES + FRAME_BYTES + 12 * sum(each.elements for each in layout)
    attempts = 2 + int(flight_s / 4.0)
    return 2 * islands * STRANDS * attempts * 2 * largest


def check_bytes(network: Network, most: int, report: Report) -> None:
    """Report more bytes under way than `most`."""
    if network.counts.bytes_in_flight > most:
        report(
            BOUNDED,
            "network",
            f"{network.counts.bytes_in_flight} bytes are under way, above {most}",
        )


def check_staged(service: Service, report: Report) -> None:
    """Report an update that is held for no open round, or one island's second."""
    for round in service.state.rounds:
        known = service.state.members.known.keys()
        is_ahead = all(
            header.kind is Kind.DEPARTING and header.round == round.number + 1
            for header in round.ahead.values()
        )
        is_now = all(each.round == round.number for each in round.staged.values())
        if not (is_ahead and is_now and {*round.staged, *round.ahead} <= known):
            report(
                BOUNDED,
                "coordinator",
                f"round {round.number} of fragment {round.fragment} holds updates of "
                "other rounds, or of strangers",
            )
    held = sum(len(each.staged) + len(each.ahead) for each in service.state.rounds)
    if len(service._spool) > held:
        report(
            BOUNDED,
            "coordinator",
            f"its spool holds {len(service._spool)} updates, and {held} are staged",
        )


def check_unconfirmed(who: str, kept: int, fragments: int, report: Report) -> None:
    """Report an island that keeps more updates than are in flight or departing."""
    if kept > 2 * fragments:
        report(
            BOUNDED,
            who,
            f"keeps {kept} updates without an outcome, of {fragments} fragments",
        )


def check_deadlines(service: Service, report: Report) -> None:
    """Report a deadline outside its bounds."""
    state, limits = service.state, service.state.settings.limits
    for round in state.rounds:
        if round.phase is not Phase.OPEN:
            continue
        for island in round.candidates:
            late_at_s = round.late_at_s(island, state.members, state.settings)
            after_s = late_at_s - round.opened_s
            # The clock shows up to some millions of seconds: a difference of sums.
            if (
                after_s < limits.deadline_min_s - 1e-6
                or late_at_s > round.waits_from_s + limits.deadline_max_s + 1e-6
            ):
                report(
                    DEADLINES_BOUNDED,
                    "coordinator",
                    f"waits {after_s:.3f} s for {island} in round {round.number} of "
                    f"fragment {round.fragment}",
                )
