"""A run at a coordinator whose islands reduce their rounds among themselves.

Every rank is an island with an exchange of its own. Rank 0 leads: its thread asks the
coordinator for the roster of each round and announces it to the others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import Empty
from typing import TYPE_CHECKING

from atoll.clock import Clock, SystemClock
from atoll.errors import AtollError, RunEnded, RunMoved, UsageError
from atoll.exchange.base import Constants, Frame, Outcome
from atoll.exchange.collective.channel import (
    LEADER,
    SILENCE_S,
    ControlChannel,
    ControlMessage,
    MessageKind,
)
from atoll.exchange.collective.follower import (
    CollectiveFollower,
    Key,
    PendingUpdates,
    position_bytes,
)
from atoll.exchange.collective.world import (
    CollectiveWorld,
    CountedWorld,
    RankUnreachable,
)
from atoll.exchange.coordinator import CoordinatorExchange
from atoll.protocol import (
    Heartbeat,
    JoinReply,
    JoinRequest,
    ModelSpec,
    Position,
    Reception,
    Stats,
)
from atoll.settings import RunSettings
from atoll.weights import FragmentLayout, Layout, Terms, lay_out, terms_of
from atoll.wire import FrameKind, Header, pack, unpack

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


FAREWELL_S = 2.0
"""How long the leader, when it leaves, waits for the others to have heard it."""

BLAME_S = 2 * SILENCE_S
"""How long a rank whose transfer broke waits to be told who is gone."""

PART_S = 10.0
"""How long a rank that leaves waits for the others to finish what they do together."""


class CollectiveExchange:
    """An `Exchange` for one life of one island, which is one rank of a world."""

    def __init__(
        self,
        inner: CoordinatorExchange,
        circle: ControlChannel,
        world: CollectiveWorld,
        *,
        clock: Clock,
    ) -> None:
        self._inner, self._circle, self._world = inner, circle, world
        self._flights = PendingUpdates()
        self._apart, self._has_parted = threading.Event(), threading.Event()
        self._leaves = False
        self._run = ""
        self._layout: Layout = ()
        self._settings = RunSettings()
        self._position = Position(step=0, rounds=())
        self._beat: Heartbeat | None = None
        self._waits_for: Key | None = None
        self._attending = CollectiveFollower(
            world, inner, self._flights, self._terms_of
        )
        self._leading = CollectiveLeader(
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
        self._tell(ControlMessage(MessageKind.HELLO, parts=names))
        for fragment in reply.spoken_for:
            self._tell(
                ControlMessage(
                    MessageKind.READY, fragment, reply.position.rounds[fragment]
                )
            )
        return reply

    def heartbeat(self, beat: Heartbeat, *, at_once: bool = False) -> Position:
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
            self._tell(ControlMessage(MessageKind.WAITS, *(waits_for or (0, 0)), parts))
        return waits_for is not None

    def keep(self, joined: JoinReply, model: ModelSpec, constants: Constants) -> None:
        """Have the coordinator keep the founder's constants. Implements `Keeper`."""
        self._inner.keep(joined, model, constants)

    def publish(self, frame: Frame) -> Reception:
        header = frame.header
        if header.kind is FrameKind.DEPARTING:
            self._part()
        if header.kind is not FrameKind.UPDATE or self._apart.is_set():
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
            self._tell(ControlMessage(MessageKind.READY, *key, (pack(header),)))

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
        except RankUnreachable as exc:
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
                case MessageKind.NAMES:
                    names = [part.decode() for part in word.parts]
                    self._circle.names.update(enumerate(names))
                case MessageKind.GO:
                    self._circle.say(self._attending.make(word))
                case MessageKind.APART:
                    self._circle.say(ControlMessage(MessageKind.BYE))
                    self._circle.end()
                    return
                case _:
                    self._attending.heed(word)

    def _blame(self, exc: RankUnreachable) -> None:
        """Let who is gone be named by who knows it, or say what was met."""
        if not self._circle.wait_failure(BLAME_S):
            self._circle.fail(f"The network between the ranks failed: {exc}")

    def _tell(self, word: ControlMessage) -> None:
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
        self._tell(ControlMessage(MessageKind.LEAVING))
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


TICK_S = 0.5
"""How late a deadline, or the end of the run, may be noticed."""

log = logging.getLogger("atoll")


class CollectiveLeader:
    """Rank 0's thread."""

    def __init__(
        self,
        circle: ControlChannel,
        attending: CollectiveFollower,
        inner: CoordinatorExchange,
        *,
        size: int,
        clock: Clock,
        where: Callable[[], Position | None],
        deadline_s: Callable[[], float],
    ) -> None:
        self._circle, self._attending, self._inner = circle, attending, inner
        self._size, self._clock = size, clock
        self._where, self._deadline_s = where, deadline_s
        self._ready: dict[Key, dict[int, Header | None]] = {}
        self._waits: dict[int, Key | None] = {}
        self._asked: dict[int, Key | None] = {}
        self._since_s: dict[Key, float] = {}
        self._made: dict[int, ControlMessage] = {}
        self._runs: dict[int, str] = {}
        self._parts = False

    def lead(self) -> None:
        """Lead until somebody leaves, or the collective fails."""
        while not self._parts:
            if not self._listen():
                return
            self._look_at_time()
            due = self._due()
            for key in due:
                self._round(key)
                if self._circle.failure is not None:
                    return
            if not due:
                self._unstick()
        self._circle.part()

    def _listen(self) -> bool:
        """Take in a word, or let a little time pass; False: it is all over."""
        try:
            heard = self._circle.words.get(timeout=TICK_S)
        except Empty:
            return True
        if heard is None:
            return False
        rank, word = heard
        match word.says:
            case MessageKind.HELLO:
                self._welcome(rank, word)
            case MessageKind.READY:
                header = unpack(word.parts[0]) if word.parts else None
                self._ready.setdefault(word.key, {})[rank] = header
                self._since_s.setdefault(word.key, self._clock.now_s())
            case MessageKind.WAITS:
                self._waits[rank] = word.key if word.parts else None
            case MessageKind.MADE:
                self._made[rank] = word
            case MessageKind.LEAVING:
                self._parts = True
        return True

    def _welcome(self, rank: int, word: ControlMessage) -> None:
        """Learn a rank's name, and let all know it."""
        name, run = (part.decode() for part in word.parts)
        names = self._circle.names
        names[rank], self._runs[rank] = name, run
        for other, there in self._runs.items():
            if there != run:
                self._circle.fail(
                    f"{self._circle.name_of(rank)} of the collective has joined run "
                    f"{run!r}, and {self._circle.name_of(other)} run {there!r}. "
                    "Give all ranks the same run."
                )
                return
        known = [names.get(each, "").encode() for each in range(self._size)]
        self._circle.say(ControlMessage(MessageKind.NAMES, parts=tuple(known)))

    def _unstick(self) -> None:
        """If every rank stands still for another's update, have them announced.

        Ranks that are out of phase can wait for each other's fragments; none of them
        would come to its next send point.
        """
        blocked = [
            rank
            for rank, key in self._waits.items()
            if key is not None and rank in self._ready.get(key, {})
        ]
        if len(blocked) < self._size or self._asked == self._waits:
            return
        self._asked = dict(self._waits)
        for key, ready in self._ready.items():
            missing = set(range(self._size)) - ready.keys()
            if LEADER in missing:
                self._attending.want(key)
            if others := missing - {LEADER}:
                self._circle.say(
                    ControlMessage(MessageKind.WANTED, *key), *sorted(others)
                )

    def _due(self) -> list[Key]:
        """Return the rounds that everybody has announced, in their order."""
        due = [key for key, ready in self._ready.items() if len(ready) == self._size]
        return sorted(due, key=lambda key: key[::-1])

    def _round(self, key: Key) -> None:
        """Have one round reduced and committed, or published by each for itself."""
        ready = self._ready.pop(key)
        del self._since_s[key]
        updates = tuple(each for _, each in sorted(ready.items()) if each is not None)
        try:
            word = self._decided(key, updates)
        except RunEnded as exc:
            word = ControlMessage(MessageKind.ENDED, *key, (str(exc).encode(),))
        except AtollError as exc:
            log.warning(
                "round %d of fragment %d goes by the coordinator: %s", *key[::-1], exc
            )
            word = ControlMessage(MessageKind.ALONE, *key)
        if self._circle.failure is None:
            self._circle.say(word)
            self._attending.heed(word)

    def _decided(self, key: Key, updates: tuple[Header, ...]) -> ControlMessage:
        """Return the last word on a round."""
        if len(updates) < self._size:
            return ControlMessage(MessageKind.ALONE, *key)
        asked = self._inner.agree(updates)
        if not isinstance(asked, Outcome):
            return ControlMessage(MessageKind.ALONE, *key)
        heads = tuple(pack(each) for each in (asked.agreed.header, *updates))
        go = ControlMessage(MessageKind.GO, *key, heads)
        self._made.clear()
        self._circle.say(go)
        self._made[LEADER] = self._attending.make(go)
        vouchers = self._vouchers(key)
        if vouchers is None:
            return ControlMessage(MessageKind.ALONE, *key)
        brought = self._inner.agree(updates, self._attending.made(key), vouchers)
        if not isinstance(brought, Outcome):
            return ControlMessage(MessageKind.ALONE, *key)
        receipts = brought.receipt, brought.agreed.receipt
        parts = (position_bytes(brought.position), *receipts)
        return ControlMessage(MessageKind.COMMITTED, *key, parts)

    def _vouchers(self, key: Key) -> tuple[bytes, ...] | None:
        """Return every rank's word for what was made; None: they do not agree."""
        while len(self._made) < self._size:
            if not self._listen():
                return None
        made = [self._made[rank] for rank in range(self._size)]
        said = [word.parts for word in made]
        if any(len(parts) != 2 or parts[0] != said[0][0] for parts in said):
            why = [parts[2].decode() for parts in said if len(parts) > 2]
            log.warning(
                "round %d of fragment %d goes by the coordinator: %s",
                *key[::-1],
                "; ".join(why) or "the ranks have made different outcomes of it",
            )
            return None
        return tuple(parts[1] for parts in said)

    def _look_at_time(self) -> None:
        """End what will never be: rounds beyond the last, and ranks that hang."""
        position, now_s = self._where(), self._clock.now_s()
        last = position.last_round if position else None
        for key, since_s in list(self._since_s.items()):
            if last is not None and key[1] > last:
                self._end(key, last)
            elif now_s - since_s > self._deadline_s():
                self._circle.fail(self._late(key, now_s - since_s))

    def _end(self, key: Key, last: int) -> None:
        del self._ready[key], self._since_s[key]
        text = f"Round {key[1]} will not open: the run ended with round {last}."
        word = ControlMessage(MessageKind.ENDED, *key, (text.encode(),))
        self._circle.say(word)
        self._attending.heed(word)

    def _late(self, key: Key, waited_s: float) -> str:
        ready = self._ready[key]
        names = _listed(
            [
                self._circle.name_of(each)
                for each in range(self._size)
                if each not in ready
            ]
        )
        return (
            f"{names} of the collective did not publish round {key[1]} of fragment "
            f"{key[0]} in {waited_s:.0f} s, which is limits.deadline_max_s."
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


class CollectiveRun:
    """A coordinator's run, joined by every rank of a process group as an island each.

    Making it is a collective call: every rank of the group makes one, with the same
    address, and joins with it once. The group may use any backend; the collective makes
    groups of its own over gloo.

    Args:
        url: the coordinator's address.
        group: None is all of torch.distributed's world; a rank of a `MemoryWorld` is
            for islands that are threads.
        silence_s: a rank that says nothing for so long ends the collective.

    Raises:
        UsageError: there is no process group, or the address is no coordinator's.
    """

    def __init__(
        self,
        url: str,
        group: ProcessGroup | CollectiveWorld | None = None,
        *,
        silence_s: float = SILENCE_S,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise UsageError(
                f"run={url!r} is no coordinator's address, and a collective needs a "
                "coordinator. Give its URL, or join without a collective."
            )
        self.url = url
        self._world = CountedWorld(_world_of(group))
        self._clock: Clock = SystemClock()
        self._circle = ControlChannel(
            self._world, clock=self._clock, silence_s=silence_s
        )
        self._is_joined = False

    def attach(self, inner: CoordinatorExchange) -> CollectiveExchange:
        """Return the exchange of this rank, over its own way to the coordinator.

        Raises:
            UsageError: a rank is one island, and it has joined.
        """
        if self._is_joined:
            raise UsageError(
                "This rank has joined with its CollectiveRun. Make another on all "
                "ranks to join again."
            )
        self._is_joined = True
        return CollectiveExchange(inner, self._circle, self._world, clock=self._clock)

    def fail(self, reason: str) -> None:
        """End the collective: this rank cannot join, and no rank waits for it."""
        self._circle.fail(reason)

    def costs(self) -> dict[str, float]:
        """Return what went over the network of the ranks, for loggers."""
        return self._world.costs()


def _world_of(group: ProcessGroup | CollectiveWorld | None) -> CollectiveWorld:
    if isinstance(group, CollectiveWorld):
        return group
    from atoll.exchange.collective.gloo import GlooWorld

    return GlooWorld(group)
