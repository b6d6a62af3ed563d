"""How the leader of an island makes the other ranks do things.

On one line the threads that train meet: a *gathering* begins when every rank has come
to the same call, and ends with what the leader has learnt, or with its error, on all of
them. On the other the background works: one order at a time, and every rank answers.
While a gathering lasts, and between orders, the leader says now and then that it lives:
it may wait for the run as long as it likes, and no line's timeout passes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from atoll.errors import RemoteError, UsageError
from atoll.torch.ranks.faults import Failing, from_message, to_message
from atoll.torch.ranks.line import LEADER, Line, Message

T = TypeVar("T")


class Gatherings:
    """The line on which all threads that train meet, as the leader sees it."""

    def __init__(self, line: Line, conclusion: Callable[[], Message]) -> None:
        self.line, self._conclusion = line, conclusion
        self._lock = threading.Lock()
        self._is_open = False
        self.given = 0
        """Orders so far: what works behind may have to come after them."""

    @contextmanager
    def gathering(
        self, call: str, steps: int, *, within_s: float | None = None
    ) -> Iterator[list[Message]]:
        """Wait for all ranks to come to a call; let them go with what it came to.

        Yields what each of the others says of itself.

        Raises:
            UsageError: a rank has come to another call, or after another step.
            RemoteError: a rank is gone.
        """
        try:
            came = [self.line.hear(r, within_s=within_s) for r in self.line.others]
            self._is_open = True
            self._require_same(came, call, steps)
            yield came
            self._close()
        except BaseException as exc:
            self._dismiss({"do": "fail", **to_message(exc, LEADER)})
            raise
        self._dismiss({"do": "resume", **self._conclusion()})

    def order(self, order: Message) -> None:
        """Let every rank that has come do something; this one does it afterwards."""
        with self._lock:
            self.line.tell(order)
            self.given += 1

    def say_alive(self) -> None:
        """Tell those who wait for the leader that it is there."""
        with self._lock:
            if self._is_open:
                self.line.tell({"do": "wait"})

    def _require_same(self, came: list[Message], call: str, steps: int) -> None:
        for rank, said in zip(self.line.others, came, strict=True):
            if (said["call"], said["steps"]) != (call, steps):
                raise UsageError(
                    f"Rank {rank} of this island came to {said['call']} after "
                    f"{said['steps']} inner steps, and rank {LEADER} to {call} after "
                    f"{steps}. All ranks make the same calls after the same steps."
                )

    def _close(self) -> None:
        with self._lock:
            self.line.tell({"do": "close"})
        for rank in self.line.others:
            said = self.line.hear(rank)
            if "error" in said:
                raise from_message(said)

    def _dismiss(self, message: Message) -> None:
        with self._lock:
            self._is_open = False
            for rank in self.line.others:
                with suppress(RemoteError):  # whoever is gone needs no telling
                    self.line.say(rank, message)


class Background:
    """The line on which ranks work behind their training, as the leader sees it."""

    def __init__(self, line: Line, given: Callable[[], int]) -> None:
        self.line, self._given = line, given
        self._lock = threading.Lock()

    def do(self, order: Message, act: Callable[[], T]) -> tuple[T, list[Message]]:
        """Let all ranks obey an order, this one by `act`; return their answers too.

        Raises:
            Exception: what went wrong, here or at another rank. All have finished.
        """
        with self._lock:
            return self._do(order, act)

    def _do(self, order: Message, act: Callable[[], T]) -> tuple[T, list[Message]]:
        self.line.tell({"after": self._given(), **order})
        failing = Failing()
        results: list[T] = []
        failing.attempt(lambda: results.append(act()))
        if isinstance(failing.error, RemoteError):
            raise failing.error  # the line is broken: nobody answers on it
        answers = [self.line.hear(rank) for rank in self.line.others]
        failing.finish()
        for said in answers:
            if "error" in said:
                raise from_message(said)
        return results[0], answers

    def ask(self, order: Message) -> list[Message]:
        """Let all others obey an order, and return their answers."""
        return self.do(order, lambda: None)[1]

    def ask_if_idle(self, order: Message) -> list[Message] | None:
        """Ask, unless an order is being obeyed: that is a sign of life, too."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return self._do(order, lambda: None)[1]
        finally:
            self._lock.release()

    def dismiss(self, *orders: Message) -> None:
        """Tell all others what has no answer, whoever of them is still there."""
        with self._lock:
            for rank in self.line.others:
                with suppress(RemoteError):  # whoever is gone needs no telling
                    for order in orders:
                        self.line.say(rank, order)
