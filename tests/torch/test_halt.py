"""A step that all ranks stop at, though they pass steps at different times."""

from __future__ import annotations

import threading

import pytest

from atoll.errors import RemoteError
from atoll.torch.ranks.leader import Halt

pytestmark = pytest.mark.torch


def test_all_stop_after_the_last_step_that_any_has_made() -> None:
    """A rank that is ahead and one that is behind stop at the same step."""
    ahead, behind = Halt(5.0), Halt(5.0)
    assert not any([ahead.passed() for _ in range(7)])
    assert not any([behind.passed() for _ in range(6)])
    at = 1 + max(ahead.hold(), behind.hold())
    ahead.meet(at)
    behind.meet(at)
    assert ahead.passed()
    assert [behind.passed(), behind.passed()] == [False, True]
    assert ahead.steps == behind.steps == 8


def test_a_rank_that_holds_passes_no_step_before_it_knows_where() -> None:
    """The step waits for the word, and then goes on."""
    halt = Halt(5.0)
    halt.hold()
    passed: list[bool] = []
    trains = threading.Thread(target=lambda: passed.append(halt.passed()))
    trains.start()
    assert passed == []
    halt.meet(1)
    trains.join()
    assert passed == [True]


def test_who_is_never_told_says_so() -> None:
    """A rank does not hang on ranks that do not answer."""
    halt = Halt(0.01)
    halt.hold()
    with pytest.raises(RemoteError, match="do not agree on where to stop"):
        halt.passed()


def test_who_is_let_go_passes() -> None:
    """When there is nobody left to agree with, steps pass."""
    halt = Halt(5.0)
    halt.hold()
    halt.release()
    assert not halt.passed()
