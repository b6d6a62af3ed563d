"""A network that delays, reorders, duplicates, loses, corrupts, cuts and throttles.

Everything is built on one-way messages: a request and its reply are two, and each has
its own fate. Time here is true virtual time, whatever the clocks of the processes say.
Every copy of a message ends in exactly one of the counts, or is in flight:
sent + duplicated = delivered + lost + cut + unheard + in_flight.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from atoll.errors import Unreachable, UsageError
from atoll.simulate.life import Life
from atoll.simulate.links import ARROW, Latency, Link, Weather
from atoll.simulate.process import Process
from atoll.simulate.promise import Promise
from atoll.simulate.scheduler import Scheduler

Corrupter = Callable[[object, random.Random], object]


class Reply(Protocol):
    """Answers one request, now or later; an exception is raised where it arrives."""

    def __call__(self, answer: object, *, size_bytes: int = 0) -> None: ...


Listener = Callable[[object, Reply], object]


@dataclass
class Counts:
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


class Cut:
    """A partition. Processes that no group names form one more group."""

    def __init__(self, groups: Sequence[Sequence[str]]) -> None:
        self._group = {name: at for at, group in enumerate(groups) for name in group}

    def parts(self, source: str, destination: str) -> bool:
        return self._group.get(source) != self._group.get(destination)


@dataclass(slots=True)
class Asked:
    """Who asked whom, and where the answer goes."""

    source: str
    destination: str
    life: Life
    answer: Promise[object]

    def take(self, payload: object) -> None:
        """Take an answer; all but the first to arrive are ignored."""
        if self.answer.done():
            return
        if isinstance(payload, Exception):
            self.answer.set_error(payload.with_traceback(None))
        else:
            self.answer.set(payload)


@dataclass(slots=True)
class Message:
    """One way of one exchange of words; `payload` is the request or the answer."""

    link: Link
    asked: Asked
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
        self.counts = Counts()
        self._listeners: dict[str, tuple[Life, Listener]] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._weathers: list[Weather] = []
        self._cuts: list[Cut] = []

    def listen(self, process: Process, listener: Listener) -> None:
        """Let `listener` take what is sent to `process`, for this life of it.

        It runs in that life but not in a greenlet: it answers at once, keeps the reply
        for later, or spawns what must wait.
        """
        self._scheduler.check()
        self._listeners[process.name] = (process.life, listener)

    def call(
        self,
        process: Process,
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
        self, process: Process, destination: str, request: object, *, size_bytes: int
    ) -> Promise[object]:
        """Send a request from `process`; the first answer to arrive is the promise's.

        Waits for nothing, and the promise may stay empty for ever.
        """
        self._scheduler.check()
        # Not `Promise[object](...)`: calling the alias costs more than the promise.
        answer: Promise[object] = Promise(self._scheduler)
        asked = Asked(process.name, destination, process.life, answer)
        link = self._link(process.name, destination)
        self._send(Message(link, asked, request, size_bytes, is_answer=False))
        return answer

    def cut(self, groups: Sequence[Sequence[str]]) -> Cut:
        """Let nothing pass between groups, until `heal`; the unnamed are a group."""
        cut = Cut(groups)
        self._cuts.append(cut)
        return cut

    def heal(self, cut: Cut) -> None:
        self._cuts.remove(cut)

    def expose(self, weather: Weather) -> None:
        """Let `weather` act on messages sent from now on, until `clear`."""
        if weather.corrupt and self._corrupter is None:
            raise UsageError(
                f"Messages of {weather.link!r} cannot be corrupted: this network does "
                "not know how. Give Network a corrupter."
            )
        self._weathers.append(weather)
        self._expose_links()

    def clear(self, weather: Weather) -> None:
        self._weathers.remove(weather)
        self._expose_links()

    def _expose_links(self) -> None:
        for link in self._links.values():
            link.expose(self._weathers)

    def _link(self, source: str, destination: str) -> Link:
        link = self._links.get((source, destination))
        if link is None:
            rng = self._scheduler.random(f"link {source}{ARROW}{destination}")
            link = Link(source, destination, rng, self._latency)
            link.expose(self._weathers)
            self._links[source, destination] = link
        return link

    def _answer(self, asked: Asked, answer: object, *, size_bytes: int = 0) -> None:
        self._scheduler.check()
        link = self._link(asked.destination, asked.source)
        self._send(Message(link, asked, answer, size_bytes, is_answer=True))

    def _send(self, message: Message) -> None:
        self.counts.sent += 1
        self._tell(message, "send")
        if message.link.weathers and message.link.duplicates():
            self.counts.duplicated += 1
            self._tell(message, "duplicate")
            self._launch(message)
        self._launch(message)

    def _launch(self, message: Message) -> None:
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

    def _arrive(self, message: Message) -> None:
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

    def _receiver(self, message: Message) -> tuple[Life | None, Callable[[], object]]:
        asked = message.asked
        if message.is_answer:
            return asked.life, partial(asked.take, message.payload)
        life, listener = self._listeners.get(asked.destination, (None, _ignore))
        return life, partial(listener, message.payload, partial(self._answer, asked))

    def _is_cut(self, message: Message) -> bool:
        link = message.link
        if not any(each.parts(link.source, link.destination) for each in self._cuts):
            return False
        self.counts.cut += 1
        self._tell(message, "cut")
        return True

    def _tell(self, message: Message, what: str) -> None:
        if self._scheduler.trace is None:
            return
        kind = type(message.payload).__name__
        self._scheduler.tell(
            str(message.link), what, f"{kind}, {message.size_bytes} bytes"
        )


def _ignore(request: object, reply: Reply) -> None:
    """Listen where nobody does."""
