"""A round is closed by objects that were read just now, however slow requests are."""

from __future__ import annotations

from atoll.exchange.bucket import keys
from atoll.testing.fixtures import update_of
from atoll.wire import Verdict
from tests.exchange.bucket.test_attacks import Beach, once


def test_who_waited_long_for_what_operators_say_looks_at_the_round_again() -> None:
    """What was published meanwhile is in the roster."""
    beach = Beach(start_islands=2)
    a, store, joined = beach.join("a")
    b, _, b_joined = beach.join("b")
    late = update_of(b, b_joined, 1.0)
    a.publish(update_of(a, joined, 3.0))
    beach.time.sleep(3000.0)  # nobody waits for the other any more

    def publishes() -> None:
        b._publisher.put(late)
        beach.time.sleep(60.0)  # the store did not answer for so long

    store.before = once("get", keys.CONTROL, publishes)
    a._closer.close_if_due(0)

    assert beach.roster(1) == {"a": Verdict.COUNTED, "b": Verdict.COUNTED}
