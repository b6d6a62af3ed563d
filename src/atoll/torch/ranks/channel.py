"""Channels among the ranks of an island, over a gloo group of their own.

One thread of each rank uses a channel at a time. Messages are JSON: nothing in them is
executed. A rank that ends closes its sockets, so its peers notice at once; a rank that
hangs is given up after the channel's timeout. An error has the same kind and the same
message on every rank.

The leader uses two channels. On one, the training threads meet: a *gathering* begins
when every rank has come to the same call, and ends with the leader's result, or with
its error, on all of them. On the other, the background threads work: one order at a
time, and every rank answers. During a gathering, and between orders, the leader sends
keepalives: it may wait for the run without limit, and no channel times out.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from atoll.errors import RemoteError, RunEnded, UsageError
from atoll.exchange.api.replies import FAILURES

LEADER = 0
"""The rank, within its island, that talks to the run."""

Message = dict[str, Any]

_TALK, _VECTOR = 1, 2
_HEAD_BYTES = 1024
"""A message that fits is one send, its length before it."""

_LENGTH_BYTES = 8
_MAX_BYTES = 2**30


class Line:
    """How one rank of an island talks to the others; ranks are the island's own."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()

    @property
    def is_leader(self) -> bool:
        return self.rank == LEADER

    @property
    def others(self) -> list[int]:
        """All ranks but this one."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def say(self, to: int, message: Message) -> None:
        """Send a message; the other rank has to be listening, or to come to it."""
        said = json.dumps(message).encode()
        head = np.zeros(_HEAD_BYTES, np.uint8)
        fits = min(len(said), _HEAD_BYTES - _LENGTH_BYTES)
        head[:_LENGTH_BYTES].view(np.int64)[0] = len(said)
        head[_LENGTH_BYTES : _LENGTH_BYTES + fits] = np.frombuffer(
            said[:fits], np.uint8
        )
        self._send(to, head, _TALK)
        if len(said) > fits:
            self._send(to, np.frombuffer(said[fits:], np.uint8).copy(), _TALK)

    def tell(self, message: Message) -> None:
        """Send a message to all others."""
        for rank in self.others:
            self.say(rank, message)

    def hear(self, source: int, *, within_s: float | None = None) -> Message:
        """Return the next message of a rank.

        Raises:
            RemoteError: it has ended, or has said nothing for the line's timeout.
        """
        head = np.empty(_HEAD_BYTES, np.uint8)
        self._receive(source, head, _TALK, within_s=within_s)
        length = int(head[:_LENGTH_BYTES].view(np.int64)[0])
        said = head[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes()
        if not 0 <= length <= _MAX_BYTES:
            raise RemoteError(f"Rank {source} of this island sent {length} bytes.")
        if length > len(said):
            rest = np.empty(length - len(said), np.uint8)
            self._receive(source, rest, _TALK)
            said += rest.tobytes()
        message: Message = json.loads(said)
        return message

    def put(self, to: int, values: np.ndarray) -> None:
        """Send a vector whose length the other rank knows."""
        self._send(to, values, _VECTOR)

    def get(self, source: int, out: np.ndarray) -> None:
        """Receive a vector."""
        self._receive(source, out, _VECTOR)

    def swap(
        self,
        outgoing: Sequence[tuple[int, np.ndarray]],
        incoming: Sequence[tuple[int, np.ndarray]],
    ) -> None:
        """Send vectors to some ranks and receive some from others, all at once."""
        with self._answering("another rank"):
            works = [
                self._group.recv([torch.from_numpy(out)], rank, _VECTOR)
                for rank, out in incoming
            ]
            works += [
                self._group.send([torch.from_numpy(values)], rank, _VECTOR)
                for rank, values in outgoing
            ]
            for work in works:
                work.wait()

    def spread(self, values: np.ndarray) -> None:
        """Make the leader's vector everybody's."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = LEADER, 0
        with self._answering("a rank"):
            self._group.broadcast([torch.from_numpy(values)], options).wait()

    def _send(self, to: int, values: np.ndarray, tag: int) -> None:
        with self._answering(f"rank {to}"):
            self._group.send([torch.from_numpy(values)], to, tag).wait()

    def _receive(
        self, source: int, out: np.ndarray, tag: int, *, within_s: float | None = None
    ) -> None:
        with self._answering(f"rank {source}"):
            work = self._group.recv([torch.from_numpy(out)], source, tag)
            if within_s is None:
                work.wait()
            else:
                work.wait(timedelta(seconds=within_s))

    @contextmanager
    def _answering(self, who: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as exc:
            fact = str(exc).partition("] ")[2] or str(exc)
            raise RemoteError(
                f"{who[0].upper()}{who[1:]} of this island, of {self.size}, does not "
                f"answer rank {self.rank}: {fact.partition('. ')[0]}. Start all ranks "
                "of the island again; the log of the one that ended says why."
            ) from exc


def open_lines(ranks: Sequence[int], timeout: timedelta, count: int) -> list[Line]:
    """Return lines among some ranks of the world. All of them call this, at a time.

    They stay open until torch.distributed is left: the next group of the same ranks
    would be given the name of one that was closed, and look for it where that was.
    """
    return [
        Line(
            dist.new_group(
                list(ranks),
                backend="gloo",
                timeout=timeout,
                use_local_synchronization=True,
            )
        )
        for _ in range(count)
    ]


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


_BY_KIND = {each.kind: each for each in FAILURES}
_BY_CODE = {each.code: each for each in FAILURES}
_EXIT, _INTERRUPTED = "exit", "interrupted"


def to_message(error: BaseException, rank: int) -> Message:
    """Return what other ranks are told of an error that rank `rank` has met."""
    failure = _BY_KIND.get(type(error)) if isinstance(error, Exception) else None
    if failure is not None:
        said = {"error": failure.code, "message": str(error)}
        if failure.extra:
            said[failure.extra] = vars(error)[failure.extra]
        return said
    if isinstance(error, SystemExit):
        return {"error": _EXIT, "message": str(error.code or 0)}
    if not isinstance(error, Exception):
        return {"error": _INTERRUPTED, "message": f"Rank {rank} was interrupted."}
    message = f"Rank {rank} of this island failed: {type(error).__name__}: {error}"
    return {"error": "remote", "message": message}


def from_message(said: Message) -> BaseException:
    """Return the error that another rank has met."""
    code, message = said["error"], said["message"]
    if code == _EXIT:
        return SystemExit(int(message))
    if code == _INTERRUPTED:
        return RunEnded(message)
    failure = _BY_CODE.get(code)
    if failure is None:
        return RemoteError(message)
    extra = {failure.extra: said[failure.extra]} if failure.extra else {}
    return failure.kind(message, **extra)


@dataclass
class Failing:
    """The first thing that went wrong here, while the others go on."""

    error: Exception | None = None

    def attempt(self, work: Callable[[], object]) -> None:
        """Do something that nobody else waits for, unless something has failed."""
        if self.error is None:
            try:
                work()
            except Exception as exc:  # the leader tells everybody at the end
                self.error = exc

    def finish(self) -> None:
        """Raise what went wrong, if anything did."""
        if self.error is not None:
            raise self.error
