"""What must hold in every run in virtual time, and who watches that it does.

Start reading at `claims.ALL`, then `watch.Watch`.
"""

from atoll.simulate.invariants.claims import ALL, Invariant, Violation
from atoll.simulate.invariants.watch import InvariantWatch

__all__ = ["ALL", "Invariant", "InvariantWatch", "Violation"]
