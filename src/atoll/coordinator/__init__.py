"""Owns a run's settings, membership, rounds and weights, and makes them durable.

Does not know the training loop. `service`, `threads.LongPolls` and `restore` do not
know HTTP either: the simulator drives them too, and `app.Coordinator` serves them.
Start reading at `service.Service`, then `threads` and `routes`.
"""

from atoll.coordinator.service import Service
from atoll.coordinator.threads import LongPolls

__all__ = ["LongPolls", "Service"]
