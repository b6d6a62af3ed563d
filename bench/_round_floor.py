"""The floor of `round.py`: what a round cannot do without, on buffers that are warm.

    _round_floor.py hub FOLDER ISLANDS ELEMENTS UP DOWN
    _round_floor.py island PORT ELEMENTS UP DOWN

The wire bytes of every island over one raw socket each, all at once, up and down; the
codec passes of the islands, all at once, and of the mean; write and fsync of the agreed
bytes. No protocol, no check, no outer step.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
from _http_sides import receive, send
from _round_crew import attend

from atoll.weights.layout import blocks
from atoll.wire import codec

STEPS = ("encode", "up", "reduce", "write", "down", "decode")
"""One after the other, as a round has them."""

HUB_STEPS = ("up", "reduce", "write", "down")
ISLAND_STEPS = ("encode", "up", "down", "decode")


def main() -> None:
    """Be what the first argument says."""
    what, *rest = sys.argv[1:]
    roles: dict[str, Callable[..., None]] = {"hub": serve, "island": take_part}
    roles[what](*rest)


def serve(folder: str, islands: str, elements: str, up: str, down: str) -> None:
    """Take all bodies, average them, and send the mean to all."""
    size, up_codec, down_codec = int(elements), codec(up), codec(down)
    bodies = [
        np.zeros(up_codec.body_bytes(size), np.uint8) for _ in range(int(islands))
    ]
    agreed = np.zeros(down_codec.body_bytes(size), np.uint8)
    mean, door = np.zeros(2**16, np.float32), socket.create_server(("127.0.0.1", 0))
    file = Path(folder) / "agreed"
    socks: list[socket.socket] = []

    def accept() -> None:
        socks.extend(door.accept()[0] for _ in bodies)

    def reduce() -> None:
        for block in blocks(size):
            here = mean[: block.stop - block.start]
            here[:] = 0.0
            for body in bodies:
                up_codec.decode_add(body, here, first=block.start)
            first = down_codec.offset(block.start)
            part = agreed[first : first + down_codec.body_bytes(len(here))]
            down_codec.encode(here, part, first=block.start)

    def write() -> None:
        with file.open("wb", buffering=0) as out:
            view = agreed.data
            while view:
                view = view[out.write(view) :]
            os.fsync(out.fileno())

    attend(
        {
            "accept": accept,
            "up": lambda: at_once(receive, socks, bodies),
            "reduce": reduce,
            "write": write,
            "down": lambda: at_once(send, socks, [agreed] * len(socks)),
            "forget": lambda: file.unlink(),
        },
        port=door.getsockname()[1],
    )


def at_once(
    move: Callable[[socket.socket, memoryview], None],
    socks: list[socket.socket],
    bodies: list[np.ndarray],
) -> None:
    """Move all bodies, one thread for each."""
    threads = [
        threading.Thread(target=move, args=(sock, body.data))
        for sock, body in zip(socks, bodies, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def take_part(port: str, elements: str, up: str, down: str) -> None:
    """Send one body, and take the mean."""
    size, up_codec, down_codec = int(elements), codec(up), codec(down)
    some = np.random.default_rng(0).standard_normal(min(size, 2**20), np.float32)
    values = np.resize(some * np.float32(1e-3), size)
    body = np.zeros(up_codec.body_bytes(size), np.uint8)
    agreed = np.zeros(down_codec.body_bytes(size), np.uint8)
    sock = socket.create_connection(("127.0.0.1", int(port)))
    attend(
        {
            "encode": lambda: up_codec.encode(values, body),
            "up": lambda: send(sock, body.data),
            "down": lambda: receive(sock, agreed.data),
            "decode": lambda: down_codec.decode(agreed, values),
        }
    )


if __name__ == "__main__":
    main()
