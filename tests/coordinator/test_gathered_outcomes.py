"""Gathered outcomes at a coordinator: the updates as they came, sent and journalled."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from atoll.coordinator.app import Coordinator
from atoll.coordinator.submissions import header_bytes, outcome_header_bytes
from atoll.exchange import Frame, Outcome
from atoll.protocol import JoinRequest
from atoll.settings import RunSettings
from atoll.testing import vector_model
from atoll.weights import FragmentState, lay_out, terms_of
from atoll.wire import PIECE_ELEMENTS, Roster, pack
from tests.coordinator.large import found, update
from tests.coordinator.serving import Islands, asking, serving
from tests.wire.samples import a_gathered, an_entry, sealed

ISLANDS = ("a", "b", "c")
OUTCOME = "GET /fragments/0/rounds/1/outcome"


def settings(up: str, merge: str = "mean") -> RunSettings:
    return RunSettings.from_dict(
        {
            "run": {"start_islands": 3, "quorum": 3},
            "wire": {"up": up, "down": "gather"},
            "outer": {"merge": merge},
        }
    )


def a_round(
    coordinator: Coordinator, stack: ExitStack, *, elements: int, up: str
) -> tuple[list[Frame], Outcome, Frame]:
    """Return the updates of a round, its outcome, and the coordinator's state."""
    islands = Islands(coordinator, stack)
    exchanges = {name: islands(key=name.encode()) for name in ISLANDS}
    joined, base = found(exchanges["a"], "a", np.ones(elements, np.float32))
    replies = [joined]
    model = vector_model({"w": (elements,)})
    for name in ISLANDS[1:]:
        replies.append(exchanges[name].join(JoinRequest(model=model, island=name)))
    updates = []
    for seed, reply in enumerate(replies):
        values = np.random.default_rng(seed).normal(size=elements)
        updates.append(update(reply, values.astype(np.float32), base=base, up=up))
        exchanges[reply.island].publish(updates[-1])
    outcome = exchanges["a"].outcome(0, 1, wait_s=30.0)
    assert outcome is not None
    return updates, outcome, exchanges["b"].state(0)


@pytest.mark.parametrize("elements", [130, 2 * PIECE_ELEMENTS + 77])
def test_an_outcome_is_its_updates_one_after_another(
    elements: int, tmp_path: Path
) -> None:
    """Wherever the journal has it, from any byte on, and after a restart."""
    chosen = settings("e3m0")
    with ExitStack() as stack:
        coordinator = stack.enter_context(serving(tmp_path / "run", chosen))
        updates, outcome, _ = a_round(coordinator, stack, elements=elements, up="e3m0")
        whole = asking(coordinator, OUTCOME)
        first = len(whole.body) // 2
        etag = whole.headers["etag"]
        rest = asking(coordinator, OUTCOME, range=f"bytes={first}-", if_range=etag)
    with serving(tmp_path / "run", None) as coordinator:
        again = asking(coordinator, OUTCOME)

    header = outcome.agreed.header
    body = b"".join(frame.body.tobytes() for frame in updates)
    assert (header.codec, header.gathered) == ("e3m0", "mean")
    assert outcome.agreed.body.tobytes() == body
    assert header.pieces == tuple(
        piece for frame in updates for piece in frame.header.pieces
    )
    assert whole.body == again.body == pack(header) + body
    # A small outcome is sent whole: its file holds others, too.
    assert rest.body == (whole.body[first:] if rest.status == 206 else whole.body)


@pytest.mark.parametrize("merge", ["mean", "radial", "trimmed"])
def test_islands_and_coordinator_come_to_the_same_state(
    merge: str, tmp_path: Path
) -> None:
    """The step on the updates is the one that the coordinator took, and replays."""
    elements, chosen = 2 * PIECE_ELEMENTS + 77, settings("e3m0", merge)
    (layout,) = lay_out(vector_model({"w": (elements,)}), chosen)
    with ExitStack() as stack:
        coordinator = stack.enter_context(serving(tmp_path / "run", chosen))
        _, outcome, state = a_round(coordinator, stack, elements=elements, up="e3m0")
    with serving(tmp_path / "run", None) as coordinator:
        replayed = asking(coordinator, "GET /state/0")

    own = FragmentState.found(np.ones(elements, np.float32), "nesterov")
    own.apply(outcome.agreed.header, outcome.agreed.body, layout=layout)
    assert outcome.agreed.header.gathered == merge
    assert own.digest == state.header.base
    assert replayed.body == pack(state.header) + state.body.tobytes()


def test_updates_that_are_larger_than_their_mean_are_sent_as_the_mean(
    tmp_path: Path,
) -> None:
    """Three updates in bf16 take 6 bytes per element, and their mean in fp32 four."""
    with ExitStack() as stack:
        coordinator = stack.enter_context(serving(tmp_path / "run", settings("bf16")))
        _, outcome, _ = a_round(coordinator, stack, elements=130, up="bf16")

    header = outcome.agreed.header
    assert (header.codec, header.gathered, header.body_bytes) == ("fp32", "", 4 * 130)


def test_the_header_of_a_gathered_outcome_is_bounded_by_its_updates() -> None:
    """A lost state comes with outcomes: their headers have a digest for each piece."""
    elements = 3 * PIECE_ELEMENTS
    (layout,) = lay_out(vector_model({"w": (elements,)}), settings("e3m0"))
    terms = terms_of(layout, settings("e3m0"))
    # 4 bytes over 33 / 64: 7 updates of 3 pieces each.
    roster = Roster(tuple(an_entry(island=f"i{number}") for number in range(7)))
    header = sealed(a_gathered(codec="e3m0", elements=elements, roster=roster))
    without_roster = len(pack(header)) - len(roster.packed)

    assert without_roster == 160 + len("lagoon") + 32 * (7 * 3 + 1)
    assert outcome_header_bytes(layout, terms) == 8192 + 32 * 7 * 3
    assert without_roster < outcome_header_bytes(layout, terms)
    (plain,) = lay_out(vector_model({"w": (elements,)}), RunSettings())
    assert outcome_header_bytes(plain, terms_of(plain, RunSettings())) == (
        header_bytes(elements)
    )
