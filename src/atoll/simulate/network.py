"""A network that delays, reorders, duplicates, loses, corrupts, cuts and throttles.

A link is one direction between two processes; `LinkConditions` change how links behave.
A request and its reply are two one-way messages, each delayed, lost or changed by
itself. Time here is true virtual time, independent of the clocks of the processes.
Every copy of a message ends in exactly one of the counts, or is in flight:
sent + duplicated = delivered + lost + cut + undelivered + in_flight.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from atoll.errors import Unreachable, UsageError
from atoll.simulate.process import SimProcess
from atoll.simulate.scheduler import GreenletFuture, ProcessIncarnation, Scheduler

ARROW = "->"


@dataclass(frozen=True, kw_only=True)
class LinkConditions:
    """Faults of the messages of some links, beyond their latency.

    Rates are probabilities per message. Several conditions on one link add up: delays
    are summed, probabilities are independent, the narrowest throttle holds.
    """

    link: str = "*"
    """`a->b` is one direction, `a` all messages to or from `a`, `*` all messages."""

    delay_s: float = 0.0
    delay_rate: float = 1.0
    spread_s: float = 0.0
    """Upper bound of an extra delay, drawn per message, so that messages overtake."""

    spread_rate: float = 1.0
    loss: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0
    bytes_per_s: float = math.inf

    def touches(self, source: str, destination: str) -> bool:
        """Return whether this acts on messages from `source` to `destination`."""
        if self.link == "*":
            return True
        start, arrow, end = self.link.partition(ARROW)
        if arrow:
            return (start, end) == (source, destination)
        return start in (source, destination)


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Delay and rate of a link without faults."""

    base_s: float = 0.02
    jitter_s: float = 0.01
    """Upper bound of an extra delay, drawn per message."""

    bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        if not (0 <= self.base_s < math.inf and 0 <= self.jitter_s < math.inf):
            raise UsageError(
                f"base_s={self.base_s!r} and jitter_s={self.jitter_s!r} must be finite "
                "and at least 0. Choose seconds such as 0.02."
            )
        if not self.bytes_per_s > 0:
            raise UsageError(
                f"bytes_per_s={self.bytes_per_s!r} must be above 0. "
                "Use a partition to cut a link."
            )


class SimLink:
    """One direction between two processes, with its own stream of random numbers."""

    def __init__(
        self, source: str, destination: str, rng: random.Random, latency: Latency
    ) -> None:
        self.source, self.destination, self.rng = source, destination, rng
        self._latency = latency
        self._free_at_s = 0.0
        """When a throttled link has sent the last byte so far."""

        self.conditions: tuple[LinkConditions, ...] = ()
        self.bytes_per_s = latency.bytes_per_s

    def __str__(self) -> str:
        return f"{self.source}{ARROW}{self.destination}"

    def expose(self, conditions: Iterable[LinkConditions]) -> None:
        """Take over those of all present conditions that act on this link."""
        self.conditions = tuple(
            condition
            for condition in conditions
            if condition.touches(self.source, self.destination)
        )
        throttles = [condition.bytes_per_s for condition in self.conditions]
        self.bytes_per_s = min([self._latency.bytes_per_s, *throttles])

    def loses(self) -> bool:
        return any([self._draw(condition.loss) for condition in self.conditions])

    def duplicates(self) -> bool:
        return any([self._draw(condition.duplicate) for condition in self.conditions])

    def corrupts(self) -> bool:
        return any([self._draw(condition.corrupt) for condition in self.conditions])

    def arrival_s(self, now_s: float, size_bytes: int) -> float:
        """Return when a message sent now arrives; a throttled link sends in order."""
        sent_s = now_s
        if self.bytes_per_s < math.inf:
            sent_s = max(now_s, self._free_at_s) + size_bytes / self.bytes_per_s
            self._free_at_s = sent_s
        flight_s = self._latency.base_s + self._latency.jitter_s * self.rng.random()
        for condition in self.conditions:
            if condition.delay_s and self._draw(condition.delay_rate):
                flight_s += condition.delay_s
            if condition.spread_s and self._draw(condition.spread_rate):
                flight_s += condition.spread_s * self.rng.random()
        return sent_s + flight_s

    def _draw(self, rate: float) -> bool:
        return rate > 0.0 and (rate >= 1.0 or self.rng.random() < rate)


Corrupter = Callable[[object, random.Random], object]


class ReplyFunction(Protocol):
    """Answers one request, now or later; an exception is raised in the caller."""

    def __call__(self, answer: object, *, size_bytes: int = 0) -> None: ...


Listener = Callable[[object, ReplyFunction], object]


@dataclass
class MessageCounts:
    """Number of message copies by where they are."""

    sent: int = 0
    duplicated: int = 0
    delivered: int = 0
    lost: int = 0
    cut: int = 0
    """Sent or due during a partition between its ends."""

    undelivered: int = 0
    """Without a listener, or the caller is dead."""

    in_flight: int = 0
    bytes_in_flight: int = 0


class NetworkPartition:
    """A partition. Processes that no group names form one more group."""

    def __init__(self, groups: Sequence[Sequence[str]]) -> None:
        self._group = {
            name: index for index, group in enumerate(groups) for name in group
        }

    def separates(self, source: str, destination: str) -> bool:
        return self._group.get(source) != self._group.get(destination)


@dataclass(slots=True)
class PendingRequest:
    """A request's two ends, and the future of its answer."""

    source: str
    destination: str
    incarnation: ProcessIncarnation
    answer: GreenletFuture[object]

    def take(self, payload: object) -> None:
        """Take the first answer to arrive, and ignore the others."""
        if self.answer.done():
            return
        if isinstance(payload, Exception):
            self.answer.set_exception(payload.with_traceback(None))
        else:
            self.answer.set_result(payload)


@dataclass(slots=True)
class NetworkMessage:
    """A message; `payload` is the request or the answer."""

    link: SimLink
    pending: PendingRequest
    payload: object
    size_bytes: int
    is_answer: bool


class Network:
    """Carries requests between processes.

    A request or answer is passed by reference: give bytes or immutable values.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        latency: Latency | None = None,
        corrupter: Corrupter | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._latency = latency or Latency()
        self._corrupter = corrupter
        self.counts = MessageCounts()
        self._listeners: dict[str, tuple[ProcessIncarnation, Listener]] = {}
        self._links: dict[tuple[str, str], SimLink] = {}
        self._conditions: list[LinkConditions] = []
        self._partitions: list[NetworkPartition] = []

    def listen(self, process: SimProcess, listener: Listener) -> None:
        """Let `listener` take messages to `process`, for its present incarnation.

        It runs in that incarnation but not in a greenlet: it answers immediately, keeps
        the reply function for later, or spawns a greenlet that may wait.
        """
        self._scheduler.check()
        self._listeners[process.name] = (process.incarnation, listener)

    def call(
        self,
        process: SimProcess,
        destination: str,
        request: object,
        *,
        size_bytes: int = 0,
        timeout_s: float,
    ) -> object:
        """Send a request from `process`, and wait in its greenlet for the answer.

        Raises:
            Unreachable: no answer within `timeout_s`; the request may have been
                handled, or may still be.
            Exception: the listener's answer, if that was an exception.
        """
        answer = self.ask(process, destination, request, size_bytes=size_bytes)
        try:
            return answer.result(timeout_s)
        except TimeoutError as exc:
            raise Unreachable(
                f"{destination!r} did not answer {process.name!r} within {timeout_s} s."
                " Repeat the request: it may have been handled or not."
            ) from exc

    def ask(
        self, process: SimProcess, destination: str, request: object, *, size_bytes: int
    ) -> GreenletFuture[object]:
        """Send a request from `process`; the future gets the first answer to arrive.

        Does not wait. The future may never get a result.
        """
        self._scheduler.check()
        # Not `GreenletFuture[object](...)`: calling the alias costs more than the call.
        answer: GreenletFuture[object] = GreenletFuture(self._scheduler)
        pending = PendingRequest(process.name, destination, process.incarnation, answer)
        link = self._link(process.name, destination)
        self._send(NetworkMessage(link, pending, request, size_bytes, is_answer=False))
        return answer

    def cut(self, groups: Sequence[Sequence[str]]) -> NetworkPartition:
        """Drop messages between groups until `heal`; unnamed processes are a group."""
        partition = NetworkPartition(groups)
        self._partitions.append(partition)
        return partition

    def heal(self, partition: NetworkPartition) -> None:
        self._partitions.remove(partition)

    def expose(self, condition: LinkConditions) -> None:
        """Let `condition` act on messages sent from now on, until `clear`."""
        if condition.corrupt and self._corrupter is None:
            raise UsageError(
                f"Messages of {condition.link!r} cannot be corrupted: this network "
                "has no corrupter. Give Network a corrupter."
            )
        self._conditions.append(condition)
        self._expose_links()

    def clear(self, condition: LinkConditions) -> None:
        self._conditions.remove(condition)
        self._expose_links()

    def _expose_links(self) -> None:
        for link in self._links.values():
            link.expose(self._conditions)

    def _link(self, source: str, destination: str) -> SimLink:
        link = self._links.get((source, destination))
        if link is None:
            rng = self._scheduler.random(f"link {source}{ARROW}{destination}")
            link = SimLink(source, destination, rng, self._latency)
            link.expose(self._conditions)
            self._links[source, destination] = link
        return link

    def _answer(
        self, pending: PendingRequest, answer: object, *, size_bytes: int = 0
    ) -> None:
        self._scheduler.check()
        link = self._link(pending.destination, pending.source)
        self._send(NetworkMessage(link, pending, answer, size_bytes, is_answer=True))

    def _send(self, message: NetworkMessage) -> None:
        self.counts.sent += 1
        self._emit(message, "send")
        if message.link.conditions and message.link.duplicates():
            self.counts.duplicated += 1
            self._emit(message, "duplicate")
            self._launch(message)
        self._launch(message)

    def _launch(self, message: NetworkMessage) -> None:
        """Lose, corrupt or deliver one copy of a message."""
        link = message.link
        if self._partitions and self._is_cut(message):
            return
        if link.conditions:
            if link.loses():
                self.counts.lost += 1
                self._emit(message, "lose")
                return
            if link.corrupts() and self._corrupter is not None:
                self._emit(message, "corrupt")
                spoilt = self._corrupter(message.payload, link.rng)
                message = replace(message, payload=spoilt)
        self.counts.in_flight += 1
        self.counts.bytes_in_flight += message.size_bytes
        due_s = link.arrival_s(self._scheduler.now_s, message.size_bytes)
        self._scheduler.push(due_s, partial(self._arrive, message), None)

    def _arrive(self, message: NetworkMessage) -> None:
        self.counts.in_flight -= 1
        self.counts.bytes_in_flight -= message.size_bytes
        if self._partitions and self._is_cut(message):
            return
        incarnation, act = self._receiver(message)
        if incarnation is None or not incarnation.is_alive:
            self.counts.undelivered += 1
            self._emit(message, "unheard")
            return
        self.counts.delivered += 1
        self._emit(message, "deliver")
        self._scheduler.push(self._scheduler.now_s, act, incarnation)

    def _receiver(
        self, message: NetworkMessage
    ) -> tuple[ProcessIncarnation | None, Callable[[], object]]:
        pending = message.pending
        if message.is_answer:
            return pending.incarnation, partial(pending.take, message.payload)
        incarnation, listener = self._listeners.get(
            pending.destination, (None, _ignore)
        )
        return incarnation, partial(
            listener, message.payload, partial(self._answer, pending)
        )

    def _is_cut(self, message: NetworkMessage) -> bool:
        link = message.link
        if not any(
            partition.separates(link.source, link.destination)
            for partition in self._partitions
        ):
            return False
        self.counts.cut += 1
        self._emit(message, "cut")
        return True

    def _emit(self, message: NetworkMessage, action: str) -> None:
        if self._scheduler.trace is None:
            return
        kind = type(message.payload).__name__
        self._scheduler.emit(
            str(message.link), action, f"{kind}, {message.size_bytes} bytes"
        )


def _ignore(request: object, reply: ReplyFunction) -> None:
    """Ignore a request to a process without a listener."""
