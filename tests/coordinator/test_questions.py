"""Questions that stay open are bounded, and end with whoever asks them."""

from __future__ import annotations

from atoll.coordinator import Service
from atoll.coordinator.threads import LongPolls
from atoll.exchange.calls import OutcomeCall, Reply
from atoll.protocol import Heartbeat, JoinReply
from atoll.settings import RunSettings
from atoll.simulate import SimDisk
from atoll.testing.fixtures import plain_settings
from tests.coordinator.desk import join

ROUND = 5
"""Not opened yet: whoever asks for it waits."""


class Asked:
    """Collects what was answered to one question."""

    def __init__(self) -> None:
        self.replies: list[Reply | Exception] = []

    def __call__(self, reply: Reply | Exception) -> None:
        self.replies.append(reply)


def begun(settings: RunSettings | None = None) -> tuple[LongPolls, JoinReply]:
    settings = settings or plain_settings(name="run", start_islands=1)
    service = Service.create(SimDisk(), settings, run="run", now_s=0.0)
    return LongPolls(service), join(service, "a")


def ask(questions: LongPolls, joined: JoinReply | None, **options: str) -> Asked:
    beat = None
    if joined is not None:
        beat = Heartbeat(island="a", incarnation=joined.incarnation, step=0)
    asked = Asked()
    assert questions.put(OutcomeCall(0, ROUND, 2.0, beat), asked, 0.0, **options)
    return asked


def test_a_question_that_is_forgotten_is_never_answered() -> None:
    """Nothing of it is left, and forgetting it again changes nothing."""
    questions, joined = begun()
    gone, stays = ask(questions, None, ticket="gone"), ask(questions, joined)
    questions.forget("gone")
    questions.forget("gone")
    assert len(questions) == 1
    questions.settle(100.0)

    assert (len(gone.replies), len(stays.replies)) == (0, 1)
    assert len(questions) == 0


def test_a_newer_question_of_an_island_answers_the_older() -> None:
    """Questions without an island stand by themselves."""
    questions, joined = begun()
    nameless = [ask(questions, None) for _ in range(2)]
    older, newer = ask(questions, joined), ask(questions, joined)

    assert len(older.replies) == 1
    assert not newer.replies
    assert not nameless[0].replies
    assert len(questions) == 3


def test_forgetting_the_older_leaves_the_newer() -> None:
    """The connection of a question that was replaced may end later than it."""
    questions, joined = begun()
    ask(questions, joined, ticket="older")
    ask(questions, joined, ticket="newer")
    questions.forget("older")

    assert len(questions) == 1
    third = ask(questions, joined, ticket="third")
    assert len(questions) == 1
    assert not third.replies
