"""A collective passes the contract of all exchanges, as far as its world goes.

Two islands are the ranks of one collective, and who comes after them is an ordinary
member. All claims are also put to collectives of one rank each, which meet in the same
rounds: those go by the coordinator.
"""

from __future__ import annotations

from contextlib import suppress

import pytest

from atoll.errors import AtollError, RunEnded
from atoll.exchange import Exchange, Frame, Outcome
from atoll.protocol import Heartbeat, JoinReply, JoinRequest, Position, Reception
from atoll.settings import RunSettings
from atoll.testing import EXCHANGE_CLAIMS
from atoll.testing.exchange_contract import Attach, Claim
from tests.exchange.collective.ranks import Bureau, runs_of

DUE_S, NOT_DUE_S = 5.0, 0.1
"""How long an outcome is waited for: everybody has published, or somebody has not."""

NOT_AT_ONCE = "a_body_that_does_not_verify_changes_nothing"
"""Ranks verify each other's bytes when they reduce them: see test_corruption."""

OF_ONE = (
    "no_round_opens_beyond_the_last",
    "rosters_are_kept_for_good",
    "progress_goes_on_over_the_lives_of_an_island",
    "a_heartbeat_says_where_the_run_is",
    "tokens_end_a_run_before_its_last_round",
    "rounds_end_a_run_before_its_tokens",
    "a_newcomer_is_judged_by_the_norms_of_others",
)
"""A collective of two does nothing while its second rank is not there."""

REFUSED = "a_slow_island_gets_a_shorter_window"
"""Ranks of a collective make every inner step together: see test_membership."""

CLAIMS = [
    claim for claim in EXCHANGE_CLAIMS if claim.__name__ not in (NOT_AT_ONCE, REFUSED)
]


class Scene:
    """Who is there, and what they have published that is not known to be over."""

    def __init__(self) -> None:
        self.live: set[int] = set()
        self.published: dict[tuple[int, int, int], Exchange] = {}

    def settle(self) -> None:
        """Ask for all that was published until it is there, or is not for long."""
        for key, exchange in list(self.published.items()):
            _, fragment, round = key
            there = {
                who for who, *place in self.published if place == [fragment, round]
            }
            wait_s = DUE_S if there >= self.live else NOT_DUE_S
            with suppress(AtollError, RunEnded):
                if exchange.outcome(fragment, round, wait_s=wait_s):
                    del self.published[key]


class Patient:
    """An `Exchange` that waits for what was published, before it does anything."""

    def __init__(self, inner: Exchange, scene: Scene) -> None:
        self._inner, self._scene = inner, scene
        self._settle = scene.settle

    def join(self, request: JoinRequest) -> JoinReply:
        self._settle()
        reply = self._inner.join(request)
        self._scene.live.add(id(self))
        return reply

    def heartbeat(self, beat: Heartbeat, *, at_once: bool = False) -> Position:
        self._settle()
        return self._inner.heartbeat(beat, at_once=True)

    def publish(self, frame: Frame) -> Reception:
        self._settle()
        reception = self._inner.publish(frame)
        header = frame.header
        where = (header.fragment, header.round)
        self._scene.published[id(self), *where] = self._inner
        return reception

    def outcome(
        self, fragment: int, round: int, *, wait_s: float, has_body: bool = True
    ) -> Outcome | None:
        self._settle()
        return self._inner.outcome(fragment, round, wait_s=wait_s, has_body=has_body)

    def state(self, fragment: int) -> Frame:
        self._settle()
        return self._inner.state(fragment)

    def leave(self, island: str, incarnation: int) -> None:
        self._settle()
        self._scene.live.discard(id(self))
        self._inner.leave(island, incarnation)


def together(settings: RunSettings) -> Attach:
    """Attach two islands as ranks of one collective, and others as they come."""
    bureau, runs = Bureau(settings), runs_of(2)
    scene = Scene()

    def attach(*, key: bytes) -> Exchange:
        inner = bureau.exchange(key)
        return Patient(runs.pop(0).attach(inner) if runs else inner, scene)

    return attach


def each_alone(settings: RunSettings) -> Attach:
    """Attach every island as the only rank of its own collective."""
    bureau = Bureau(settings)
    scene = Scene()

    def attach(*, key: bytes) -> Exchange:
        (run,) = runs_of(1)
        return Patient(run.attach(bureau.exchange(key)), scene)

    return attach


@pytest.mark.parametrize(
    "claim",
    [claim for claim in CLAIMS if claim.__name__ not in OF_ONE],
    ids=lambda claim: claim.__name__,
)
def test_two_ranks_of_a_collective_are_exchanges(claim: Claim) -> None:
    """All that islands may rely on holds of two that reduce their rounds together."""
    claim(together)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.__name__)
def test_collectives_of_one_are_exchanges(claim: Claim) -> None:
    """And of several that are not in one world, although they are in one run."""
    claim(each_alone)
