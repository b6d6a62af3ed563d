"""Messages: each has its fate, and every copy is accounted for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import Refused, Unreachable, UsageError
from atoll.simulate import Latency, LinkConditions, Network, ReplyFunction, SimWorld
from atoll.simulate.network import MessageCounts

EXACT = Latency(base_s=0.25, jitter_s=0.0)


@dataclass
class Talk:
    """Two processes, `a` that asks and `b` that echoes, and what each of them saw."""

    world: SimWorld
    heard: list[tuple[float, object]] = field(default_factory=list)
    answers: list[tuple[float, object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.a, self.b = self.world.add("a"), self.world.add("b")
        self.b.start(lambda: self.world.network.listen(self.b, self.echo))

    def echo(self, request: object, reply: ReplyFunction) -> None:
        self.heard.append((self.world.scheduler.now_s, request))
        reply(request, size_bytes=100)

    def call(self, count: int, *, every_s: float = 0.0, timeout_s: float = 2.0) -> None:
        """Let `a` call `b` with 0, 1, 2, ..., one call after the other."""
        scheduler = self.world.scheduler

        def program() -> None:
            for number in range(count):
                try:
                    answer = self.world.network.call(
                        self.a, "b", number, size_bytes=100, timeout_s=timeout_s
                    )
                except Exception as exc:
                    answer = exc
                self.answers.append((scheduler.now_s, answer))
                scheduler.sleep(every_s)

        self.a.start(program)

    def ask(self, count: int, *, every_s: float = 0.0) -> None:
        """Let `a` send 0, 1, 2, ... without waiting for answers."""

        def program() -> None:
            for number in range(count):
                self.world.network.ask(self.a, "b", number, size_bytes=100)
                self.world.scheduler.sleep(every_s)

        self.a.start(program)

    def run(self, until_s: float = 1e6) -> list[object]:
        self.world.scheduler.run(until_s)
        return [request for _, request in self.heard]


def left_over(counts: MessageCounts) -> int:
    """Return how many copies of messages are unaccounted for."""
    ended = counts.delivered + counts.lost + counts.cut + counts.undelivered
    return counts.sent + counts.duplicated - ended - counts.in_flight


def test_a_call_takes_two_latencies() -> None:
    """A request and its answer take 0.25 seconds each."""
    with SimWorld(0, latency=EXACT) as world:
        talk = Talk(world)
        talk.call(2)
        talk.run()

    assert talk.heard == [(0.25, 0), (0.75, 1)]
    assert talk.answers == [(0.5, 0), (1.0, 1)]


def test_an_answer_may_come_much_later() -> None:
    """Who is asked may keep the reply and answer from a timer of its own."""
    with SimWorld(0, latency=EXACT) as world:
        talk = Talk(world)

        def answer_later(request: object, reply: ReplyFunction) -> None:
            talk.b.after(1.0, lambda: reply("later"))

        world.network.listen(talk.b, answer_later)
        talk.b.crash()
        talk.b.start(lambda: world.network.listen(talk.b, answer_later))
        talk.call(1)
        talk.run()

    assert talk.answers == [(1.5, "later")]  # 0.25 there, 1.0 waiting, 0.25 back


def test_an_exception_is_raised_where_it_arrives() -> None:
    """An answer that is an exception is the caller's."""
    with SimWorld(0, latency=EXACT) as world:
        talk = Talk(world)
        refusal = Refused("not you")
        talk.b.crash()
        talk.b.start(
            lambda: world.network.listen(talk.b, lambda _, reply: reply(refusal))
        )
        talk.call(1)
        talk.run()

    assert talk.answers == [(0.5, refusal)]


def test_no_answer_is_unreachable_after_the_timeout() -> None:
    """A lost request, a lost answer and a dead peer look the same to who asks."""
    for link in ("a->b", "b->a", "b"):
        with SimWorld(0, latency=EXACT) as world:
            talk = Talk(world)
            if link == "b":
                talk.b.crash()
            else:
                world.network.expose(LinkConditions(link=link, loss=1.0))
            talk.call(1)
            talk.run()

        [(at_s, error)] = talk.answers
        assert at_s == 2.0
        assert isinstance(error, Unreachable)
        assert "'b' did not answer 'a' within 2.0 s" in str(error)
        assert len(talk.heard) == (link == "b->a")


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    loss=st.sampled_from([0.0, 0.3, 1.0]),
    duplicate=st.sampled_from([0.0, 0.4, 1.0]),
    spread_s=st.sampled_from([0.0, 3.0]),
    cut=st.booleans(),
    until_s=st.sampled_from([5.0, 1e6]),
)
def test_every_copy_of_every_message_is_accounted_for(
    seed: int,
    loss: float,
    duplicate: float,
    spread_s: float,
    cut: bool,
    until_s: float,
) -> None:
    """What is sent or duplicated is delivered, lost, cut, unheard or in flight."""
    with SimWorld(seed) as world:
        talk, network = Talk(world), world.network
        network.expose(
            LinkConditions(link="*", loss=loss, duplicate=duplicate, spread_s=spread_s)
        )
        if cut:
            world.scheduler.at(2.0, lambda: network.cut([["a"]]))
        world.scheduler.at(4.0, talk.b.crash)
        talk.ask(40, every_s=0.2)
        world.scheduler.after_event = lambda: _assert_accounted(network)
        talk.run(until_s)

        assert left_over(network.counts) == 0
        assert network.counts.bytes_in_flight == 100 * network.counts.in_flight


def _assert_accounted(network: Network) -> None:
    assert left_over(network.counts) == 0
    assert network.counts.in_flight >= 0


def test_a_duplicate_is_heard_twice_and_answered_once() -> None:
    """Each copy reaches the listener; who asked takes the first answer."""
    with SimWorld(0, latency=EXACT) as world:
        talk = Talk(world)
        world.network.expose(LinkConditions(link="a->b", duplicate=1.0))
        talk.call(1)

        assert talk.run() == [0, 0]
    assert talk.answers == [(0.5, 0)]


def test_spread_lets_messages_overtake() -> None:
    """With a spread well above their distance, messages arrive out of order."""
    with SimWorld(0, latency=EXACT) as world:
        talk = Talk(world)
        world.network.expose(LinkConditions(link="a->b", spread_s=10.0))
        talk.ask(20, every_s=0.1)
        heard = talk.run()

    assert sorted(heard, key=str) == sorted(range(20), key=str)
    assert heard != list(range(20))


def test_delays_add_up() -> None:
    """Two delays of 1 and 2 seconds on a latency of 0.25 make 3.25."""
    with SimWorld(0, latency=EXACT) as world:
        talk = Talk(world)
        world.network.expose(LinkConditions(link="a", delay_s=1.0))
        world.network.expose(LinkConditions(link="a->b", delay_s=2.0))
        talk.ask(1)
        talk.run()

    assert talk.heard == [(3.25, 0)]


def test_a_throttled_link_sends_in_turn() -> None:
    """Messages of 100 bytes at 50 bytes per second leave 2 seconds apart."""
    with SimWorld(0, latency=EXACT) as world:
        talk = Talk(world)
        world.network.expose(LinkConditions(link="a->b", bytes_per_s=50.0))
        talk.ask(3)
        talk.run()

    assert [at_s for at_s, _ in talk.heard] == [2.25, 4.25, 6.25]


def test_weather_is_over_when_it_clears() -> None:
    """A message sent after the loss has ended arrives."""
    with SimWorld(0, latency=EXACT) as world:
        talk, run_storms = Talk(world), LinkConditions(link="*", loss=1.0)
        world.network.expose(run_storms)
        world.scheduler.at(1.5, lambda: world.network.clear(run_storms))
        talk.ask(4, every_s=1.0)

        assert talk.run() == [2, 3]


def test_a_partition_cuts_what_is_sent_and_what_is_due() -> None:
    """From 1 s to 3 s nothing passes: neither sent in it nor arriving in it."""
    with SimWorld(0, latency=EXACT) as world:
        talk = Talk(world)
        cuts = []
        world.scheduler.at(1.0, lambda: cuts.append(world.network.cut([["a"], ["b"]])))
        world.scheduler.at(3.0, lambda: world.network.heal(cuts[0]))
        talk.ask(9, every_s=0.5)  # sent at 0.0, 0.5, ..., 4.0; due a quarter later
        heard = talk.run()

    # Those of 1.0 to 2.5 are sent within; so is due the answer to that of 0.5, which
    # was heard at 0.75: four and one.
    assert heard == [0, 1, 6, 7, 8]
    assert world.network.counts.cut == 5


@given(st.lists(st.lists(st.sampled_from("abcdef"), max_size=3), max_size=3))
def test_partitions_part_groups_and_the_rest(groups: list[list[str]]) -> None:
    """Two are parted exactly when their groups differ; the unnamed are one group."""
    with SimWorld(0) as world:
        cut = world.network.cut(groups)

    def group(name: str) -> int:
        return max((at for at, each in enumerate(groups) if name in each), default=-1)

    for first in "abcdef":
        for second in "abcdef":
            assert cut.separates(first, second) == (group(first) != group(second))


@pytest.mark.parametrize(
    ("link", "touched"),
    [
        ("*", {"a->b", "b->a", "b->c"}),
        ("a", {"a->b", "b->a"}),
        ("a->b", {"a->b"}),
        ("c", {"b->c"}),
    ],
)
def test_a_link_is_named_by_one_end_or_two(link: str, touched: set[str]) -> None:
    """`a->b` is a direction, `a` all of a's links, `*` all there are."""
    ends = [("a", "b"), ("b", "a"), ("b", "c")]
    run_storms = LinkConditions(link=link)

    assert {f"{s}->{d}" for s, d in ends if run_storms.touches(s, d)} == touched


def test_corruption_needs_somebody_who_knows_how() -> None:
    """A network changes messages only as its world says, and never silently not."""
    with (
        SimWorld(0) as world,
        pytest.raises(UsageError, match=r"Give Network a corrupt"),
    ):
        world.network.expose(LinkConditions(link="a", corrupt=1.0))

    with SimWorld(0, corrupter=lambda request, rng: "spoilt") as world:
        talk = Talk(world)
        world.network.expose(LinkConditions(link="a->b", corrupt=1.0))
        talk.ask(2)

        assert talk.run() == ["spoilt", "spoilt"]


def test_traffic_of_one_link_does_not_change_another() -> None:
    """The fate of a's messages is the same, however much c sends."""

    def fates(chatter: int) -> list[tuple[float, object]]:
        with SimWorld(7) as world:
            talk, other = Talk(world), world.add("c")
            world.network.expose(LinkConditions(link="*", loss=0.5))
            talk.ask(30, every_s=0.1)

            def chat() -> None:
                for _ in range(chatter):
                    world.network.ask(other, "nobody", "hello", size_bytes=1)
                    world.scheduler.sleep(0.07)

            other.start(chat)
            talk.run()
        return talk.heard

    assert fates(0) == fates(25)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Latency(base_s=-1.0), "base_s=-1.0"),
        (lambda: Latency(jitter_s=float("nan")), "jitter_s=nan"),
        (lambda: Latency(bytes_per_s=0.0), "bytes_per_s=0.0"),
    ],
)
def test_impossible_links_are_refused(make: Callable[[], object], message: str) -> None:
    """A latency is finite and not negative, and a link carries something."""
    with pytest.raises(UsageError, match=message):
        make()
