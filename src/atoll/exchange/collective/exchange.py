"""A run at a coordinator whose islands reduce their rounds among themselves.

Theory of operation. Every rank is an ordinary member of the run: it joins, beats and
leaves at the coordinator, which has the settings, decides who counts, and keeps every
outcome. Only the updates do not go there. `publish` announces one to the leader; when
all ranks have, they reduce the round together, the leader brings the outcome, and
`outcome` returns what is durable there.

Rule 1: while all ranks are there they are together. A rank that dies or falls silent
        ends that, with an error that names it, on every rank.
Rule 2: a rank that leaves says so. From then on everybody is for itself, as without a
        collective, and what was announced is published to the coordinator.
Rule 3: a round that others take part in goes by the coordinator, for all ranks alike.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from atoll.clock import Clock
from atoll.errors import RunMoved
from atoll.exchange.base import Frame, Outcome
from atoll.exchange.collective.attending import Attending
from atoll.exchange.collective.circle import LEADER, SILENCE_S, Circle
from atoll.exchange.collective.flights import Flights, Key
from atoll.exchange.collective.leading import Leading
from atoll.exchange.collective.words import Says, Word
from atoll.exchange.collective.world import Gone, World
from atoll.exchange.constants import Constants
from atoll.exchange.coordinator import CoordinatorExchange
from atoll.protocol import (
    Beat,
    JoinReply,
    JoinRequest,
    ModelSpec,
    Position,
    Reception,
    Stats,
)
from atoll.settings import RunSettings
from atoll.weights import FragmentLayout, Layout, Terms, lay_out, terms_of
from atoll.wire import Header, Kind, pack

FAREWELL_S = 2.0
"""How long the leader, when it leaves, waits for the others to have heard it."""

BLAME_S = 2 * SILENCE_S
"""How long a rank whose transfer broke waits to be told who is gone."""

PART_S = 10.0
"""How long a rank that leaves waits for the others to finish what they do together."""


class CollectiveExchange:
    """An `Exchange` for one life of one island, which is one rank of a world."""

    def __init__(
        self, inner: CoordinatorExchange, circle: Circle, world: World, *, clock: Clock
    ) -> None:
        self._inner, self._circle, self._world = inner, circle, world
        self._flights = Flights()
        self._apart, self._has_parted = threading.Event(), threading.Event()
        self._leaves = False
        self._run = ""
        self._layout: Layout = ()
        self._settings = RunSettings()
        self._position = Position(step=0, rounds=())
        self._beat: Beat | None = None
        self._waits_for: Key | None = None
        self._attending = Attending(world, inner, self._flights, self._terms_of)
        self._leading = Leading(
            circle,
            self._attending,
            inner,
            size=world.size,
            clock=clock,
            where=lambda: self._position,
            deadline_s=lambda: self._settings.limits.deadline_max_s,
        )
        circle.on_failure = self._flights.wake
        threading.Thread(
            target=self._take_part, name="atoll-round", daemon=True
        ).start()

    @property
    def stats(self) -> Callable[[], Stats] | None:
        """What people are told of the island, asked for when it is sent."""
        return self._inner.stats

    @stats.setter
    def stats(self, stats: Callable[[], Stats] | None) -> None:
        self._inner.stats = stats

    @property
    def moved(self) -> Callable[[RunMoved], None] | None:
        """Told in the background that the run is elsewhere."""
        return self._inner.moved

    @moved.setter
    def moved(self, moved: Callable[[RunMoved], None] | None) -> None:
        self._inner.moved = moved

    def join(self, request: JoinRequest) -> JoinReply:
        try:
            reply = self._inner.join(request)
        except Exception as exc:
            who = self._circle.name_of(self._world.rank)
            self._circle.fail(f"{who} of the collective cannot join the run: {exc}")
            raise
        self._run, self._settings = reply.run, reply.settings
        self._layout = lay_out(request.model, reply.settings)
        self._position = reply.position
        self._circle.names[self._world.rank] = reply.island
        names = (reply.island.encode(), reply.run.encode())
        self._tell(Word(Says.HELLO, parts=names))
        for fragment in reply.spoken_for:
            self._tell(Word(Says.READY, fragment, reply.position.rounds[fragment]))
        return reply

    def heartbeat(self, beat: Beat, *, at_once: bool = False) -> Position:
        self._require_together()
        self._beat = beat
        position = self._newest(self._inner.heartbeat(beat, at_once=at_once))
        if self._apart.is_set() or not self._says_waiting(beat.waits_for):
            return position
        wanted = {*position.wanted, *self._attending.wanted(position.rounds)}
        return replace(position, wanted=tuple(sorted(wanted)))

    def _says_waiting(self, waits_for: Key | None) -> bool:
        """Tell the leader what this rank stands still for, if that has changed."""
        if waits_for != self._waits_for:
            self._waits_for = waits_for
            parts = (b"still",) if waits_for else ()
            self._tell(Word(Says.WAITS, *(waits_for or (0, 0)), parts))
        return waits_for is not None

    def keep(self, joined: JoinReply, model: ModelSpec, constants: Constants) -> None:
        """Have the coordinator keep the founder's constants. Implements `Keeper`."""
        self._inner.keep(joined, model, constants)

    def publish(self, frame: Frame) -> Reception:
        header = frame.header
        if header.kind is Kind.DEPARTING:
            self._part()
        if header.kind is not Kind.UPDATE or self._apart.is_set():
            return self._inner.publish(frame)
        self._require_together()
        if not self._is_open(header):
            return self._inner.publish(frame)
        if self._flights.add(frame):
            self._announce(header)
        return Reception.STAGED

    def _announce(self, header: Header) -> None:
        """Tell the leader of an update, unless there is none any more."""
        if self._apart.is_set():
            self._attending.part()
        else:
            key = (header.fragment, header.round)
            self._tell(Word(Says.READY, *key, (pack(header),)))

    def outcome(self, fragment: int, round: int, *, wait_s: float) -> Outcome | None:
        key = (fragment, round)
        found = self._flights.wait(key, wait_s, is_over=self._is_broken)
        if isinstance(found, Outcome):
            self._newest(found.position)
            return found
        if found is not None:
            raise found
        self._require_together()
        if self._flights.frame(key) is not None:
            return None
        outcome = self._inner.outcome(fragment, round, wait_s=wait_s)
        if outcome is not None:
            self._newest(outcome.position)
        return outcome

    def state(self, fragment: int) -> Frame:
        return self._inner.state(fragment)

    def leave(self, island: str, incarnation: int) -> None:
        self._part()
        try:
            self._inner.leave(island, incarnation)
        finally:
            if self._circle.leads and self._circle.failure is None:
                self._circle.wait_farewells(FAREWELL_S)
            self._circle.end()
            self._circle.flush(FAREWELL_S)

    def _take_part(self) -> None:
        """Be a rank, from the first word to the last."""
        try:
            if self._circle.leads:
                self._leading.lead()
            else:
                self._follow()
        except Gone as exc:
            self._blame(exc)
        except Exception as exc:  # the others must not wait for a rank that raised
            who = self._circle.name_of(self._world.rank)
            self._circle.fail(f"{who} of the collective failed: {exc!r}.")
        if self._circle.failure is None:
            self._apart.set()  # what is announced from now on finds nobody
            self._attending.part()
        self._has_parted.set()
        self._flights.wake()

    def _follow(self) -> None:
        while (heard := self._circle.words.get()) is not None:
            _, word = heard
            match word.says:
                case Says.NAMES:
                    names = [part.decode() for part in word.parts]
                    self._circle.names.update(enumerate(names))
                case Says.GO:
                    self._circle.say(self._attending.make(word))
                case Says.APART:
                    self._circle.say(Word(Says.BYE))
                    self._circle.end()
                    return
                case _:
                    self._attending.heed(word)

    def _blame(self, exc: Gone) -> None:
        """Let who is gone be named by who knows it, or say what was met."""
        if not self._circle.wait_failure(BLAME_S):
            self._circle.fail(f"The network between the ranks failed: {exc}")

    def _tell(self, word: Word) -> None:
        """Say something to the leader, which may be this very rank."""
        if self._circle.leads:
            self._circle.words.put((LEADER, word))
        else:
            self._circle.say(word)

    def _part(self) -> None:
        """Go on as an island for itself, when what is done together is done."""
        self._leaves = True
        if self._apart.is_set() or self._circle.failure is not None:
            return
        self._tell(Word(Says.LEAVING))
        self._has_parted.wait(PART_S)

    def _is_broken(self) -> bool:
        return self._circle.failure is not None

    def _require_together(self) -> None:
        """Raise what has ended the collective, unless this rank leaves anyway."""
        if self._circle.failure is not None and not self._leaves:
            raise self._circle.failure

    def _is_open(self, header: Header) -> bool:
        """Return whether ranks may reduce an update: it is the open round's.

        What is not goes to the coordinator, which knows what to answer.
        """
        fragment, round = header.fragment, header.round
        if header.run != self._run or fragment >= len(self._layout):
            return False
        if round > self._open_round(fragment) and self._beat is not None:
            self._newest(self._inner.heartbeat(self._beat, at_once=True))
        is_let_go = self._flights.is_let_go((fragment, round))
        return round == self._open_round(fragment) and not is_let_go

    def _open_round(self, fragment: int) -> int:
        rounds = self._position.rounds
        return rounds[fragment] if rounds else 1

    def _newest(self, position: Position) -> Position:
        """Return where the run is: an outcome may tell it before a heartbeat does."""
        known = self._position
        if len(known.rounds) != len(position.rounds):
            self._position = position
            return position
        pairs = list(zip(known.rounds, position.rounds, strict=True))
        is_last = position.last_round is not None
        newest = replace(
            position,
            rounds=tuple(max(pair) for pair in pairs),
            tokens=max(known.tokens, position.tokens),
            last_round=position.last_round if is_last else known.last_round,
            # What was wanted for a round that is over is not wanted for the next one.
            wanted=tuple(at for at in position.wanted if pairs[at][0] <= pairs[at][1]),
        )
        self._position = newest
        return newest

    def _terms_of(self, fragment: int) -> tuple[FragmentLayout, Terms]:
        layout = self._layout[fragment]
        return layout, terms_of(layout, self._settings)
