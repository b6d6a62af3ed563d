"""Owns a run's settings, membership, rounds and weights, and makes them durable.

Does not know how calls arrive: a server and the simulator both drive it.
Start reading at `service.Service`, then `questions` and `restore`.
"""

from atoll.coordinator.questions import Questions
from atoll.coordinator.service import Service

__all__ = ["Questions", "Service"]
