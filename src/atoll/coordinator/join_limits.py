"""Rate limit of join requests per address: every new incarnation is a durable record.

The run has a limit of its own, for all addresses together, in `protocol.presence`. This
one is lower, so that one address does not use up what the others need.
"""

from __future__ import annotations

import threading

from atoll.errors import Unreachable
from atoll.protocol.budget import Budget

BURST = 256
"""Islands that start at once behind one address, each asking a few times."""

PER_S = 1.0
MAX_ADDRESSES = 4096
"""Addresses that are remembered; a forgotten one starts with a full budget."""

_FULL = Budget.full(BURST, per_s=PER_S)


class JoinLimits:
    """The budgets of addresses. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._budgets: dict[str, Budget] = {}

    def __len__(self) -> int:
        """Return how many addresses are remembered."""
        return len(self._budgets)

    def require(self, address: str, *, now_s: float) -> None:
        """Count one join request of an address.

        Raises:
            Unreachable: it has asked too often: ask again later.
        """
        with self._lock:
            # Taken out and put back, so that the first of the table is the oldest.
            before = self._budgets.pop(address, _FULL)
            after = before.spent(now_s)
            self._budgets[address] = after or before
            if len(self._budgets) > MAX_ADDRESSES:
                del self._budgets[next(iter(self._budgets))]
        if after is None:
            raise Unreachable(
                f"{address} has asked to join more than {BURST} times at once, and "
                f"then more than {PER_S:g} times per second. Ask again in a moment."
            )
