"""An island as a process of its own, whose steps are sleeps. `death.py` starts three.

python bench/_island.py URL NAME STEP_S
"""

from __future__ import annotations

import sys
import time

from atoll.island import Host
from atoll.island.connection import connect
from atoll.island.environment import credentials_from_environment
from atoll.island.numpy_model import VectorView, vector_model
from atoll.island.signals import Interrupted, Termination
from atoll.protocol import JoinRequest
from atoll.runtime import SystemClock

ELEMENTS = 1000
STEP = 1e-3


def main() -> None:
    """Train until the run ends or somebody ends this process."""
    url, name, step_s = sys.argv[1:]
    clock = SystemClock()
    surroundings = credentials_from_environment()
    way = connect(url, island=name, paths=surroundings, clock=clock)
    view = VectorView(fill=1.0)
    request = JoinRequest(model=vector_model({"w": (ELEMENTS,)}), island=name)
    leaving = way.leaving()
    host = Host(way.exchange, view, request, leaving=leaving)
    way.exchange.stats = host.stats
    with Termination() as termination:
        try:
            while not host.has_ended and not termination.is_asked:
                for local in view.local:
                    local -= STEP
                time.sleep(float(step_s))  # what computing takes
                host.stepped()
        except Interrupted:
            pass
        termination.heed()
        host.leave()


if __name__ == "__main__":
    main()
