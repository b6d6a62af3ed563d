"""Messages and vectors among the ranks of an island, over a gloo group of their own.

A line is used by one thread of each rank at a time. Messages are JSON: nothing that a
rank hears is executed. A rank that ends closes its sockets, so that whoever talks to it
learns of that at once; one that stands still is given up after the line's timeout.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from atoll.errors import RemoteError

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
