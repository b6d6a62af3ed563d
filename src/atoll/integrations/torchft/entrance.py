"""How an island comes in: it joins, founds an empty run, and asks for the state."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np

from atoll import __version__
from atoll.clock import SystemClock
from atoll.errors import FoundingLost, UsageError
from atoll.exchange import Exchange
from atoll.integrations.torchft.demands import require_settings
from atoll.integrations.torchft.handover import Passage
from atoll.integrations.torchft.lane import Lane
from atoll.integrations.torchft.reduced import layout_of
from atoll.integrations.torchft.voice import POLL_S, Voice
from atoll.integrations.torchft.wants import WANTS, Handover, handover_of, roster_of
from atoll.island.entry import fetch_state, state_frame
from atoll.island.environment import (
    island_from_environment,
    run_from_environment,
    surroundings_from_environment,
)
from atoll.island.join import RunConnection
from atoll.protocol import JoinReply, JoinRequest, ModelSpec, Stats
from atoll.weights import FragmentLayout, FragmentState, terms_of
from atoll.wire import Header


def way_to(
    run: Exchange | str | None, island: str | None
) -> tuple[Exchange, str | None, AbstractContextManager[object]]:
    """Return the exchange of a run, the island's name, and how to say farewell.

    By its URL a run is followed wherever it goes.
    """
    if run is None:
        run = run_from_environment()
    if not isinstance(run, str):
        return run, island, nullcontext()
    name = island or island_from_environment()
    around, clock = surroundings_from_environment(), SystemClock()
    way = RunConnection(run, island=name, surroundings=around, clock=clock)
    way.exchange.stats = lambda: Stats(version=__version__)
    return way.exchange, name, way.leaving()


def enter(
    exchange: Exchange, model: ModelSpec, island: str | None, *, num_fragments: int
) -> tuple[Voice, list[Lane], Passage]:
    """Join, and return what this life speaks with, its lanes and the parcels' way.

    On an error the island is no member.

    Raises:
        SettingsError: the run is not one for torchft, naming what is in the way.
        ModelError: the modules are not those of the run.
    """
    request = JoinRequest(model=model, island=island)
    while True:
        joined = exchange.join(request)
        try:
            require_settings(joined.settings, num_fragments=num_fragments)
            fragments, parcels = layout_of(model, joined.settings)
            voice = Voice(exchange, joined)
            lanes = [
                Lane(voice, index, layout, _state(exchange, joined, index, layout))
                for index, layout in enumerate(fragments)
            ]
            passage = _passage(voice, len(fragments), parcels)
            return voice, lanes, passage
        except FoundingLost:
            continue  # still a member: another island has founded the run, or it will
        except BaseException:
            exchange.leave(joined.island, joined.incarnation)
            raise


def _passage(voice: Voice, index: int, layout: FragmentLayout) -> Passage:
    joined, round = voice.joined, 1
    if joined.is_founder:
        _state(voice.exchange, joined, index, layout)
    else:
        round = joined.position.rounds[index]
    # Everyone knows how it began, and who takes part in a handover learns the rest.
    optimizer = terms_of(layout, joined.settings).outer.optimizer
    zeros = np.zeros(layout.elements, np.float32)
    voice.hold(index, FragmentState.found(zeros, optimizer))
    return Passage(voice, index, layout, round)


def _state(
    exchange: Exchange, joined: JoinReply, index: int, layout: FragmentLayout
) -> FragmentState:
    """Return the run's state of a fragment; who founds the run begins at zero."""
    if not joined.is_founder:
        return fetch_state(exchange, index)
    outer = terms_of(layout, joined.settings).outer
    state = FragmentState.found(np.zeros(layout.elements, np.float32), outer.optimizer)
    exchange.publish(state_frame(joined, index, state, outer))
    return state


class Applicant:
    """Takes part in every open round, saying that it wants the state."""

    def __init__(
        self, voice: Voice, lanes: list[Lane], *, held_step: int | None
    ) -> None:
        self._voice, self._lanes = voice, lanes
        self._said = 0 if held_step is None else held_step + 1
        self._unheard: set[int] = set()
        """Fragments whose round has the want, and may be over."""

    def ask(self, number: int) -> Handover:
        """Return who gives the state, once a roster lists want `number`.

        Raises:
            UsageError: the run has gone on, and nobody who is left holds its state.
        """
        waits_for: tuple[int, int] | None = None
        while True:
            # Every round that took the want is looked at, before another takes it: the
            # islands that hold the state act on the first one that lists it.
            for lane in self._lanes:
                handover = self._hear(lane, number)
                if handover is not None:
                    return handover
            rounds = self._voice.position(waits_for).rounds
            self._want(rounds, number)
            lane = min(self._lanes, key=lambda lane: rounds[lane.index])
            waits_for = (lane.index, lane.standing)
            self._voice.look(*waits_for, wait_s=POLL_S)

    def _want(self, rounds: tuple[int, ...], number: int) -> None:
        for lane in self._lanes:
            is_new = lane.standing < rounds[lane.index]
            if is_new and lane.index not in self._unheard:
                lane.standing = rounds[lane.index]
                self._unheard.add(lane.index)
                self._voice.refuse(
                    lane.index,
                    lane.standing,
                    WANTS,
                    inner_steps=self._said,
                    tokens=number,
                )

    def _hear(self, lane: Lane, number: int) -> Handover | None:
        """Return what the last round that took the want calls for, if it is over."""
        if lane.index not in self._unheard:
            return None
        outcome = self._voice.look(lane.index, lane.standing)
        if outcome is None:
            return None
        self._unheard.discard(lane.index)
        return self._heard(outcome.agreed.header, number)

    def _heard(self, agreed: Header, number: int) -> Handover | None:
        """Return the handover that a round calls for, if it is for this want."""
        joined = self._voice.joined
        entry = roster_of(agreed).entry(joined.island)
        mine = (joined.incarnation, number)
        if entry is None or (entry.incarnation, entry.tokens) != mine:
            return None
        handover = handover_of(agreed, num_fragments=len(self._lanes))
        if handover and not handover.donor_has_state:
            self._require_blank()
        return handover

    def _require_blank(self) -> None:
        """Raise unless nothing was ever agreed, so that any state will do."""
        for lane in self._lanes:
            state = fetch_state(self._voice.exchange, lane.index)
            if state.anchor.any():
                raise UsageError(
                    f"The run has gone on to round {state.round} of fragment "
                    f"{lane.index}, and no island that is left holds its state. Load "
                    "a checkpoint and its load_state_dict() before the first step, "
                    "or start a new run."
                )
