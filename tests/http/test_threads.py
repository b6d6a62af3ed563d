"""What is urgent does not wait for what is not."""

from __future__ import annotations

import threading
import time
from functools import partial

from atoll.http.threads import ThreadPool


def test_the_urgent_goes_before_the_usual() -> None:
    """Among themselves they keep their order."""
    faults: list[Exception] = []
    threads = ThreadPool("test", 1, on_error=faults.append)
    begun, goes_on = threading.Event(), threading.Event()
    order: list[str] = []

    def hold() -> None:
        begun.set()
        goes_on.wait(10.0)

    threads.submit(hold)
    threads.start()
    assert begun.wait(10.0)
    for name in ("usual 1", "urgent 1", "usual 2", "urgent 2"):
        note = partial(order.append, name)
        threads.submit(note, is_urgent=name.startswith("urgent"))
    threads.end()
    goes_on.set()
    threads.join(time.monotonic() + 10.0)

    assert order == ["urgent 1", "urgent 2", "usual 1", "usual 2"]
    assert faults == []
