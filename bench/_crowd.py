"""Many islands in one thread: a connection each, and whoever is answered goes on.

An island publishes, asks what its round came to until there is an answer, and goes on
to the next round. What it says is up to a `Talk`: a coordinator's calls, or another
stack's.
"""

from __future__ import annotations

import re
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

HEAD_END = b"\r\n\r\n"
LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
READ_BYTES = 2**18
SILENT_S = 60.0
"""Nothing moves for so long only if something is wrong."""


@dataclass(frozen=True)
class Heard:
    """One reply."""

    status: int
    head: bytes
    body: bytes


class Talk(Protocol):
    """What islands say. `Crowd` is the only caller."""

    def publish(self, number: int, round: int) -> bytes:
        """Return the request by which an island brings its update."""
        ...

    def ask(self, number: int, round: int) -> bytes:
        """Return the request by which it asks for the outcome."""
        ...

    def is_outcome(self, heard: Heard, round: int) -> bool:
        """Return whether a reply to `ask` is the outcome: else it is asked again."""
        ...


@dataclass
class Island:
    """One connection, and where its island is."""

    number: int
    sock: socket.socket
    round: int = 0
    is_asking: bool = False
    unread: bytes = b""

    def say(self, request: bytes) -> None:
        """Send a request: it fits what the system holds for a connection."""
        self.sock.sendall(request)

    def hear(self) -> Iterator[Heard]:
        """Yield what has been answered in full."""
        data = self.sock.recv(READ_BYTES)
        assert data, f"island {self.number} was hung up on"
        self.unread += data
        while (end := self.unread.find(HEAD_END)) >= 0:
            head = self.unread[:end]
            length = LENGTH.search(head)
            size = end + len(HEAD_END) + (int(length[1]) if length else 0)
            if len(self.unread) < size:
                return
            body = self.unread[end + len(HEAD_END) : size]
            self.unread = self.unread[size:]
            yield Heard(int(head[9:12]), head, body)


class Crowd:
    """So many islands at one address. A context manager."""

    def __init__(self, address: tuple[str, int], count: int, talk: Talk) -> None:
        self._address, self._talk = address, talk
        self._poll = select.epoll()
        self._by_handle: dict[int, Island] = {}
        self._stack = ExitStack()
        self._count = count
        self.asked = 0
        """Questions so far: one that waits for long is asked again."""

    def __enter__(self) -> Crowd:
        return self

    def _connect(self, number: int) -> Island:
        """Connect an island that speaks at once: without a token few may wait."""
        sock = socket.create_connection(self._address, timeout=SILENT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stack.enter_context(sock)
        island = self._by_handle[sock.fileno()] = Island(number, sock)
        self._poll.register(sock, select.EPOLLIN)
        return island

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
        self._poll.close()

    def train(self, first: int, last: int) -> list[float]:
        """Go through some rounds; return when everybody had each outcome."""
        ends: list[float] = []
        left = dict.fromkeys(range(first, last + 1), self._count)
        known = {island.number: island for island in self._by_handle.values()}
        for number in range(self._count):
            self._publish(known.get(number) or self._connect(number), first)
        while left:
            ready = self._poll.poll(SILENT_S)
            assert ready, f"nobody was answered for {SILENT_S:g} s"
            for handle, _ in ready:
                island = self._by_handle[handle]
                for heard in island.hear():
                    if self._goes_on(island, heard):
                        self._finish(island, left, ends)
        return ends

    def _goes_on(self, island: Island, heard: Heard) -> bool:
        """Return whether an island has its outcome; else it asks."""
        assert heard.status in (200, 204), heard
        if island.is_asking and self._talk.is_outcome(heard, island.round):
            return True
        island.is_asking = True
        self.asked += 1
        island.say(self._talk.ask(island.number, island.round))
        return False

    def _finish(self, island: Island, left: dict[int, int], ends: list[float]) -> None:
        left[island.round] -= 1
        if not left[island.round]:
            del left[island.round]
            ends.append(time.monotonic())
        if left and island.round < max(left):
            self._publish(island, island.round + 1)

    def _publish(self, island: Island, round: int) -> None:
        island.round, island.is_asking = round, False
        island.say(self._talk.publish(island.number, round))
