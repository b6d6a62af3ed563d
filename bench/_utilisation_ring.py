"""One side of data parallel in bf16: a process of `utilisation.py`.

    python bench/_utilisation_ring.py --elements 2000000 --step-s 0.1 --steps 60
    python bench/_utilisation_ring.py ... --port 4711

The first listens and says where; the second connects there, through the link. After
every step of a fixed time both reduce their gradients as a ring of two does: each sends
one half and gets the other's, adds it, sends the sum and gets the other sum.
"""

from __future__ import annotations

import argparse
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import torch


class Ring:
    """The connection of two sides, each of which sends while it receives."""

    def __init__(self, sock: socket.socket, *, is_first: bool) -> None:
        self._sock, self._is_first = sock, is_first
        self._sender = ThreadPoolExecutor(1)

    def all_reduce(self, gradients: torch.Tensor) -> None:
        """Put the sum over both sides into `gradients`."""
        halves = list(gradients.view(2, -1))
        mine, others = halves if self._is_first else reversed(halves)
        arrived = torch.empty_like(mine)
        self._swap(others, arrived)
        mine += arrived
        self._swap(mine, others)

    def _swap(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        sent = self._sender.submit(self._sock.sendall, as_bytes(ours))
        view = as_bytes(theirs)
        while view:
            view = view[self._sock.recv_into(view) :]
        sent.result()

    def close(self) -> None:
        self._sender.shutdown()
        self._sock.close()


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a tensor."""
    return memoryview(tensor.view(torch.uint8).numpy())


def connected(port: int | None) -> tuple[socket.socket, bool]:
    """Return the connection, and whether this is the side that listens."""
    if port is not None:
        return socket.create_connection(("127.0.0.1", port)), False
    with socket.create_server(("127.0.0.1", 0)) as door:
        print(door.getsockname()[1], flush=True)
        sock, _ = door.accept()
        return sock, True


def train(ring: Ring, elements: int, step_s: float, steps: int) -> dict[str, float]:
    """Return how long so many steps took, and for how much of that they computed."""
    gradients = torch.empty(elements, dtype=torch.bfloat16)
    begun_s, compute_s = time.monotonic(), 0.0
    for _ in range(steps):
        step_begun_s = time.monotonic()
        gradients.fill_(2.0**-20)
        time.sleep(max(0.0, step_begun_s + step_s - time.monotonic()))
        compute_s += time.monotonic() - step_begun_s
        ring.all_reduce(gradients)
        assert gradients[0] == gradients[-1] == 2.0**-19
    return {"seconds": time.monotonic() - begun_s, "compute_s": compute_s}


def main() -> None:
    """Train, and print how long it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--port", type=int)
    given = parser.parse_args()
    torch.set_num_threads(1)
    sock, is_first = connected(given.port)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    ring = Ring(sock, is_first=is_first)
    ring.all_reduce(torch.zeros(given.elements, dtype=torch.bfloat16))  # both are here
    took = train(ring, given.elements, given.step_s, given.steps)
    ring.close()
    print(json.dumps(took))


if __name__ == "__main__":
    main()
