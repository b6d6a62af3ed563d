"""Who gives its state to whom, and what happens when it cannot."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from atoll.exchange import MemoryRun
from atoll.integrations.torchft import run_settings
from atoll.integrations.torchft.fragment import ABSTAINS
from atoll.integrations.torchft.island import enter
from atoll.integrations.torchft.settings import SMALLEST_PARCEL, spec_of
from atoll.integrations.torchft.state_transfer import (
    REQUESTS,
    Served,
    StateChannel,
    is_election,
    is_unserved,
    serve,
    transfer_of,
)
from atoll.wire import FrameKind, Header, OuterValues, Roster, RosterEntry, Verdict
from tests.torch.runs import Weights, together

pytestmark = pytest.mark.torch

MANY = bytes(range(256)) * (SMALLEST_PARCEL // 32)
"""More than two parcels of the smallest size."""


def channels(*names: str) -> list[StateChannel]:
    """Return the channels of islands that have joined one run."""
    settings = run_settings(1).with_values({"run.start_islands": len(names)})
    run, model = MemoryRun(settings), spec_of([Weights(0.0)])
    return [enter(run, model, name, num_fragments=1)[2] for name in names]


def leave(channel: StateChannel) -> None:
    """End an island's membership."""
    joined = channel.client.joined
    channel.client.exchange.leave(joined.island, joined.incarnation)


def entry(
    name: str, reason: str = "", *, step: int = 0, number: int = 1
) -> RosterEntry:
    """Return an entry that counted, or one that was refused for a reason."""
    return RosterEntry(
        island=name,
        incarnation=1,
        digest=bytes(32),
        weight=1,
        verdict=Verdict.REFUSED if reason else Verdict.COUNTED,
        reason=reason,
        inner_steps=step,
        tokens=number,
    )


def agreed(*entries: RosterEntry, fragment: int = 0, round: int = 5) -> Header:
    """Return the header of a round with this roster."""
    counted = any(each.verdict is Verdict.COUNTED for each in entries)
    return Header(
        kind=FrameKind.AGREED,
        run="run",
        fragment=fragment,
        round=round,
        elements=1 if counted else 0,
        weight=0,
        outer=OuterValues(optimizer="sgd", lr=1.0, momentum=0.0),
        roster=Roster(entries),
    )


def test_a_state_of_many_parcels_reaches_all_who_want_it() -> None:
    """The donor gives, those who want it have it, and who stands by goes on."""
    donor, bystander, first, second = channels("a", "b", "c", "d")

    _, _, *taken = together(
        partial(donor.send, MANY, transfer=7),
        partial(bystander.stand_by, transfer=7),
        partial(first.receive, transfer=7),
        partial(second.receive, transfer=7),
    )

    assert taken == [MANY, MANY]
    assert len({each.round for each in (donor, bystander, first, second)}) == 1
    assert donor.round > 3


def test_a_donor_that_goes_ends_its_transfer() -> None:
    """Nobody waits for a state whose owner has left; the next transfer succeeds."""
    donor, other, late = channels("a", "b", "c")
    leave(donor)

    _, nothing = together(
        partial(other.stand_by, transfer=7), partial(late.receive, transfer=7)
    )
    _, taken = together(
        partial(other.send, b"state", transfer=8), partial(late.receive, transfer=8)
    )

    assert nothing is None
    assert taken == b"state"


def test_who_comes_late_to_a_transfer_passes_by_those_of_others() -> None:
    """An earlier island's state is not taken for one's own."""
    donor, early = channels("a", "b")
    together(
        partial(donor.send, b"before", transfer=7), partial(early.receive, transfer=7)
    )
    late = StateChannel(early.client, early.index, early.layout, round=1)

    _, taken = together(
        partial(donor.send, b"mine", transfer=9), partial(late.receive, transfer=9)
    )

    assert taken == b"mine"


@pytest.mark.parametrize(
    ("entries", "donor"),
    [
        pytest.param(
            [entry("a", REQUESTS), entry("b"), entry("c")], "b", id="the first counted"
        ),
        pytest.param(
            [entry("a", ABSTAINS), entry("b"), entry("c", REQUESTS)],
            "b",
            id="counted before abstaining",
        ),
        pytest.param(
            [entry("a", ABSTAINS), entry("c", REQUESTS)], "a", id="one that abstained"
        ),
        pytest.param(
            [entry("a", REQUESTS, step=3), entry("b", REQUESTS, step=9)],
            "b",
            id="who has come furthest",
        ),
        pytest.param(
            [entry("a", REQUESTS), entry("b", "non-finite: w")],
            None,
            id="nobody, when a holder was refused",
        ),
        pytest.param([entry("a"), entry("b")], None, id="nobody wants it"),
    ],
)
def test_a_roster_names_the_donor(
    entries: list[RosterEntry], donor: str | None
) -> None:
    """Everyone who reads the roster knows who gives the state, if anybody does."""
    transfer = transfer_of(agreed(*entries), num_fragments=2)

    assert (transfer.donor[0] if transfer else None) == donor


def test_only_one_fragment_elects() -> None:
    """Islands that all want the state find one donor, whichever round they see."""
    wants = [entry("a", REQUESTS, step=3), entry("b", REQUESTS)]

    assert is_election(agreed(*wants))
    assert not is_election(agreed(*wants, fragment=1))
    assert transfer_of(agreed(*wants, fragment=1), num_fragments=2) is None


def test_a_request_is_served_once() -> None:
    """Rosters that list it again call for nothing; the next request does."""
    served: Served = {}
    first = transfer_of(agreed(entry("a"), entry("b", REQUESTS)), num_fragments=1)
    later = transfer_of(
        agreed(entry("a"), entry("b", REQUESTS, number=2)), num_fragments=1
    )
    assert first is not None
    assert later is not None
    assert is_unserved(first, served)

    serve(first, served)

    assert not is_unserved(first, served)
    assert is_unserved(later, served)


def test_transfers_of_two_rounds_differ() -> None:
    """A transfer's number belongs to one round of one fragment."""
    wanted = [entry("a"), entry("b", REQUESTS)]
    numbers = [
        transfer.number
        for fragment in range(3)
        for round in range(1, 5)
        if (
            transfer := transfer_of(
                agreed(*wanted, fragment=fragment, round=round), num_fragments=3
            )
        )
    ]

    assert len(set(numbers)) == 12


def test_parameters_are_named_by_their_module() -> None:
    """A run knows each parameter by its fragment, and the parcels' fragment last."""
    assert [each.name for each in spec_of([torch.nn.Linear(2, 1)]).tensors] == [
        "fragments.0.weight",
        "fragments.0.bias",
        "parcel",
    ]
