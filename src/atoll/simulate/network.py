"""A network that delays, reorders, duplicates, loses, corrupts, cuts and throttles.

A link is one direction between two processes; a weather changes how links behave.
Everything is built on one-way messages: a request and its reply are two messages, and
each has its own fate. Time here is true virtual time, independent of the clocks of the
processes. Every copy of a message ends in exactly one of the counts, or is in flight:
sent + duplicated = delivered + lost + cut + unheard + in_flight.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from atoll.errors import Unreachable, UsageError
from atoll.simulate.process import (
    SimProcess,
)
from atoll.simulate.scheduler import (
    GreenletFuture,
    ProcessIncarnation,
    Scheduler,
)

ARROW = "->"


@dataclass(frozen=True, kw_only=True)
class LinkConditions:
    """What happens to messages of some links, beyond their latency.

    Rates are chances per message. Several weathers on one link add up: delays are
    summed, chances are independent, the narrowest throttle holds.
    """

    link: str = "*"
    """`a->b` is one direction, `a` is all that `a` sends or gets, `*` is everything."""

    delay_s: float = 0.0
    delay_rate: float = 1.0
    spread_s: float = 0.0
    """Up to so much more delay, drawn anew each time, so that messages overtake."""

    spread_rate: float = 1.0
    loss: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0
    bytes_per_s: float = math.inf

    def touches(self, source: str, destination: str) -> bool:
        """Return whether messages from `source` to `destination` feel this."""
        if self.link == "*":
            return True
        here, arrow, there = self.link.partition(ARROW)
        if arrow:
            return (here, there) == (source, destination)
        return here in (source, destination)


@dataclass(frozen=True, kw_only=True)
class Latency:
    """What a link is like in good weather."""

    base_s: float = 0.02
    jitter_s: float = 0.01
    """Up to so much more, drawn per message."""

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
    """One direction between two processes. Random numbers are its own stream."""

    def __init__(
        self, source: str, destination: str, rng: random.Random, latency: Latency
    ) -> None:
        self.source, self.destination, self.rng = source, destination, rng
        self._latency = latency
        self._free_at_s = 0.0
        """When the last byte sent so far has left, on a throttled link."""

        self.weathers: tuple[LinkConditions, ...] = ()
        self.bytes_per_s = latency.bytes_per_s

    def __str__(self) -> str:
        return f"{self.source}{ARROW}{self.destination}"

    def expose(self, weathers: Iterable[LinkConditions]) -> None:
        """Take what touches this link of all the weathers there are now."""
        self.weathers = tuple(
            each for each in weathers if each.touches(self.source, self.destination)
        )
        throttles = [each.bytes_per_s for each in self.weathers]
        self.bytes_per_s = min([self._latency.bytes_per_s, *throttles])

    def loses(self) -> bool:
        return any([self._draw(each.loss) for each in self.weathers])

    def duplicates(self) -> bool:
        return any([self._draw(each.duplicate) for each in self.weathers])

    def corrupts(self) -> bool:
        return any([self._draw(each.corrupt) for each in self.weathers])

    def arrival_s(self, now_s: float, size_bytes: int) -> float:
        """Return when a message sent now arrives; a throttled link sends in turn."""
        sent_s = now_s
        if self.bytes_per_s < math.inf:
            sent_s = max(now_s, self._free_at_s) + size_bytes / self.bytes_per_s
            self._free_at_s = sent_s
        flight_s = self._latency.base_s + self._latency.jitter_s * self.rng.random()
        for each in self.weathers:
            if each.delay_s and self._draw(each.delay_rate):
                flight_s += each.delay_s
            if each.spread_s and self._draw(each.spread_rate):
                flight_s += each.spread_s * self.rng.random()
        return sent_s + flight_s

    def _draw(self, rate: float) -> bool:
        return rate > 0.0 and (rate >= 1.0 or self.rng.random() < rate)


Corrupter = Callable[[object, random.Random], object]


class ReplyFunction(Protocol):
    """Answers one request, now or later; an exception is raised where it arrives."""

    def __call__(self, answer: object, *, size_bytes: int = 0) -> None: ...


Listener = Callable[[object, ReplyFunction], object]


@dataclass
class MessageCounts:
    """Where every copy of every message is."""

    sent: int = 0
    duplicated: int = 0
    delivered: int = 0
    lost: int = 0
    cut: int = 0
    """Sent or due while a partition stood between."""

    unheard: int = 0
    """Nobody listened, or who asked is dead."""

    in_flight: int = 0
    bytes_in_flight: int = 0


class NetworkPartition:
    """A partition. Processes that no group names form one more group."""

    def __init__(self, groups: Sequence[Sequence[str]]) -> None:
        self._group = {name: at for at, group in enumerate(groups) for name in group}

    def parts(self, source: str, destination: str) -> bool:
        return self._group.get(source) != self._group.get(destination)


@dataclass(slots=True)
class PendingRequest:
    """Who asked whom, and where the answer goes."""

    source: str
    destination: str
    life: ProcessIncarnation
    answer: GreenletFuture[object]

    def take(self, payload: object) -> None:
        """Take an answer; all but the first to arrive are ignored."""
        if self.answer.done():
            return
        if isinstance(payload, Exception):
            self.answer.set_error(payload.with_traceback(None))
        else:
            self.answer.set(payload)


@dataclass(slots=True)
class NetworkMessage:
    """One way of one exchange of words; `payload` is the request or the answer."""

    link: SimLink
    asked: PendingRequest
    payload: object
    size_bytes: int
    is_answer: bool


class Network:
    """Carries requests between processes.

    A request or answer travels by reference: give bytes, or values nobody changes.
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
        self._weathers: list[LinkConditions] = []
        self._cuts: list[NetworkPartition] = []

    def listen(self, process: SimProcess, listener: Listener) -> None:
        """Let `listener` take what is sent to `process`, for this life of it.

        It runs in that life but not in a greenlet: it answers at once, keeps the reply
        for later, or spawns what must wait.
        """
        self._scheduler.check()
        self._listeners[process.name] = (process.life, listener)

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
            Exception: what the listener answered, if that was an exception.
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
        """Send a request from `process`; the first answer to arrive is the promise's.

        Waits for nothing, and the promise may stay empty for ever.
        """
        self._scheduler.check()
        # Not `Promise[object](...)`: calling the alias costs more than the promise.
        answer: GreenletFuture[object] = GreenletFuture(self._scheduler)
        asked = PendingRequest(process.name, destination, process.life, answer)
        link = self._link(process.name, destination)
        self._send(NetworkMessage(link, asked, request, size_bytes, is_answer=False))
        return answer

    def cut(self, groups: Sequence[Sequence[str]]) -> NetworkPartition:
        """Let nothing pass between groups, until `heal`; the unnamed are a group."""
        cut = NetworkPartition(groups)
        self._cuts.append(cut)
        return cut

    def heal(self, cut: NetworkPartition) -> None:
        self._cuts.remove(cut)

    def expose(self, weather: LinkConditions) -> None:
        """Let `weather` act on messages sent from now on, until `clear`."""
        if weather.corrupt and self._corrupter is None:
            raise UsageError(
                f"Messages of {weather.link!r} cannot be corrupted: this network does "
                "not know how. Give Network a corrupter."
            )
        self._weathers.append(weather)
        self._expose_links()

    def clear(self, weather: LinkConditions) -> None:
        self._weathers.remove(weather)
        self._expose_links()

    def _expose_links(self) -> None:
        for link in self._links.values():
            link.expose(self._weathers)

    def _link(self, source: str, destination: str) -> SimLink:
        link = self._links.get((source, destination))
        if link is None:
            rng = self._scheduler.random(f"link {source}{ARROW}{destination}")
            link = SimLink(source, destination, rng, self._latency)
            link.expose(self._weathers)
            self._links[source, destination] = link
        return link

    def _answer(
        self, asked: PendingRequest, answer: object, *, size_bytes: int = 0
    ) -> None:
        self._scheduler.check()
        link = self._link(asked.destination, asked.source)
        self._send(NetworkMessage(link, asked, answer, size_bytes, is_answer=True))

    def _send(self, message: NetworkMessage) -> None:
        self.counts.sent += 1
        self._tell(message, "send")
        if message.link.weathers and message.link.duplicates():
            self.counts.duplicated += 1
            self._tell(message, "duplicate")
            self._launch(message)
        self._launch(message)

    def _launch(self, message: NetworkMessage) -> None:
        """Let one copy of a message meet its fate."""
        link = message.link
        if self._cuts and self._is_cut(message):
            return
        if link.weathers:
            if link.loses():
                self.counts.lost += 1
                self._tell(message, "lose")
                return
            if link.corrupts() and self._corrupter is not None:
                self._tell(message, "corrupt")
                spoilt = self._corrupter(message.payload, link.rng)
                message = replace(message, payload=spoilt)
        self.counts.in_flight += 1
        self.counts.bytes_in_flight += message.size_bytes
        due_s = link.arrival_s(self._scheduler.now_s, message.size_bytes)
        self._scheduler.push(due_s, partial(self._arrive, message), None)

    def _arrive(self, message: NetworkMessage) -> None:
        self.counts.in_flight -= 1
        self.counts.bytes_in_flight -= message.size_bytes
        if self._cuts and self._is_cut(message):
            return
        life, act = self._receiver(message)
        if life is None or not life.is_alive:
            self.counts.unheard += 1
            self._tell(message, "unheard")
            return
        self.counts.delivered += 1
        self._tell(message, "deliver")
        self._scheduler.push(self._scheduler.now_s, act, life)

    def _receiver(
        self, message: NetworkMessage
    ) -> tuple[ProcessIncarnation | None, Callable[[], object]]:
        asked = message.asked
        if message.is_answer:
            return asked.life, partial(asked.take, message.payload)
        life, listener = self._listeners.get(asked.destination, (None, _ignore))
        return life, partial(listener, message.payload, partial(self._answer, asked))

    def _is_cut(self, message: NetworkMessage) -> bool:
        link = message.link
        if not any(each.parts(link.source, link.destination) for each in self._cuts):
            return False
        self.counts.cut += 1
        self._tell(message, "cut")
        return True

    def _tell(self, message: NetworkMessage, what: str) -> None:
        if self._scheduler.trace is None:
            return
        kind = type(message.payload).__name__
        self._scheduler.tell(
            str(message.link), what, f"{kind}, {message.size_bytes} bytes"
        )


def _ignore(request: object, reply: ReplyFunction) -> None:
    """Listen where nobody does."""
