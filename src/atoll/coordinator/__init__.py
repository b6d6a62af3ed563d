"""Owns a run's settings, membership, rounds and weights, and makes them durable.

Does not know who trains. `service`, `questions` and `restore` do not know how calls
arrive either: the simulator drives them too, and `app.Coordinator` serves them.
Start reading at `service.Service`, then `office` and `routes`.
"""

from atoll.coordinator.questions import Questions
from atoll.coordinator.service import Service

__all__ = ["Questions", "Service"]
