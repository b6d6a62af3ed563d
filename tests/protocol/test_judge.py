"""Whose norm is beyond what is usual: the round's, or an island's own."""

from __future__ import annotations

import numpy as np

from atoll.protocol.rounds import (
    OWN_NORMS,
    CountedNorm,
    Norms,
    WindowOf,
    judge_updates,
    norms_after,
    refuse_all,
)
from atoll.settings import RunSettings
from atoll.wire import FrameKind, Header, Roster, Verdict, with_body

BASE = b"\1" * 16


def header(island: str, norm: float, *, refused: str = "") -> Header:
    body = b"" if refused else np.float32(norm).tobytes()
    made = Header(
        kind=FrameKind.UPDATE,
        run="run",
        fragment=0,
        round=1,
        island=island,
        incarnation=1,
        base=BASE,
        elements=len(body) // 4,
        norm=norm,
        refused=refused,
    )
    return with_body(made, body)


def alike(island: str) -> int:
    """Every window is the schedule's."""
    return 100


def judged(*headers: Header, norms: Norms, window_of: WindowOf = alike) -> Roster:
    return judge_updates(
        headers,
        round=1,
        base=BASE,
        known_bases=(),
        norms=norms,
        counted=lambda island: None,
        window_of=window_of,
        settings=RunSettings(),
    )


def counted(*norms: float, window: int = 100) -> tuple[CountedNorm, ...]:
    return tuple(CountedNorm(norm, window) for norm in norms)


def refused(roster: Roster) -> dict[str, str]:
    return {
        entry.island: entry.reason
        for entry in roster.entries
        if entry.verdict is Verdict.REFUSED
    }


def test_alone_an_island_is_judged_by_its_own_last_five() -> None:
    """Their median is 1: 10 may come, and 11 may not."""
    norms = {"a": counted(1.0, 1.0, 1.0, 5.0, 0.5)}

    assert refused(judged(header("a", 10.0), norms=norms)) == {}
    (reason,) = refused(judged(header("a", 11.0), norms=norms)).values()
    assert reason == (
        "norm: 11 is beyond 10, limits.max_update_norm=10 times "
        "the median of the island's last 5"
    )


def test_a_run_without_enough_counted_norms_refuses_none() -> None:
    """There is no reference in the first rounds of a run of one or two islands."""
    assert refused(judged(header("a", 1e6), norms={"a": counted(*[1.0] * 4)})) == {}
    assert refused(judged(header("a", 1e6), norms={})) == {}


def test_a_newcomer_is_judged_by_the_other_islands() -> None:
    """With two islands, the second one's first update has a reference."""
    norms = {"a": counted(*[1.0] * OWN_NORMS)}
    headers = header("a", 1.0), header("b", 11.0)

    (reason,) = refused(judged(*headers, norms=norms)).values()
    assert reason == (
        "norm: 11 is beyond 10, limits.max_update_norm=10 times "
        "the median of the other islands' last norms"
    )


def test_tiny_updates_of_another_island_do_not_refuse_an_honest_one() -> None:
    """An island with a history of its own is not judged by the other's."""
    norms = {"a": counted(*[1.0] * OWN_NORMS), "b": counted(*[1e-30] * OWN_NORMS)}

    assert refused(judged(header("a", 1.0), header("b", 1e-30), norms=norms)) == {}


def test_updates_of_zeros_are_no_reference() -> None:
    """Two updates of norm zero leave a round of three to the island's own norms."""
    norms = {"c": counted(*[1.0] * OWN_NORMS)}
    headers = header("a", 0.0), header("b", 0.0), header("c", 50.0)

    assert list(refused(judged(*headers, norms=norms))) == ["c"]
    roster = judged(headers[0], norms={})
    assert norms_after({}, [headers[0]], roster, window_of=alike) == {}


def test_from_three_on_the_round_decides() -> None:
    """Whatever an island's own norms were."""
    norms = {"c": counted(*[50.0] * OWN_NORMS)}
    headers = header("a", 1.0), header("b", 1.0), header("c", 50.0)

    assert list(refused(judged(*headers, norms=norms))) == ["c"]


def test_more_than_half_of_the_names_decide_what_is_usual() -> None:
    """Two names of one attacker outvote an honest island: a limit, not a promise."""
    headers = header("honest", 1.0), header("x", 1e6), header("y", 1e6)

    assert (
        refused(judged(*headers, norms={"honest": counted(*[1.0] * OWN_NORMS)})) == {}
    )


def test_a_refused_norm_is_never_learned() -> None:
    """However often it is repeated, a norm beyond the limit stays refused."""
    norms: Norms = {"a": counted(*[1.0] * OWN_NORMS)}
    for _ in range(2 * OWN_NORMS):
        update = header("a", 50.0)
        roster = judged(update, norms=norms)
        assert list(refused(roster)) == ["a"]
        norms = norms_after(norms, [update], roster, window_of=alike)

    assert norms == {"a": counted(*[1.0] * OWN_NORMS)}


def test_a_void_round_teaches_nothing() -> None:
    """Its updates were good one by one, and none of them counted."""
    updates = [header("a", 1.0), header("b", 1.0)]
    roster = refuse_all(judged(*updates, norms={}), "norm: the mean overflows")

    assert norms_after({}, updates, roster, window_of=alike) == {}


def test_an_update_without_a_body_teaches_nothing() -> None:
    """Its island refused it itself."""
    norms = {"a": counted(*[1.0] * OWN_NORMS)}

    update = header("a", 0.0, refused="not finite")
    roster = judged(update, norms=norms)
    assert norms_after(norms, [update], roster, window_of=alike) == norms


def test_a_longer_window_may_have_a_larger_norm() -> None:
    """A norm grows at most with the inner steps: 20 times, when 5 become 100."""
    norms = {"a": counted(*[1.0] * OWN_NORMS, window=5)}

    assert refused(judged(header("a", 200.0), norms=norms)) == {}
    assert list(refused(judged(header("a", 201.0), norms=norms))) == ["a"]


def test_a_shorter_window_is_not_expected_to_have_a_smaller_norm() -> None:
    """Noise grows with the root of the inner steps, and the limit stays the same."""
    norms = {"a": counted(*[1.0] * OWN_NORMS, window=100)}
    five = {"window_of": lambda island: 5}

    assert refused(judged(header("a", 10.0), norms=norms, **five)) == {}
    assert list(refused(judged(header("a", 11.0), norms=norms, **five))) == ["a"]


def test_a_fast_island_is_judged_by_the_windows_of_slow_ones() -> None:
    """Two islands of one step and one of 100: a norm of 100 is usual, 1001 is not."""
    windows = {"a": 1, "b": 1, "c": 100}.__getitem__
    slow = header("a", 1.0), header("b", 1.0)

    for norm, expected in ((100.0, []), (1001.0, ["c"])):
        roster = judged(*slow, header("c", norm), norms={}, window_of=windows)
        assert list(refused(roster)) == expected
