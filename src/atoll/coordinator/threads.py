"""A service shared by threads: a lock, a ticker, a thread that reduces, and long polls.

Rule 1: the lock guards the state machine and the log. Large bodies are received,
        reduced and made durable outside of it, so that a heartbeat never waits for a
        round, nor for a departing island. Only the record of a commit, and a body that
        is small enough to be in it, are synced under the lock.
Rule 2: one thread reduces a round: `atoll-reduce`, or the caller of `gather`. Until it
        is done the fragment is in the phase CLOSING, and no other thread touches its
        weights.
Rule 3: an answer callback runs under the lock, and must only hand the answer over.
Rule 4: a reader of weights holds a lock per fragment, which the reducing thread takes
        too. It is taken before the service's lock, never after it: a thread that waited
        for a reader with the service's lock would stop every heartbeat, and the reader
        itself needs that lock to look up the weights. So the order is: the lock of a
        cached file (`AnchorFiles`, `StateFiles`), the fragment's lock, the service's.

Calls for an outcome that does not exist yet are long polls: they stay open for a while.
Rule 5: a long poll ends with its connection: `forget` leaves nothing behind.
Rule 6: an island has one long poll per fragment, and a newer one answers the older; it
        has at most `MAX_PER_ISLAND`. An origin has at most `MAX_PER_ORIGIN`, and all
        together have `MAX_OPEN`. Beyond a limit, the oldest is answered as if its time
        were up.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from atoll.coordinator.service import PendingOutcome, Service
from atoll.coordinator.submissions import require_sound
from atoll.errors import AtollError, RunEnded, Unreachable
from atoll.exchange import Frame
from atoll.exchange.calls import (
    LONG_POLL_S,
    AgreedCall,
    Call,
    JoinCall,
    OutcomeCall,
    Reply,
)
from atoll.protocol import Heartbeat, Position, Reception
from atoll.protocol.coordinator_state import CoordinatorState
from atoll.protocol.events import CloseRound, ConnectionLost, Event
from atoll.runtime import Clock
from atoll.weights import FragmentState, UpdateCheck
from atoll.wire import Header

TICK_S = 0.1
"""Period of the ticker: the largest delay of a deadline."""

T = TypeVar("T")
Watch = Callable[[Service, float], None]


class ThreadedService:
    """Owns the threads of a coordinator.

    `watch` is called after each change, `on_tick` at each tick. `on_fault` receives
    unexpected exceptions; a fragment whose round cannot be reduced stays closing.
    """

    def __init__(
        self,
        service: Service,
        *,
        clock: Clock,
        watch: Watch,
        on_tick: Callable[[Service], None] = lambda service: None,
        on_fault: Callable[[Exception], None],
    ) -> None:
        self._service, self._clock, self._watch = service, clock, watch
        self._on_tick, self._on_fault = on_tick, on_fault
        self._long_polls = LongPolls(service)
        self._lock = threading.Lock()
        self._read_locks: dict[int, threading.Lock] = defaultdict(threading.Lock)
        self._ended = threading.Event()
        self._closings: queue.SimpleQueue[CloseRound | None] = queue.SimpleQueue()
        service.defer_to(self._closings.put, run_concurrently=_run_in_thread)
        self._threads = [
            threading.Thread(target=self._tick, name="atoll-tick", daemon=True),
            threading.Thread(target=self._reduce, name="atoll-reduce", daemon=True),
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def close(self, *, wait_s: float = 10.0) -> None:
        """Finish the round that is being reduced, and stop. Safe to repeat."""
        self._ended.set()
        self._closings.put(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(wait_s)

    @property
    def open_polls(self) -> int:
        """Number of open long polls for an outcome."""
        return len(self._long_polls)

    def forget(self, ticket: Hashable) -> None:
        """Drop the long poll of a ticket: its connection is closed."""
        with self._lock:
            self._long_polls.forget(ticket)

    def put(
        self,
        call: Call,
        answer: Answer,
        *,
        ticket: Hashable = None,
        origin: str = "",
    ) -> bool:
        """Answer a call, now or when its outcome is ready; False if it was refused."""
        with self._lock:
            now_s = self._clock.now_s()
            is_heard = self._long_polls.put(
                call, answer, now_s, ticket=ticket, origin=origin
            )
            self._settle(now_s)
            return is_heard

    def ask(self, call: Call) -> Reply:
        """Return the answer to a call that does not wait."""
        if isinstance(call, JoinCall):
            self._service.write_ahead.on_join(call, *self.look())
        return self.change_by(lambda service, now_s: service.handle(call, now_s))

    def offer(self, header: Header, beat: Heartbeat | None) -> Reception:
        """Return the reception of an update, by its header alone."""
        self._service.write_ahead.on_offer(header)
        return self.change_by(
            lambda service, now_s: service.offer(header, now_s, beat=beat)
        )

    def check_of(self, header: Header) -> UpdateCheck:
        """Return the check for the body of a wanted update."""
        return self.change_by(lambda service, _: service.check_of(header))

    def take(self, frame: Frame) -> Reception:
        """Stage an update whose body is received and verified."""
        self._service.write_ahead.on_received(frame)
        return self.change_by(lambda service, now_s: service.take(frame, now_s))

    def gather(self, call: AgreedCall) -> Reply:
        """Commit a round that a collective has reduced, or return its reception.

        Runs in the caller's thread: no other thread touches a closing fragment.
        """
        if call.agreed is not None:
            require_sound(call.agreed)
        while True:
            result = self.change_by(lambda service, now_s: service.gather(call, now_s))
            if not isinstance(result, CloseRound):
                return result
            self._commit(self._agreed(result))

    def change(self, event: Event) -> Reply:
        """Apply an operator's command."""
        return self.change_by(lambda service, now_s: service.change(event, now_s))

    def closed(self, island: str, incarnation: int) -> None:
        """Handle the close of an island's last connection."""
        self.change(ConnectionLost(island, incarnation))

    def change_by(self, act: Callable[[Service, float], T]) -> T:
        """Call `act` with the service and the time, under the lock."""
        with self._lock:
            now_s = self._clock.now_s()
            done = act(self._service, now_s)
            self._settle(now_s)
            return done

    def look(self) -> tuple[CoordinatorState, float]:
        """Return the current immutable state and the time."""
        with self._lock:
            return self._service.state, self._clock.now_s()

    @contextmanager
    def reading(self, fragment: int) -> Iterator[FragmentState]:
        """Yield a fragment's state, which does not change meanwhile.

        Raises:
            Unreachable: a round is being committed, or another thread reads: ask again.
        """
        read_lock = self._read_lock(fragment)
        if not read_lock.acquire(blocking=False):  # a waiting thread serves no request
            raise Unreachable(f"Fragment {fragment} is in use. Ask again.")
        try:
            with self._lock:
                self._service.settled_round(fragment)
                state = self._service.weights[fragment]
            yield state
        finally:
            read_lock.release()

    def _read_lock(self, fragment: int) -> threading.Lock:
        with self._lock:
            self._service.settled_round(
                fragment
            )  # raises if the fragment does not exist
            return self._read_locks[fragment]

    def _settle(self, now_s: float) -> None:
        with self._faults_reported():
            self._long_polls.settle(now_s)
        with self._faults_reported():  # an observer must not disturb the run
            self._watch(self._service, now_s)

    @contextmanager
    def _faults_reported(self) -> Iterator[None]:
        try:
            yield
        except Exception as exc:  # the run depends on these threads: they must not end
            self._on_fault(exc)

    def _tick(self) -> None:
        while not self._ended.wait(TICK_S):
            with self._faults_reported():
                self.change_by(lambda service, now_s: service.tick(now_s))
                self._service.compact()
                with self._lock:
                    self._on_tick(self._service)

    def _reduce(self) -> None:
        while (close := self._closings.get()) is not None:
            with self._faults_reported():
                self._commit(self._agreed(close))

    def _agreed(self, close: CloseRound) -> PendingOutcome:
        """Return the outcome of a round; it is as large as the model."""
        with self._read_locks[close.fragment]:
            return self._service.agree(close)

    def _commit(self, pending: PendingOutcome) -> None:
        self.change_by(lambda service, now_s: service.commit(pending, now_s))


@contextmanager
def _run_in_thread(act: Callable[[], None]) -> Iterator[None]:
    with ThreadPoolExecutor(1, thread_name_prefix="atoll-journal") as threads:
        done = threads.submit(act)
        yield
    done.result()


MAX_PER_ISLAND = 64
"""Fragments whose outcomes one island awaits; usually one or two."""

MAX_PER_ORIGIN = 2048
"""An address rarely has more islands than this behind it."""

MAX_OPEN = 4096
"""The largest number of connections, each of which has at most one poll."""

_NEVER = float("inf")

Answer = Callable[[Reply | Exception], None]


@dataclass(frozen=True)
class LongPoll:
    """An open call; its heartbeat has been processed, and is not processed again."""

    call: OutcomeCall
    answer: Answer
    until_s: float
    origin: str
    """The network of the caller, if known."""

    @property
    def island(self) -> tuple[str, int] | None:
        beat = self.call.beat
        return (beat.island, beat.incarnation) if beat else None


class LongPolls:
    """Passes calls to a service, and answers each when its outcome is ready."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._open: dict[Hashable, LongPoll] = {}
        """Open polls by ticket, oldest first."""

        self._by_fragment: dict[tuple[str, int, int], Hashable] = {}
        self._per_origin: Counter[str] = Counter()
        self._per_island: Counter[tuple[str, int]] = Counter()
        self._rounds: tuple[int, ...] = ()
        """The open rounds at the last check of all polls."""

        self._due_s = _NEVER
        """Time at which the first poll times out."""

    def __len__(self) -> int:
        return len(self._open)

    def put(
        self,
        call: Call,
        answer: Answer,
        now_s: float,
        *,
        ticket: Hashable = None,
        origin: str = "",
    ) -> bool:
        """Answer a call, now or before its timeout.

        `ticket` names the poll for `forget`. Returns False if the call was refused.
        """
        try:
            reply = self._service.handle(call, now_s)
        except (AtollError, RunEnded) as exc:
            answer(exc)
            return False
        if isinstance(call, OutcomeCall) and call.wait_s and _may_wait(reply):
            until_s = now_s + min(call.wait_s, LONG_POLL_S)
            poll = LongPoll(call, answer, until_s, origin)
            self._add(object() if ticket is None else ticket, poll, now_s)
            self._due_s = min(self._due_s, until_s)
        else:
            answer(reply)
        return True

    def settle(self, now_s: float) -> None:
        """Answer the polls whose outcome is ready or whose time is up."""
        if not self._open:
            return
        state = self._service.state
        is_stuck = state.is_stuck(now_s)
        rounds = tuple([round.number for round in state.rounds])
        if state.move is not None and state.move.is_over:
            self._due_s = now_s
        if not is_stuck and rounds == self._rounds and now_s < self._due_s:
            return  # most messages change nothing for open polls
        due = [
            ticket
            for ticket, poll in self._open.items()
            if self._is_due(poll, now_s, is_stuck)
        ]
        answered = [self._remove(ticket) for ticket in due]
        self._rounds = rounds
        self._due_s = min(
            [poll.until_s for poll in self._open.values()], default=_NEVER
        )
        for poll in answered:
            self._answer(poll, now_s)

    def forget(self, ticket: Hashable) -> None:
        """Drop a poll whose connection is closed. Safe to repeat."""
        if ticket in self._open:
            self._remove(ticket)

    def _add(self, ticket: Hashable, poll: LongPoll, now_s: float) -> None:
        for other in self._exceeding(poll):
            self._answer(self._remove(other), now_s)
        self._open[ticket] = poll
        self._per_origin[poll.origin] += 1
        if poll.island is not None:
            self._per_island[poll.island] += 1
            self._by_fragment[(*poll.island, poll.call.fragment)] = ticket

    def _exceeding(self, poll: LongPoll) -> list[Hashable]:
        """Return the tickets of the polls that a new one replaces."""
        island, origin = poll.island, poll.origin
        if island is not None:
            older = self._by_fragment.get((*island, poll.call.fragment))
            if older is not None:
                return [older]
            if self._per_island[island] >= MAX_PER_ISLAND:
                return [self._oldest(lambda other: other.island == island)]
        if origin and self._per_origin[origin] >= MAX_PER_ORIGIN:
            return [self._oldest(lambda other: other.origin == origin)]
        if len(self._open) >= MAX_OPEN:
            ((busiest, _),) = self._per_origin.most_common(1)
            return [self._oldest(lambda other: other.origin == busiest)]
        return []

    def _oldest(self, matches: Callable[[LongPoll], bool]) -> Hashable:
        return next(ticket for ticket, poll in self._open.items() if matches(poll))

    def _remove(self, ticket: Hashable) -> LongPoll:
        poll = self._open.pop(ticket)
        self._per_origin[poll.origin] -= 1
        if not self._per_origin[poll.origin]:
            del self._per_origin[poll.origin]
        if poll.island is not None:
            self._per_island[poll.island] -= 1
            if not self._per_island[poll.island]:
                del self._per_island[poll.island]
            key = (*poll.island, poll.call.fragment)
            if self._by_fragment.get(key) is ticket:
                del self._by_fragment[key]
        return poll

    def _is_due(self, poll: LongPoll, now_s: float, is_stuck: bool) -> bool:
        call, state = poll.call, self._service.state
        if call.round < state.rounds[call.fragment].number:
            return True
        if state.move is not None and state.move.is_over:
            return True
        if is_stuck and call.beat and state.wanted(call.beat.island, now_s):
            return True
        return now_s >= poll.until_s

    def _answer(self, poll: LongPoll, now_s: float) -> None:
        """Answer with the present state; an open poll renews no lease."""
        beat, state = poll.call.beat, self._service.state
        call = replace(poll.call, wait_s=0.0, beat=None)
        try:
            reply = self._service.handle(call, now_s)
        except (AtollError, RunEnded) as exc:
            poll.answer(exc)
            return
        if reply is None and beat is not None:
            reply = state.position(now_s, island=beat.island)
        poll.answer(reply)


def _may_wait(reply: Reply) -> bool:
    """Return whether a poll may stay open: no outcome, and no state is wanted."""
    if isinstance(reply, Position):
        return not reply.wanted and not reply.lost
    return reply is None
