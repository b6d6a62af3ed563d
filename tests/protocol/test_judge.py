"""Whose norm is beyond what is usual: the round's, or an island's own."""

from __future__ import annotations

import numpy as np

from atoll.protocol.judge import OWN_NORMS, Norms, judge_updates, norms_after
from atoll.wire import Header, Kind, Roster, Verdict, with_body

BASE = b"\1" * 16


def header(island: str, norm: float, *, refused: str = "") -> Header:
    body = b"" if refused else np.float32(norm).tobytes()
    made = Header(
        kind=Kind.UPDATE,
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


def judged(*headers: Header, norms: Norms) -> Roster:
    return judge_updates(
        headers, base=BASE, known_bases=(), max_update_norm=10.0, norms=norms
    )


def refused(roster: Roster) -> dict[str, str]:
    return {
        entry.island: entry.reason
        for entry in roster.entries
        if entry.verdict is Verdict.REFUSED
    }


def test_alone_an_island_is_judged_by_its_own_last_five() -> None:
    """Their median is 1: 10 may come, and 11 may not."""
    norms = {"a": (1.0, 1.0, 1.0, 5.0, 0.5)}

    assert refused(judged(header("a", 10.0), norms=norms)) == {}
    (reason,) = refused(judged(header("a", 11.0), norms=norms)).values()
    assert reason == "norm: 11 is beyond 10, by the median of the island's last 5"


def test_before_five_nobody_knows_what_is_usual() -> None:
    """An island that is new may bring what it likes."""
    assert refused(judged(header("a", 1e6), norms={"a": (1.0,) * 4})) == {}
    assert refused(judged(header("a", 1e6), norms={})) == {}


def test_from_three_on_the_round_decides() -> None:
    """Whatever an island's own norms were."""
    norms = {"c": (50.0,) * OWN_NORMS}
    headers = header("a", 1.0), header("b", 1.0), header("c", 50.0)

    assert list(refused(judged(*headers, norms=norms))) == ["c"]


def test_what_grew_for_good_is_refused_for_a_while_only() -> None:
    """Refused norms are learned too: after three of them they are what is usual."""
    norms: Norms = {"a": (1.0,) * OWN_NORMS}
    counted = []
    for _ in range(4):
        update = header("a", 50.0)
        counted.append(not refused(judged(update, norms=norms)))
        norms = norms_after(norms, [update])

    assert counted == [False, False, False, True]


def test_an_update_without_a_body_teaches_nothing() -> None:
    """Its island refused it itself."""
    norms = {"a": (1.0,) * OWN_NORMS}

    assert norms_after(norms, [header("a", 0.0, refused="not finite")]) == norms
