"""Retries: one policy, and one table of faults and of the code that repeats after them.

Every request is safe to repeat. Retries nest, the cheapest inside: each handles one
fault, and passes every other on to the one around it.

| policy | fault | repeated by |
|---|---|---|
| once | an idle connection turned out closed | `HttpClient`, on a new one |
| `BROKEN_BODY` | a connection broke within a body | `http.download`, at that byte |
| `DAMAGED_REPLY` | a reply does not verify | `HttpTransport` |
| once | the run has lost this incarnation | `CoordinatorExchange`: rejoins |
| `COORDINATOR_CALL` | no answer, or a full disk | `CoordinatorExchange` |
| `DAMAGED_CONSTANT` | a constant did not arrive whole | `CoordinatorExchange` |
| `NOT_UP` | no coordinator is up yet | `island.connection` |
| `NEW_LOCATION` | a run that has moved cannot be joined yet | `FollowingExchange` |
| `BUSY_COORDINATOR` | it commits a round, or writes a large file | `run_client` |
| `BUSY_FILE` | the coordinator writes the file first | `island.run_reader` |
| `ABSENT_OBJECT` | another rank has not put its part yet | `exchange.all_reduce` |
| `STORE_REQUEST` | a request to a store fails | `store.RetryingStore` |
| `STORE_OUTAGE` | the same, for an island that trains | `store.RetryingStore` |

A host that leaves gives up every wait after `LEAVE_S`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

from atoll.errors import AtollError, CorruptError, DiskError, NoSuchObject, Unreachable

T = TypeVar("T")

LEAVE_S = 20.0
"""How long an island that leaves waits for a run that does not answer: schedulers often
kill 30 s after SIGTERM, and a loop may take 5 s to react."""


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """The faults that are worth another attempt, and the pauses before it."""

    faults: tuple[type[Exception], ...] = (Unreachable,)
    max_tries: int | None = None
    """Most attempts, the first included; None: no limit."""

    first_s: float = 0.2
    longest_s: float = 5.0
    growth: float = 2.0
    """The first pause, the bound of a pause, and its growth per attempt."""

    is_random: bool = False
    """Whether half of each pause is random, so that islands that failed together do not
    come back together."""

    def pauses_s(self, rng: random.Random | None = None) -> Iterator[float]:
        """Yield the pauses between attempts."""
        pause_s = min(self.first_s, self.longest_s)
        for _ in count() if self.max_tries is None else range(self.max_tries - 1):
            share = (rng or random).uniform(0.5, 1.0) if self.is_random else 1.0
            yield share * pause_s
            pause_s = min(self.growth * pause_s, self.longest_s)


BROKEN_BODY = RetryPolicy(max_tries=21)
DAMAGED_REPLY = RetryPolicy(faults=(CorruptError,), max_tries=3, first_s=0.0)
COORDINATOR_CALL = RetryPolicy(faults=(DiskError, Unreachable))
DAMAGED_CONSTANT = RetryPolicy(faults=(CorruptError,), max_tries=5, first_s=0.0)
"""A restarted coordinator has lost the parts of a constant; a constant that changes
meanwhile is never accepted."""

NOT_UP_S = 60.0
NOT_UP = RetryPolicy()
"""The coordinator restarts, or starts after its islands."""

NEW_LOCATION = RetryPolicy(faults=(AtollError,), first_s=0.5)
BUSY_COORDINATOR = RetryPolicy(max_tries=180, first_s=0.5, longest_s=0.5)
"""Together longer than the commit of a round, or the wait for its islands."""

BUSY_FILE = RetryPolicy(max_tries=60, first_s=0.5, longest_s=0.5)
ABSENT_OBJECT = RetryPolicy(
    faults=(NoSuchObject,), first_s=0.02, growth=1.5, is_random=True
)
"""Ten minutes of waiting for a rank cost about 130 reads."""

STORE_REQUEST = RetryPolicy(max_tries=6, first_s=0.25, longest_s=8.0, is_random=True)
STORE_OUTAGE = RetryPolicy(max_tries=40, first_s=0.25, longest_s=8.0, is_random=True)
"""An outage of a few minutes must not end an island."""


def retried(
    act: Callable[[], T],
    policy: RetryPolicy,
    *,
    sleep: Callable[[float], None],
    rng: random.Random | None = None,
    may_retry: Callable[[Exception, float], bool] = lambda fault, pause_s: True,
    progress: Callable[[], object] = lambda: None,
) -> T:
    """Call `act` until it returns, and raise its last fault if it never does.

    Args:
        sleep: waits before another attempt, if the policy has a pause; may raise to end
            the attempts.
        may_retry: called with a fault and the next pause; False raises the fault.
        progress: attempts and pauses start over when its value has changed.
    """
    pauses_s, seen = policy.pauses_s(rng), progress()
    while True:
        try:
            return act()
        except policy.faults as exc:
            if (reached := progress()) != seen:
                pauses_s, seen = policy.pauses_s(rng), reached
            pause_s = next(pauses_s, None)
            if pause_s is None or not may_retry(exc, pause_s):
                raise
        if pause_s:
            sleep(pause_s)
