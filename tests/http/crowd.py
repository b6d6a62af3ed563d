"""A listener in a process of its own, which tells what it costs.

Run as a script: it prints its port, and serves until its standard input ends.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from atoll.http import DeferredResponse, Listener, Request, Response, as_json
from atoll.runtime import SystemClock

waiting: list[DeferredResponse] = []


def handle(request: Request) -> Response | DeferredResponse:
    """Promise, keep all promises, or tell the cost."""
    if request.segments == ("wait",):
        later = DeferredResponse(wait_s=600.0, default=lambda: Response(status=204))
        waiting.append(later)
        return later
    if request.segments == ("answer",):
        for later in waiting:
            later.set(Response(body=b"now"))
    return as_json(
        {
            "threads": threading.active_count(),
            "rss_bytes": rss_bytes(),
            "waiting": len(waiting),
        }
    )


def rss_bytes() -> int:
    """Return what of this process is in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Serve until there is nobody to serve for."""
    listener = Listener(handle, host="127.0.0.1", port=0, clock=SystemClock())
    listener.start()
    sys.stdout.write(f"{listener.address[1]}\n")
    sys.stdout.flush()
    sys.stdin.read()
    listener.close(grace_s=0.0)


if __name__ == "__main__":
    main()
