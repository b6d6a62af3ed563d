"""Rounds on the standard library: a thread for each connection, and nothing durable.

An update is added to the round's sum, whoever asks waits on a condition, and the last
update wakes everybody. It prints its port, and serves until its standard input ends.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

BACKLOG = 1024


class Rounds:
    """Sums, and who waits for them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._sums: dict[int, np.ndarray] = {}
        self._came: dict[int, int] = defaultdict(int)
        self._changed = threading.Condition()

    def add(self, round: int, values: np.ndarray) -> None:
        """Take an update in."""
        with self._changed:
            self._sums[round] = self._sums.get(round, np.float32(0)) + values
            self._came[round] += 1
            if self._came[round] == self._count:
                self._changed.notify_all()

    def mean(self, round: int) -> bytes:
        """Return the mean of all updates, when they are here."""
        with self._changed:
            self._changed.wait_for(lambda: self._came[round] == self._count)
            mean: np.ndarray = self._sums[round] / self._count
            return mean.tobytes()


def handling(rounds: Rounds) -> type[BaseHTTPRequestHandler]:
    """Return what answers requests."""

    class Requests(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_PUT(self) -> None:
            rounds.add(int(self.path[1:]), np.frombuffer(self._body(), np.float32))
            self._answer(b"")

        def do_POST(self) -> None:
            self._body()
            self._answer(b"{}")

        def do_GET(self) -> None:
            self._answer(rounds.mean(int(self.path[1:])))

        def _body(self) -> bytes:
            return self.rfile.read(int(self.headers["content-length"]))

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *said: object) -> None:
            pass

    return Requests


class Door(ThreadingHTTPServer):
    """The standard one, with room for a crowd at the door."""

    request_queue_size = BACKLOG
    daemon_threads = True


def main() -> None:
    """Serve rounds of as many islands as the first argument says."""
    door = Door(("127.0.0.1", 0), handling(Rounds(int(sys.argv[1]))))
    threading.Thread(target=door.serve_forever, daemon=True).start()
    print(door.server_address[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
