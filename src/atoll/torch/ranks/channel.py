"""Channels among the ranks of an island, each over a separate gloo group.

One thread of each rank uses a channel at a time. Messages are JSON: nothing in them is
executed. A rank that ends closes its sockets, so its peers notice immediately; a rank
that hangs is given up after the channel's timeout. An error has the same kind and the
same message on every rank.

The leader uses two channels. On one, the training threads make *collective calls*: a
call begins when every rank has entered it, and ends with the leader's result, or with
its error, on all of them. On the other, the background threads work: one order at a
time, and every rank answers. During a collective call, and between orders, the leader
sends keepalives: it may wait for the run without limit, and no channel times out.
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

_MESSAGE_TAG, _VECTOR_TAG = 1, 2
_HEAD_BYTES = 1024
"""A message that fits is one send, its length before it."""

_LENGTH_BYTES = 8
_MAX_BYTES = 2**30


class RankChannel:
    """One rank's connection to the others of its island; ranks count in the island."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()

    @property
    def is_leader(self) -> bool:
        return self.rank == LEADER

    @property
    def others(self) -> list[int]:
        """All ranks except this one."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def send_message(self, to: int, message: Message) -> None:
        """Send a message to a rank, which has to receive it."""
        data = json.dumps(message).encode()
        head = np.zeros(_HEAD_BYTES, np.uint8)
        fits = min(len(data), _HEAD_BYTES - _LENGTH_BYTES)
        head[:_LENGTH_BYTES].view(np.int64)[0] = len(data)
        head[_LENGTH_BYTES : _LENGTH_BYTES + fits] = np.frombuffer(
            data[:fits], np.uint8
        )
        self._send(to, head, _MESSAGE_TAG)
        if len(data) > fits:
            self._send(to, np.frombuffer(data[fits:], np.uint8).copy(), _MESSAGE_TAG)

    def send_to_all(self, message: Message) -> None:
        """Send a message to all others."""
        for rank in self.others:
            self.send_message(rank, message)

    def send_to_living(self, message: Message) -> None:
        """Send a message to all others that have not ended: they need none."""
        for rank in self.others:
            with suppress(RemoteError):
                self.send_message(rank, message)

    def receive_message(self, source: int, *, within_s: float | None = None) -> Message:
        """Return the next message of a rank.

        Raises:
            RemoteError: it has ended, or has sent nothing for the channel's timeout.
        """
        head = np.empty(_HEAD_BYTES, np.uint8)
        self._receive(source, head, _MESSAGE_TAG, within_s=within_s)
        length = int(head[:_LENGTH_BYTES].view(np.int64)[0])
        data = head[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes()
        if not 0 <= length <= _MAX_BYTES:
            raise RemoteError(f"Rank {source} of this island sent {length} bytes.")
        if length > len(data):
            rest = np.empty(length - len(data), np.uint8)
            self._receive(source, rest, _MESSAGE_TAG)
            data += rest.tobytes()
        message: Message = json.loads(data)
        return message

    def send_vector(self, to: int, values: np.ndarray) -> None:
        """Send a vector whose length the other rank knows."""
        self._send(to, values, _VECTOR_TAG)

    def receive_vector(self, source: int, out: np.ndarray) -> None:
        """Receive a vector."""
        self._receive(source, out, _VECTOR_TAG)

    def exchange_vectors(
        self,
        outgoing: Sequence[tuple[int, np.ndarray]],
        incoming: Sequence[tuple[int, np.ndarray]],
    ) -> None:
        """Send vectors to some ranks while receiving others from some."""
        with self._translated_errors("another rank"):
            works = [
                self._group.recv([torch.from_numpy(out)], rank, _VECTOR_TAG)
                for rank, out in incoming
            ]
            works += [
                self._group.send([torch.from_numpy(values)], rank, _VECTOR_TAG)
                for rank, values in outgoing
            ]
            for work in works:
                work.wait()

    def broadcast_vector(self, values: np.ndarray) -> None:
        """Overwrite `values` on all ranks with the leader's."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = LEADER, 0
        with self._translated_errors("a rank"):
            self._group.broadcast([torch.from_numpy(values)], options).wait()

    def _send(self, to: int, values: np.ndarray, tag: int) -> None:
        with self._translated_errors(f"rank {to}"):
            self._group.send([torch.from_numpy(values)], to, tag).wait()

    def _receive(
        self, source: int, out: np.ndarray, tag: int, *, within_s: float | None = None
    ) -> None:
        with self._translated_errors(f"rank {source}"):
            work = self._group.recv([torch.from_numpy(out)], source, tag)
            if within_s is None:
                work.wait()
            else:
                work.wait(timedelta(seconds=within_s))

    @contextmanager
    def _translated_errors(self, peer: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as exc:
            fact = str(exc).partition("] ")[2] or str(exc)
            raise RemoteError(
                f"{peer[0].upper()}{peer[1:]} of this island, of {self.size}, does not "
                f"answer rank {self.rank}: {fact.partition('. ')[0]}. Start all ranks "
                "of the island again; the log of the one that ended has the reason."
            ) from exc


def open_channels(
    ranks: Sequence[int], timeout: timedelta, count: int
) -> list[RankChannel]:
    """Return channels among some ranks of the world. All of them call this together.

    They stay open until torch.distributed is left: the next group of the same ranks
    would get the name of one that was closed, and connect to its old addresses.
    """
    return [
        RankChannel(
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


class CollectiveCalls:
    """The collective calls of all training threads, at the leader."""

    def __init__(self, channel: RankChannel) -> None:
        self.channel = channel
        self._lock = threading.Lock()
        self._is_open = False
        self.num_orders = 0
        """Orders so far: background orders may have to wait for them."""

    @contextmanager
    def collective_call(
        self,
        call: str,
        steps: int,
        conclusion: Callable[[], Message],
        *,
        within_s: float | None = None,
    ) -> Iterator[list[Message]]:
        """Wait for all ranks to enter a call; release them with its conclusion.

        Yields the message of each of the others.

        Raises:
            UsageError: a rank has entered another call, or after another step.
            RemoteError: a rank has ended.
        """
        try:
            messages = [
                self.channel.receive_message(r, within_s=within_s)
                for r in self.channel.others
            ]
            self._is_open = True
            self._require_same(messages, call, steps)
            yield messages
            self._close()
        except BaseException as exc:
            self._release({"do": "fail", **to_message(exc, LEADER)})
            raise
        self._release({"do": "resume", **conclusion()})

    def order(self, order: Message) -> None:
        """Send an order to every rank in the call; this one executes it afterwards."""
        with self._lock:
            self.channel.send_to_all(order)
            self.num_orders += 1

    def send_keepalive(self) -> None:
        """Send a keepalive to the ranks that wait in a call."""
        with self._lock:
            if self._is_open:
                self.channel.send_to_all({"do": "wait"})

    def _require_same(self, messages: list[Message], call: str, steps: int) -> None:
        for rank, message in zip(self.channel.others, messages, strict=True):
            if (message["call"], message["steps"]) != (call, steps):
                raise UsageError(
                    f"Rank {rank} of this island came to {message['call']} after "
                    f"{message['steps']} inner steps, and rank {LEADER} to {call} "
                    f"after {steps}. All ranks make the same calls after the same "
                    "steps."
                )

    def _close(self) -> None:
        with self._lock:
            self.channel.send_to_all({"do": "close"})
        for rank in self.channel.others:
            reply = self.channel.receive_message(rank)
            if "error" in reply:
                raise from_message(reply)

    def _release(self, message: Message) -> None:
        with self._lock:
            self._is_open = False
            self.channel.send_to_living(message)


class BackgroundOrders:
    """Orders to the background threads of all ranks, at the leader."""

    def __init__(self, channel: RankChannel) -> None:
        self.channel = channel
        self._lock = threading.Lock()

    def execute(
        self, order: Message, act: Callable[[], T], *, if_idle: bool = False
    ) -> tuple[T, list[Message]]:
        """Execute an order on all ranks, here by `act`; return their answers too.

        Raises:
            BlockingIOError: with `if_idle`, and another order is executed.
            Exception: of this rank or of another. All have finished.
        """
        if not self._lock.acquire(blocking=not if_idle):
            raise BlockingIOError("another order is executed")
        try:
            return self._execute(order, act)
        finally:
            self._lock.release()

    def _execute(self, order: Message, act: Callable[[], T]) -> tuple[T, list[Message]]:
        self.channel.send_to_all(order)
        first_error = FirstError()
        results: list[T] = []
        first_error.attempt(lambda: results.append(act()))
        if isinstance(first_error.error, RemoteError):
            raise first_error.error  # the channel is broken: no rank answers on it
        answers = [self.channel.receive_message(rank) for rank in self.channel.others]
        first_error.finish()
        for answer in answers:
            if "error" in answer:
                raise from_message(answer)
        return results[0], answers

    def notify(self, order: Message) -> None:
        """Send an order without an answer to all ranks that have not ended."""
        with self._lock:
            self.channel.send_to_living(order)


_BY_KIND = {failure.kind: failure for failure in FAILURES}
_BY_CODE = {failure.code: failure for failure in FAILURES}
_EXIT, _INTERRUPTED = "exit", "interrupted"


def to_message(error: BaseException, rank: int) -> Message:
    """Return the message to other ranks about an error of rank `rank`."""
    failure = _BY_KIND.get(type(error)) if isinstance(error, Exception) else None
    if failure is not None:
        fields = {"error": failure.code, "message": str(error)}
        if failure.extra:
            fields[failure.extra] = vars(error)[failure.extra]
        return fields
    if isinstance(error, SystemExit):
        return {"error": _EXIT, "message": str(error.code or 0)}
    if not isinstance(error, Exception):
        return {"error": _INTERRUPTED, "message": f"Rank {rank} was interrupted."}
    message = f"Rank {rank} of this island failed: {type(error).__name__}: {error}"
    return {"error": "remote", "message": message}


def from_message(fields: Message) -> BaseException:
    """Return the error of another rank."""
    code, message = fields["error"], fields["message"]
    if code == _EXIT:
        return SystemExit(int(message))
    if code == _INTERRUPTED:
        return RunEnded(message)
    failure = _BY_CODE.get(code)
    if failure is None:
        return RemoteError(message)
    extra = {failure.extra: fields[failure.extra]} if failure.extra else {}
    return failure.kind(message, **extra)


@dataclass
class FirstError:
    """The first error of this rank, kept until the others have finished."""

    error: Exception | None = None

    def attempt(self, work: Callable[[], object]) -> None:
        """Call `work`, which no other rank waits for, unless an error is stored."""
        if self.error is None:
            try:
                work()
            except Exception as exc:  # the leader sends it to all ranks at the end
                self.error = exc

    def finish(self) -> None:
        """Raise the stored error, if there is one."""
        if self.error is not None:
            raise self.error
