"""A step that all ranks stop at, though they pass steps at different times."""

from __future__ import annotations

import threading

import pytest

from atoll.errors import RemoteError
from atoll.torch.ranks.leader import StopAgreement

pytestmark = pytest.mark.torch


def test_all_stop_after_the_last_step_that_any_has_made() -> None:
    """A rank that is ahead and one that is behind stop at the same step."""
    ahead, behind = StopAgreement(5.0), StopAgreement(5.0)
    assert not any([ahead.count_step() for _ in range(7)])
    assert not any([behind.count_step() for _ in range(6)])
    step = 1 + max(ahead.hold(), behind.hold())
    ahead.agree(step)
    behind.agree(step)
    assert ahead.count_step()
    assert [behind.count_step(), behind.count_step()] == [False, True]
    assert ahead.steps == behind.steps == 8


def test_a_rank_that_holds_passes_no_step_before_it_knows_where() -> None:
    """The step waits for the word, and then goes on."""
    agreement = StopAgreement(5.0)
    agreement.hold()
    passed: list[bool] = []
    trains = threading.Thread(target=lambda: passed.append(agreement.count_step()))
    trains.start()
    assert passed == []
    agreement.agree(1)
    trains.join()
    assert passed == [True]


def test_who_is_never_told_says_so() -> None:
    """A rank does not hang on ranks that do not answer."""
    agreement = StopAgreement(0.01)
    agreement.hold()
    with pytest.raises(RemoteError, match="do not agree on where to stop"):
        agreement.count_step()


def test_who_is_let_go_passes() -> None:
    """When there is nobody left to agree with, steps pass."""
    agreement = StopAgreement(5.0)
    agreement.hold()
    agreement.release()
    assert not agreement.count_step()
