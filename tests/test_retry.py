"""Claims about the retry policy: pauses, faults, limits, and starting over."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from atoll.errors import CorruptError, Unreachable
from atoll.retry import RetryPolicy, retried

POLICY = RetryPolicy(max_tries=5, first_s=1.0, longest_s=4.0)


def failing(*faults: Exception) -> Callable[[], str]:
    """Return a call that raises these, and then returns."""
    remaining = list(faults)

    def act() -> str:
        if remaining:
            raise remaining.pop(0)
        return "done"

    return act


def test_pauses_double_up_to_the_longest() -> None:
    """One fewer than attempts."""
    assert list(POLICY.pauses_s()) == [1.0, 2.0, 4.0, 4.0]


def test_a_call_is_repeated_after_its_faults() -> None:
    """With a pause before every further attempt."""
    pauses_s: list[float] = []
    act = failing(Unreachable("1"), Unreachable("2"))
    assert retried(act, POLICY, sleep=pauses_s.append) == "done"
    assert pauses_s == [1.0, 2.0]


def test_a_policy_without_pauses_repeats_at_once() -> None:
    """Nothing sleeps, not even for zero seconds."""
    at_once = RetryPolicy(max_tries=3, first_s=0.0)
    pauses_s: list[float] = []
    act = failing(Unreachable("1"), Unreachable("2"))
    assert retried(act, at_once, sleep=pauses_s.append) == "done"
    assert pauses_s == []


def test_the_last_fault_is_raised_when_attempts_are_used_up() -> None:
    """Five attempts, four pauses."""
    pauses_s: list[float] = []
    act = failing(*(Unreachable(str(number)) for number in range(9)))
    with pytest.raises(Unreachable, match="4"):
        retried(act, POLICY, sleep=pauses_s.append)
    assert len(pauses_s) == 4


def test_other_errors_are_not_repeated() -> None:
    """A policy names its faults; a caller may refuse some of them."""
    pauses_s: list[float] = []
    with pytest.raises(CorruptError):
        retried(failing(CorruptError("no")), POLICY, sleep=pauses_s.append)
    with pytest.raises(Unreachable):
        retried(
            failing(Unreachable("no")),
            POLICY,
            sleep=pauses_s.append,
            may_retry=lambda fault, pause_s: False,
        )
    assert pauses_s == []


def test_progress_starts_over() -> None:
    """Attempts without progress are limited, and those that brought something are not.

    Progress at the 3rd, 4th and 6th fault: pauses 1 2 | 1 | 1 2 | 1 2, then it returns.
    """
    reached = iter([0, 0, 0, 1, 2, 2, 3, 3])
    pauses_s: list[float] = []
    act = failing(*(Unreachable("no") for _ in range(7)))
    done = retried(act, POLICY, sleep=pauses_s.append, progress=lambda: next(reached))
    assert done == "done"
    assert pauses_s == [1.0, 2.0, 1.0, 1.0, 2.0, 1.0, 2.0]


def test_a_sleep_that_gives_up_ends_the_attempts() -> None:
    """Its own error is raised."""

    def sleep(seconds: float) -> None:
        raise Unreachable("given up")

    with pytest.raises(Unreachable, match="given up"):
        retried(failing(Unreachable("first")), POLICY, sleep=sleep)
