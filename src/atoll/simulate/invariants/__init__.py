"""Invariants of every run in virtual time, and their checks after every event.

Start reading at `claims.ALL`, then `watch.InvariantWatch`.
"""

from atoll.simulate.invariants.claims import ALL, Invariant, Violation
from atoll.simulate.invariants.watch import InvariantWatch

__all__ = ["ALL", "Invariant", "InvariantWatch", "Violation"]
