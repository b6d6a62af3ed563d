"""A run at a coordinator whose islands reduce their rounds among themselves.

Every rank is an island with its own exchange. Rank 0 leads: its thread asks the
coordinator for the roster of each round and announces it to the others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import Empty
from typing import TYPE_CHECKING

from atoll.errors import AtollError, RunEnded, RunMoved, SettingsError, UsageError
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
from atoll.protocol.coordinator_state import all_blocked, run_ended
from atoll.runtime import Clock, SystemClock
from atoll.settings import RunSettings
from atoll.weights import FragmentLayout, Layout, Terms, lay_out, terms_of
from atoll.wire import FrameKind, Header, pack, unpack

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


FAREWELL_S = 2.0
"""How long the leader, when it leaves, waits for the last messages of the others."""

FAILURE_WAIT_S = 2 * SILENCE_S
"""How long a rank whose transfer broke waits for the report of the dead rank."""

DISSOLVE_S = 10.0
"""How long a rank that leaves waits for the end of a round in progress."""


class CollectiveExchange:
    """An `Exchange` for one incarnation of one island: one rank of a world."""

    def __init__(
        self,
        inner: CoordinatorExchange,
        channel: ControlChannel,
        world: CollectiveWorld,
        *,
        clock: Clock,
    ) -> None:
        self._inner, self._channel, self._world = inner, channel, world
        self._pending = PendingUpdates()
        self._apart, self._has_dissolved = threading.Event(), threading.Event()
        self._leaves = False
        self._run = ""
        self._layout: Layout = ()
        self._settings = RunSettings()
        self._position = Position(step=0, rounds=())
        self._beat: Heartbeat | None = None
        self._waits_for: Key | None = None
        self._follower = CollectiveFollower(world, inner, self._pending, self._terms_of)
        self._leader = CollectiveLeader(
            channel,
            self._follower,
            inner,
            size=world.size,
            clock=clock,
            position=lambda: self._position,
            deadline_s=lambda: self._settings.limits.deadline_max_s,
        )
        channel.on_failure = self._pending.wake
        threading.Thread(
            target=self._take_part, name="atoll-round", daemon=True
        ).start()

    @property
    def stats(self) -> Callable[[], Stats] | None:
        """Returns the island's statistics; called for each heartbeat that is sent."""
        return self._inner.stats

    @stats.setter
    def stats(self, stats: Callable[[], Stats] | None) -> None:
        self._inner.stats = stats

    @property
    def moved(self) -> Callable[[RunMoved], None] | None:
        """Called in the background when a heartbeat learns that the run has moved."""
        return self._inner.moved

    @moved.setter
    def moved(self, moved: Callable[[RunMoved], None] | None) -> None:
        self._inner.moved = moved

    def join(self, request: JoinRequest) -> JoinReply:
        try:
            reply = self._inner.join(request)
            self._require_settings(reply)
        except Exception as exc:
            rank = self._channel.name_of(self._world.rank)
            self._channel.fail(f"{rank} of the collective cannot join the run: {exc}")
            raise
        self._run, self._settings = reply.run, reply.settings
        self._layout = lay_out(request.model, reply.settings)
        self._position = reply.position
        self._channel.names[self._world.rank] = reply.island
        names = (reply.island.encode(), reply.run.encode())
        self._send(ControlMessage(MessageKind.HELLO, parts=names))
        for fragment in reply.spoken_for:
            self._send(
                ControlMessage(
                    MessageKind.READY, fragment, reply.position.rounds[fragment]
                )
            )
        return reply

    def _require_settings(self, reply: JoinReply) -> None:
        """Leave a run whose settings a collective cannot follow.

        Raises:
            SettingsError: it is such a run.
        """
        try:
            _require_settings(reply.settings)
        except SettingsError:
            self._inner.leave(reply.island, reply.incarnation)
            raise

    def heartbeat(self, beat: Heartbeat, *, at_once: bool = False) -> Position:
        self._require_no_failure()
        self._beat = beat
        position = self._newest(self._inner.heartbeat(beat, at_once=at_once))
        if self._apart.is_set() or not self._report_wait(beat.waits_for):
            return position
        wanted = {*position.wanted, *self._follower.wanted(position.rounds)}
        return replace(position, wanted=tuple(sorted(wanted)))

    def _report_wait(self, waits_for: Key | None) -> bool:
        """Report a change of the awaited round to the leader; True if there is one."""
        if waits_for != self._waits_for:
            self._waits_for = waits_for
            parts = (b"still",) if waits_for else ()
            self._send(ControlMessage(MessageKind.WAITS, *(waits_for or (0, 0)), parts))
        return waits_for is not None

    def keep(self, joined: JoinReply, model: ModelSpec, constants: Constants) -> None:
        """Upload the founder's constants. Implements `ConstantsUploader`."""
        self._inner.keep(joined, model, constants)

    def publish(self, frame: Frame) -> Reception:
        header = frame.header
        if header.kind is FrameKind.DEPARTING:
            self._dissolve()
        if header.kind is not FrameKind.UPDATE or self._apart.is_set():
            return self._inner.publish(frame)
        self._require_no_failure()
        if not self._is_open(header):
            return self._inner.publish(frame)
        if self._pending.add(frame):
            self._announce(header)
        return Reception.STAGED

    def _announce(self, header: Header) -> None:
        """Announce an update to the leader, or publish it if the collective ended."""
        if self._apart.is_set():
            self._follower.publish_all()
        else:
            key = (header.fragment, header.round)
            self._send(ControlMessage(MessageKind.READY, *key, (pack(header),)))

    def outcome(
        self, fragment: int, round: int, *, wait_s: float, has_body: bool = True
    ) -> Outcome | None:
        key = (fragment, round)
        result = self._pending.wait(key, wait_s, is_over=self._is_broken)
        if isinstance(result, Outcome):
            self._newest(result.position)
            return result
        if result is not None:
            raise result
        self._require_no_failure()
        if self._pending.frame(key) is not None:
            return None
        outcome = self._inner.outcome(fragment, round, wait_s=wait_s, has_body=has_body)
        if outcome is not None:
            self._newest(outcome.position)
        return outcome

    def state(self, fragment: int) -> Frame:
        return self._inner.state(fragment)

    def leave(self, island: str, incarnation: int) -> None:
        self._dissolve()
        try:
            self._inner.leave(island, incarnation)
        finally:
            if self._channel.leads and self._channel.failure is None:
                self._channel.wait_farewells(FAREWELL_S)
            self._channel.end()
            self._channel.flush(FAREWELL_S)

    def _take_part(self) -> None:
        """Lead or follow until the collective ends; then publish pending updates."""
        try:
            if self._channel.leads:
                self._leader.lead()
            else:
                self._follow()
        except RankUnreachable as exc:
            self._fail_after_report(exc)
        except Exception as exc:  # the others must not wait for a rank that raised
            rank = self._channel.name_of(self._world.rank)
            self._channel.fail(f"{rank} of the collective failed: {exc!r}.")
        if self._channel.failure is None:
            # Set before publishing: an update that is announced later finds no leader.
            self._apart.set()
            self._follower.publish_all()
        self._has_dissolved.set()
        self._pending.wake()

    def _follow(self) -> None:
        while (received := self._channel.messages.get()) is not None:
            _, message = received
            match message.kind:
                case MessageKind.NAMES:
                    names = [part.decode() for part in message.parts]
                    self._channel.names.update(enumerate(names))
                case MessageKind.GO:
                    self._channel.send(self._follower.reduce(message))
                case MessageKind.COLLECTIVE_ENDED:
                    self._channel.send(ControlMessage(MessageKind.BYE))
                    self._channel.end()
                    return
                case _:
                    self._follower.handle(message)

    def _fail_after_report(self, exc: RankUnreachable) -> None:
        """Wait for the leader to report the dead rank; else fail with this error."""
        if not self._channel.wait_failure(FAILURE_WAIT_S):
            self._channel.fail(f"The network between the ranks failed: {exc}")

    def _send(self, message: ControlMessage) -> None:
        """Send a message to the leader, which may be this rank."""
        if self._channel.leads:
            self._channel.messages.put((LEADER, message))
        else:
            self._channel.send(message)

    def _dissolve(self) -> None:
        """End the collective after the round in progress; this rank continues alone."""
        self._leaves = True
        if self._apart.is_set() or self._channel.failure is not None:
            return
        self._send(ControlMessage(MessageKind.LEAVING))
        self._has_dissolved.wait(DISSOLVE_S)

    def _is_broken(self) -> bool:
        return self._channel.failure is not None

    def _require_no_failure(self) -> None:
        """Raise the error that ended the collective, unless this rank leaves anyway."""
        if self._channel.failure is not None and not self._leaves:
            raise self._channel.failure

    def _is_open(self, header: Header) -> bool:
        """Return whether ranks may reduce an update: its round is open.

        Any other update goes to the coordinator, which decides its reception.
        """
        fragment, round = header.fragment, header.round
        if header.run != self._run or fragment >= len(self._layout):
            return False
        if round > self._open_round(fragment) and self._beat is not None:
            self._newest(self._inner.heartbeat(self._beat, at_once=True))
        is_handed_over = self._pending.is_handed_over((fragment, round))
        return round == self._open_round(fragment) and not is_handed_over

    def _open_round(self, fragment: int) -> int:
        rounds = self._position.rounds
        return rounds[fragment] if rounds else 1

    def _newest(self, position: Position) -> Position:
        """Return the newest position; outcomes and heartbeats may come in any order."""
        last = self._position
        if len(last.rounds) != len(position.rounds):
            self._position = position
            return position
        pairs = list(zip(last.rounds, position.rounds, strict=True))
        is_last = position.last_round is not None
        newest = replace(
            position,
            rounds=tuple(max(pair) for pair in pairs),
            tokens=max(last.tokens, position.tokens),
            last_round=position.last_round if is_last else last.last_round,
            # A fragment wanted for a round that is over is not wanted for the next.
            wanted=tuple(
                fragment
                for fragment in position.wanted
                if pairs[fragment][0] <= pairs[fragment][1]
            ),
        )
        self._position = newest
        return newest

    def _terms_of(self, fragment: int) -> tuple[FragmentLayout, Terms]:
        layout = self._layout[fragment]
        return layout, terms_of(layout, self._settings)


TICK_S = 0.5
"""The longest delay until a deadline or the end of the run is noticed."""

log = logging.getLogger("atoll")


def _require_settings(settings: RunSettings) -> None:
    """Raise SettingsError for settings that a collective cannot follow."""
    settings.require_synchronous("a collective")
    settings.require_cut_data("a collective")
    if settings.sync.dynamic_local_updates:
        raise SettingsError(
            "sync.dynamic_local_updates=true lets islands make different inner "
            "steps, and those of a collective make every step together. Join "
            "without a collective, or begin a run without this setting."
        )
    if settings.wire.gathers:
        raise SettingsError(
            f"wire.down={settings.wire.down!r} sends the updates of a round, and a "
            "collective reduces them to one mean. Join without a collective, or begin "
            "a run with wire.down='fp32' or 'bf16'."
        )


class CollectiveLeader:
    """The thread of rank 0: collects updates, and has their rounds reduced."""

    def __init__(
        self,
        channel: ControlChannel,
        follower: CollectiveFollower,
        inner: CoordinatorExchange,
        *,
        size: int,
        clock: Clock,
        position: Callable[[], Position | None],
        deadline_s: Callable[[], float],
    ) -> None:
        self._channel, self._follower, self._inner = channel, follower, inner
        self._size, self._clock = size, clock
        self._position, self._deadline_s = position, deadline_s
        self._ready: dict[Key, dict[int, Header | None]] = {}
        self._waits: dict[int, Key | None] = {}
        self._unblocked: dict[int, Key | None] = {}
        """The waits for which missing updates were requested last."""
        self._since_s: dict[Key, float] = {}
        self._results: dict[int, ControlMessage] = {}
        self._runs: dict[int, str] = {}
        self._is_ending = False

    def lead(self) -> None:
        """Lead until a rank leaves, or the collective fails."""
        while not self._is_ending:
            if not self._listen():
                return
            self._check_deadlines()
            due = self._due()
            for key in due:
                self._round(key)
                if self._channel.failure is not None:
                    return
            if not due:
                self._unblock()
        self._channel.dissolve()

    def _listen(self) -> bool:
        """Handle one message, or wait for a tick; False: the collective has failed."""
        try:
            received = self._channel.messages.get(timeout=TICK_S)
        except Empty:
            return True
        if received is None:
            return False
        rank, message = received
        match message.kind:
            case MessageKind.HELLO:
                self._welcome(rank, message)
            case MessageKind.READY:
                header = unpack(message.parts[0]) if message.parts else None
                self._ready.setdefault(message.key, {})[rank] = header
                self._since_s.setdefault(message.key, self._clock.now_s())
            case MessageKind.WAITS:
                self._waits[rank] = message.key if message.parts else None
            case MessageKind.REDUCED:
                self._results[rank] = message
            case MessageKind.LEAVING:
                self._is_ending = True
        return True

    def _welcome(self, rank: int, message: ControlMessage) -> None:
        """Record a rank's name, and send all names to all ranks."""
        name, run = (part.decode() for part in message.parts)
        names = self._channel.names
        names[rank], self._runs[rank] = name, run
        for other, other_run in self._runs.items():
            if other_run != run:
                self._channel.fail(
                    f"{self._channel.name_of(rank)} of the collective has joined run "
                    f"{run!r}, and {self._channel.name_of(other)} run {other_run!r}. "
                    "Give all ranks the same run."
                )
                return
        by_rank = [names.get(rank, "").encode() for rank in range(self._size)]
        self._channel.send(ControlMessage(MessageKind.NAMES, parts=tuple(by_rank)))

    def _unblock(self) -> None:
        """If all ranks wait for each other's updates, request the missing ones.

        Ranks that are out of phase can wait for each other's fragments; none of them
        would reach its next send point.
        """
        waits = {rank: self._waits.get(rank) for rank in range(self._size)}
        if not all_blocked(waits, self._ready) or self._unblocked == self._waits:
            return
        self._unblocked = dict(self._waits)
        for key, ready in self._ready.items():
            missing = set(range(self._size)) - ready.keys()
            if LEADER in missing:
                self._follower.want(key)
            if others := missing - {LEADER}:
                self._channel.send(
                    ControlMessage(MessageKind.WANTED, *key), *sorted(others)
                )

    def _due(self) -> list[Key]:
        """Return the rounds that all ranks have announced, in their order."""
        due = [key for key, ready in self._ready.items() if len(ready) == self._size]
        return sorted(due, key=lambda key: key[::-1])

    def _round(self, key: Key) -> None:
        """Have the ranks reduce and commit one round, or publish their updates."""
        ready = self._ready.pop(key)
        del self._since_s[key]
        updates = tuple(
            header for _, header in sorted(ready.items()) if header is not None
        )
        try:
            message = self._decided(key, updates)
        except RunEnded as exc:
            message = ControlMessage(MessageKind.ENDED, *key, (str(exc).encode(),))
        except AtollError as exc:
            log.warning(
                "round %d of fragment %d goes to the coordinator: %s", *key[::-1], exc
            )
            message = ControlMessage(MessageKind.PUBLISH_DIRECTLY, *key)
        if self._channel.failure is None:
            self._channel.send(message)
            self._follower.handle(message)

    def _decided(self, key: Key, updates: tuple[Header, ...]) -> ControlMessage:
        """Return the message with the decision about a round."""
        if len(updates) < self._size:
            return ControlMessage(MessageKind.PUBLISH_DIRECTLY, *key)
        preview = self._inner.agree(updates)
        if not isinstance(preview, Outcome):
            return ControlMessage(MessageKind.PUBLISH_DIRECTLY, *key)
        headers = (preview.agreed.header, *updates)
        go = ControlMessage(MessageKind.GO, *key, tuple(map(pack, headers)))
        self._results.clear()
        self._channel.send(go)
        self._results[LEADER] = self._follower.reduce(go)
        vouchers = self._vouchers(key)
        if vouchers is None:
            return ControlMessage(MessageKind.PUBLISH_DIRECTLY, *key)
        outcome = self._inner.agree(updates, self._follower.reduced(key), vouchers)
        if not isinstance(outcome, Outcome):
            return ControlMessage(MessageKind.PUBLISH_DIRECTLY, *key)
        receipts = outcome.receipt, outcome.agreed.receipt
        parts = (position_bytes(outcome.position), *receipts)
        return ControlMessage(MessageKind.COMMITTED, *key, parts)

    def _vouchers(self, key: Key) -> tuple[bytes, ...] | None:
        """Return the vouchers of all ranks; None if their outcomes differ."""
        while len(self._results) < self._size:
            if not self._listen():
                return None
        results = [self._results[rank].parts for rank in range(self._size)]
        if any(len(parts) != 2 or parts[0] != results[0][0] for parts in results):
            reasons = [parts[2].decode() for parts in results if len(parts) > 2]
            log.warning(
                "round %d of fragment %d goes to the coordinator: %s",
                *key[::-1],
                "; ".join(reasons) or "the ranks have reduced different outcomes",
            )
            return None
        return tuple(parts[1] for parts in results)

    def _check_deadlines(self) -> None:
        """End rounds beyond the last; fail if a rank is late."""
        position, now_s = self._position(), self._clock.now_s()
        last = position.last_round if position else None
        for key, since_s in list(self._since_s.items()):
            if last is not None and key[1] > last:
                self._end(key, last)
            elif now_s - since_s > self._deadline_s():
                self._channel.fail(self._late(key, now_s - since_s))

    def _end(self, key: Key, last: int) -> None:
        del self._ready[key], self._since_s[key]
        text = str(run_ended(key[1], last))
        message = ControlMessage(MessageKind.ENDED, *key, (text.encode(),))
        self._channel.send(message)
        self._follower.handle(message)

    def _late(self, key: Key, waited_s: float) -> str:
        ready = self._ready[key]
        names = _listed(
            [
                self._channel.name_of(rank)
                for rank in range(self._size)
                if rank not in ready
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

    The constructor is a collective call: every rank of the group makes it, with the
    same address, and joins with the object once. The group may use any backend; the
    collective creates its own groups over gloo.

    Args:
        url: the coordinator's address.
        group: a process group; by default all ranks of torch.distributed. A rank of a
            `MemoryWorld` is for islands that are threads.
        silence_s: a rank that sends nothing for this time ends the collective.

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
        self._channel = ControlChannel(
            self._world, clock=self._clock, silence_s=silence_s
        )
        self._is_joined = False

    def attach(self, inner: CoordinatorExchange) -> CollectiveExchange:
        """Return the exchange of this rank, over its own exchange with the coordinator.

        Raises:
            UsageError: this rank has joined already.
        """
        if self._is_joined:
            raise UsageError(
                "This rank has joined with its CollectiveRun. Make another on all "
                "ranks to join again."
            )
        self._is_joined = True
        return CollectiveExchange(inner, self._channel, self._world, clock=self._clock)

    def fail(self, reason: str) -> None:
        """End the collective: this rank cannot join, and no rank waits for it."""
        self._channel.fail(reason)

    def costs(self) -> dict[str, float]:
        """Return the bytes that ranks have exchanged, under their metric names."""
        return self._world.costs()


def _world_of(group: ProcessGroup | CollectiveWorld | None) -> CollectiveWorld:
    if isinstance(group, CollectiveWorld):
        return group
    from atoll.exchange.collective.gloo import GlooWorld

    return GlooWorld(group)
