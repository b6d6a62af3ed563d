"""SIGTERM is a request first, then an interrupt; a program's own handler stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from atoll.island.signals import Interrupted, Termination


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def ask() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_first_one_asks() -> None:
    """The block continues, and afterwards SIGTERM has its default handler."""
    with Termination() as termination:
        assert not termination.is_asked
        ask()
        assert termination.is_asked

    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_the_same_request_told_by_two_asks_once() -> None:
    """A rank gets it from its machine, and again from torchrun within a moment."""
    with Termination() as termination:
        ask()
        ask()
        assert termination.is_asked


def test_who_asks_again_ends_it_at_once() -> None:
    """A loop that does not react to the first is ended by the second."""
    script = (
        "import os, signal, time\n"
        "from atoll.island import signals\n"
        "signals.SAME_SIGNAL_S = 0.0\n"
        "with signals.Termination():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(100)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=100)

    assert done.returncode == -signal.SIGTERM


def test_a_loop_that_stands_still_is_interrupted() -> None:
    """A loop that waits forever is interrupted in its wait."""

    def stand_still() -> None:
        ask()
        never.acquire()

    never = threading.Lock()
    with never, Termination(grace_s=0.01), pytest.raises(Interrupted):
        stand_still()


def test_who_cannot_heed_it_is_interrupted_at_once() -> None:
    """Joining has no inner steps; a second SIGTERM would not be needed."""
    with Termination(grace_s=0.0) as termination, pytest.raises(Interrupted):
        ask()

    assert termination.is_asked
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_loop_that_is_over_is_not_interrupted() -> None:
    """Leaving the run is not interrupted."""
    with Termination(grace_s=0.01) as termination:
        ask()
        termination.heed()
        alone = [each for each in threading.enumerate() if "termination" in each.name]
        for thread in alone:
            thread.join()

    assert termination.is_asked


def test_a_program_that_handles_it_keeps_doing_so() -> None:
    """Its handler is called, and ours is not installed."""
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    with Termination() as termination:
        ask()

    assert signals == [signal.SIGTERM]
    assert not termination.is_asked


def test_another_thread_changes_nothing() -> None:
    """Only the main thread may set signal handlers in Python."""
    seen = []

    def enter() -> None:
        with Termination():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()

    assert seen == [signal.SIG_DFL]
