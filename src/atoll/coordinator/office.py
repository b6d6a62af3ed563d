"""A service that many threads call: one at a time, and none of them for long.

Rule 1: the lock guards the machine and the log. Bodies are received, reduced and made
        durable outside of it, so that a heartbeat never waits for a round, nor for an
        island that departs.
Rule 2: a round is reduced by one thread. Until it has, its fragment is closing, and
        nobody else touches its weights.
Rule 3: an answer is given under the lock, and must only hand itself over.
Rule 4: who reads weights holds them still by a lock per fragment, which the thread that
        reduces takes, too. It is taken before the first lock, never after it.
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
from atoll.coordinator.gathered import require_sound
from atoll.coordinator.questions import Answer, Questions
from atoll.coordinator.service import Pending, Service
from atoll.errors import Unreachable
from atoll.exchange import AgreedCall, Call, Frame, JoinCall, Reply
from atoll.protocol import Beat, Reception
from atoll.protocol.events import Close, Closed, Event
from atoll.protocol.run_state import CoordinatorState
from atoll.weights import FragmentState, UpdateCheck
from atoll.wire import Header

TICK_S = 0.1
"""How late a deadline may be noticed."""

T = TypeVar("T")
Watch = Callable[[Service, float], None]


class Office:
    """Owns the threads of a coordinator.

    `watch` sees the service after each change. `on_fault` is told of what should never
    happen; a fragment whose round cannot be reduced stays closing.
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
        self._questions = Questions(service)
        self._lock = threading.Lock()
        self._still: dict[int, threading.Lock] = defaultdict(threading.Lock)
        self._ended = threading.Event()
        self._closings: queue.SimpleQueue[Close | None] = queue.SimpleQueue()
        service.defer_to(self._closings.put, beside=_in_a_thread)
        self._threads = [
            threading.Thread(target=self._tick, name="atoll-tick", daemon=True),
            threading.Thread(target=self._reduce, name="atoll-reduce", daemon=True),
        ]

    def start(self) -> None:
        """Let time pass from now on."""
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
    def open_questions(self) -> int:
        """How many wait for an outcome."""
        return len(self._questions)

    def forget(self, ticket: Hashable) -> None:
        """Drop the question that was put with a ticket: nobody waits for it."""
        with self._lock:
            self._questions.forget(ticket)

    def put(
        self,
        call: Call,
        answer: Answer,
        *,
        ticket: Hashable = None,
        origin: str = "",
    ) -> bool:
        """Answer a call, now or when there is something to say; False: refused."""
        with self._lock:
            now_s = self._clock.now_s()
            is_heard = self._questions.put(
                call, answer, now_s, ticket=ticket, origin=origin
            )
            self._settle(now_s)
            return is_heard

    def ask(self, call: Call) -> Reply:
        """Return the answer to a call that does not wait."""
        if isinstance(call, JoinCall):
            self._service.drafting.joining(call, *self.look())
        return self.change_by(lambda service, now_s: service.handle(call, now_s))

    def offer(self, header: Header, beat: Beat | None) -> Reception:
        """Return whether an update is wanted, by its header alone."""
        self._service.drafting.offered(header)
        return self.change_by(
            lambda service, now_s: service.offer(header, now_s, beat=beat)
        )

    def check_of(self, header: Header) -> UpdateCheck:
        """Return what judges the body of an update that is wanted."""
        return self.change_by(lambda service, _: service.check_of(header))

    def take(self, frame: Frame) -> Reception:
        """Stage an update whose body is here and verified."""
        self._service.drafting.brought(frame)
        return self.change_by(lambda service, now_s: service.take(frame, now_s))

    def gather(self, call: AgreedCall) -> Reply:
        """Commit what islands have reduced among themselves, or say why not.

        In the caller's thread: nobody else touches a fragment that is closing.
        """
        if call.agreed is not None:
            require_sound(call.agreed)
        while True:
            found = self.change_by(lambda service, now_s: service.gather(call, now_s))
            if not isinstance(found, Close):
                return found
            self._commit(self._agreed(found))

    def change(self, event: Event) -> Reply:
        """Carry out what an operator asks for."""
        return self.change_by(lambda service, now_s: service.change(event, now_s))

    def closed(self, island: str, incarnation: int) -> None:
        """Take the hint that an island's last connection was closed."""
        self.change(Closed(island, incarnation))

    def change_by(self, act: Callable[[Service, float], T]) -> T:
        """Do something with the service that nobody else touches meanwhile."""
        with self._lock:
            now_s = self._clock.now_s()
            done = act(self._service, now_s)
            self._settle(now_s)
            return done

    def look(self) -> tuple[CoordinatorState, float]:
        """Return what the machine remembers, and the time; neither changes."""
        with self._lock:
            return self._service.state, self._clock.now_s()

    @contextmanager
    def reading(self, fragment: int) -> Iterator[FragmentState]:
        """Give a fragment's state, which nobody changes meanwhile.

        Raises:
            Unreachable: a round is being committed, or somebody reads: ask again.
        """
        still = self._still_of(fragment)
        if not still.acquire(blocking=False):  # a thread that waits serves nobody
            raise Unreachable(f"Fragment {fragment} is in use. Ask again.")
        try:
            with self._lock:
                self._service.settled_round(fragment)
                state = self._service.weights[fragment]
            yield state
        finally:
            still.release()

    def _still_of(self, fragment: int) -> threading.Lock:
        with self._lock:
            self._service.settled_round(fragment)  # or there is no such fragment
            return self._still[fragment]

    def _settle(self, now_s: float) -> None:
        with self._told():
            self._questions.settle(now_s)
        with self._told():  # who looks on must not disturb
            self._watch(self._service, now_s)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except Exception as exc:  # these threads are the run's: they must live on
            self._on_fault(exc)

    def _tick(self) -> None:
        while not self._ended.wait(TICK_S):
            with self._told():
                self.change_by(lambda service, now_s: service.tick(now_s))
                self._service.compact()

    def _reduce(self) -> None:
        while (close := self._closings.get()) is not None:
            with self._told():
                self._commit(self._agreed(close))

    def _agreed(self, close: Close) -> Pending:
        """Return what a round came to. Nobody keeps it: it is as large as the model."""
        with self._still[close.fragment]:
            return self._service.agree(close)

    def _commit(self, pending: Pending) -> None:
        self.change_by(lambda service, now_s: service.commit(pending, now_s))


@contextmanager
def _in_a_thread(act: Callable[[], None]) -> Iterator[None]:
    with ThreadPoolExecutor(1, thread_name_prefix="atoll-journal") as threads:
        done = threads.submit(act)
        yield
    done.result()
