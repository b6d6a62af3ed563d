"""How long heartbeats take, seen from a process that does nothing else.

Reads requests in hex, one a line, sends them one after the other, and prints how long
each took when its standard input ends.

    python bench/_prober.py PORT REQUESTS_FILE
"""

from __future__ import annotations

import itertools
import json
import socket
import sys
import threading
import time
from pathlib import Path

from _crowd import Island

PAUSE_S = 0.02


def main() -> None:
    """Ask until nobody listens any more."""
    port, file = sys.argv[1:]
    requests = [bytes.fromhex(line) for line in Path(file).read_text().split()]
    ended = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    took = []
    with socket.create_connection(("127.0.0.1", int(port))) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        island = Island(0, sock)
        print("ready", flush=True)
        for request in itertools.cycle(requests):
            begun_s = time.monotonic()
            island.say(request)
            while not (heard := list(island.hear())):
                pass
            assert heard[0].status == 200, heard
            took.append(time.monotonic() - begun_s)
            if ended.wait(PAUSE_S):
                break
    print(json.dumps(took), flush=True)


if __name__ == "__main__":
    main()
