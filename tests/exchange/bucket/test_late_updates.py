"""The last update of an island that left counts once, even if its round missed it."""

from __future__ import annotations

from atoll.errors import NoSuchObject
from atoll.exchange.bucket import keys
from atoll.protocol import Reception
from atoll.testing.fixtures import anchor_of, update_of
from atoll.wire import Verdict
from tests.exchange.bucket.test_attacks import Beach, deciding, departing, once


class Cove:
    """A run whose first round was closed by `b` while `a` left."""

    def __init__(self, *others: str) -> None:
        self.beach = Beach(deciding("b"))
        self.b, self.store, self.joined = self.beach.join("b")
        self.others = [self.beach.join(name) for name in others]
        a, _, a_joined = self.beach.join("a")
        last = departing(a, a_joined, 1.0)
        self.b.publish(update_of(self.b, self.joined, 3.0))
        self.beach.time.sleep(3000.0)  # nobody waits for the others any more

        def leaves() -> None:
            assert a.publish(last) is Reception.STAGED
            a.leave("a", 1)

        self.store.before = once("put_new", keys.roster(0, 1), leaves)
        self.b._closer.close_if_due(0)
        assert self.counted(1) == []

    def goes_on(self, first: int, last: int) -> None:
        """Let the others publish and take some rounds."""
        for number in range(first, last + 1):
            for exchange, _, joined in self.others:
                exchange.publish(update_of(exchange, joined, 3.0, round=number))
            self.b.publish(update_of(self.b, self.joined, 3.0, round=number))
            for _ in range(60):
                if self.b.outcome(0, number, wait_s=1.0) is not None:
                    break

    def counted(self, last: int) -> list[int]:
        """Return the rounds in which the one that left has counted."""
        return [
            number
            for number in range(1, last + 1)
            if self.beach.roster(number).get("a") is Verdict.COUNTED
        ]


def test_it_counts_in_the_next_round_and_only_there() -> None:
    """Everybody looks for it, and one of them puts it."""
    cove = Cove("c")
    cove.goes_on(2, 5)

    assert cove.counted(5) == [2]
    assert anchor_of(cove.b) == anchor_of(cove.others[0][0])


def test_it_is_brought_on_if_the_next_round_is_closed_without_it() -> None:
    """Who closed that one had not read the farewell."""
    cove = Cove()

    def hides(what: str, key: str) -> None:
        if what == "get" and key == keys.member("a", 1):
            raise NoSuchObject("not yet", key=key)

    cove.store.before = hides
    cove.goes_on(2, 2)
    assert cove.counted(2) == []
    cove.store.before = lambda what, key: None
    cove.beach.time.sleep(70.0)  # who was silent is read more seldom
    cove.goes_on(3, 5)

    assert cove.counted(5) == [3]


def test_a_new_life_brings_what_its_earlier_one_left() -> None:
    """Nobody else would: it stands in the open round; the new life has the next."""
    cove = Cove()
    again, _, joined = cove.beach.join("a")
    assert (joined.incarnation, joined.spoken_for) == (2, (0,))
    own = update_of(again, joined, 3.0, round=2)
    assert again.publish(own) is Reception.OTHER_STAGED
    cove.goes_on(2, 2)
    again.outcome(0, 2, wait_s=1.0)
    again.publish(update_of(again, joined, 3.0, round=3))
    cove.goes_on(3, 3)

    assert cove.counted(3) == [2, 3]
    assert anchor_of(cove.b) == -8.0  # 3, the mean of 1 and 3, and 3


def test_a_new_life_of_who_left_nothing_speaks_for_itself() -> None:
    """What has counted is not put a second time."""
    cove = Cove()
    cove.beach.time.sleep(7.0)
    cove.goes_on(2, 2)
    again, _, joined = cove.beach.join("a")
    assert joined.spoken_for == ()
    again.publish(update_of(again, joined, 3.0, round=3))
    cove.goes_on(3, 3)

    assert cove.counted(3) == [2, 3]
    assert anchor_of(cove.b) == -8.0


def test_a_farewell_names_what_a_round_has_left_out_since_it_was_staged() -> None:
    """Another fragment, or a heartbeat, took time: the roster is known by then."""
    beach = Beach(deciding("b"))
    b, store, joined = beach.join("b")
    a, _, a_joined = beach.join("a")
    last = departing(a, a_joined, 1.0)
    b.publish(update_of(b, joined, 3.0))
    beach.time.sleep(3000.0)

    def departs() -> None:
        assert a.publish(last) is Reception.STAGED

    store.before = once("put_new", keys.roster(0, 1), departs)
    b._closer.close_if_due(0)
    a._reader.read_round(0)  # as heartbeats do while another fragment is waited for
    a.leave("a", 1)
    b.publish(update_of(b, joined, 3.0, round=2))
    for _ in range(40):
        if b.outcome(0, 2, wait_s=1.0) is not None:
            break

    verdicts = [beach.roster(number).get("a") for number in (1, 2)]
    assert verdicts == [Verdict.LATE, Verdict.COUNTED]


def test_bytes_that_do_not_verify_are_left_where_they_are() -> None:
    """The run goes on without them."""
    cove = Cove()
    key = keys.update(0, 1, "a", 1)
    data = bytearray(cove.beach.store.get(key))
    data[-1] ^= 1
    cove.beach.store.put(key, [bytes(data)])
    cove.goes_on(2, 3)

    assert cove.counted(3) == []
    assert cove.beach.has_closed(3)


def test_nothing_is_asked_for_where_nothing_was_left_out() -> None:
    """A farewell whose update was listed costs no request."""
    beach = Beach(start_islands=2)
    a, _, a_joined = beach.join("a")
    b, b_store, b_joined = beach.join("b")
    a.publish(departing(a, a_joined, 1.0))
    a.leave("a", 1)
    b.publish(update_of(b, b_joined, 3.0))
    beach.time.sleep(7.0)
    assert beach.roster(1)["a"] is Verdict.COUNTED
    asked: list[str] = []
    b_store.before = lambda what, key: asked.append(key)
    b._closer._late_updates.republish(0)

    assert asked == []


def test_it_is_brought_once_for_a_round() -> None:
    """Who looks again and again at that round asks for nothing more."""
    cove = Cove()
    cove.beach.time.sleep(7.0)
    leftovers = cove.b._closer._late_updates
    asked: list[str] = []
    cove.store.before = lambda what, key: asked.append(what)
    leftovers.republish(0)
    assert "put_new" in asked
    asked.clear()
    leftovers.republish(0)

    assert asked == []


def test_an_island_may_leave_more_than_one_update() -> None:
    """Its rest stands in the next round already: then the one after that is right."""
    beach = Beach(deciding("b"))
    b, store, joined = beach.join("b")
    a, _, a_joined = beach.join("a")
    frames = [
        departing(a, a_joined, value, round=at) for at, value in ((1, 1.0), (2, 5.0))
    ]
    b.publish(update_of(b, joined, 3.0))
    beach.time.sleep(3000.0)

    def leaves() -> None:
        for frame in frames:
            assert a.publish(frame) is Reception.STAGED
        a.leave("a", 1)

    store.before = once("put_new", keys.roster(0, 1), leaves)
    b._closer.close_if_due(0)
    for number in (2, 3, 4):
        b.publish(update_of(b, joined, 3.0, round=number))
        for _ in range(40):
            if b.outcome(0, number, wait_s=1.0) is not None:
                break

    verdicts = [beach.roster(number).get("a") for number in (1, 2, 3, 4)]
    assert verdicts == [Verdict.LATE, Verdict.COUNTED, Verdict.COUNTED, None]
    assert anchor_of(b) == -12.0  # 3, the means of 5 and 3 and of 1 and 3, and 3
