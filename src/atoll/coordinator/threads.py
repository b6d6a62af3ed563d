"""A service shared by threads: a lock, a ticker and a thread that reduces rounds.

Rule 1: the lock guards the state machine and the log. Bodies are received, reduced and
        made durable outside of it, so that a heartbeat never waits for a round, nor for
        a departing island.
Rule 2: one thread reduces a round. Until it is done the fragment is in the phase
        CLOSING, and no other thread touches its weights.
Rule 3: an answer callback runs under the lock, and must only hand the answer over.
Rule 4: a reader of weights holds a lock per fragment, which the reducing thread takes
        too. It is taken before the service's lock, never after it: a thread that waited
        for a reader with the service's lock would stop every heartbeat, and the reader
        itself needs that lock to look up the weights.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from atoll.clock import Clock
from atoll.coordinator.long_polls import Answer, LongPolls
from atoll.coordinator.service import PendingOutcome, Service
from atoll.coordinator.submissions import require_sound
from atoll.errors import Unreachable
from atoll.exchange import Frame
from atoll.exchange.calls import AgreedCall, Call, JoinCall, Reply
from atoll.protocol import Heartbeat, Reception
from atoll.protocol.coordinator_state import CoordinatorState
from atoll.protocol.events import CloseRound, ConnectionLost, Event
from atoll.weights import FragmentState, UpdateCheck
from atoll.wire import Header

TICK_S = 0.1
"""Period of the ticker: the largest delay of a deadline."""

T = TypeVar("T")
Watch = Callable[[Service, float], None]


class ThreadedService:
    """Owns the threads of a coordinator.

    `watch` is called after each change. `on_fault` receives unexpected exceptions; a
    fragment whose round cannot be reduced stays closing.
    """

    def __init__(
        self,
        service: Service,
        *,
        clock: Clock,
        watch: Watch,
        on_fault: Callable[[Exception], None],
    ) -> None:
        self._service, self._clock, self._watch = service, clock, watch
        self._on_fault = on_fault
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
