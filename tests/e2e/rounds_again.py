"""Does all rounds of a run again, from its rosters and from what islands have sent.

Rule 1: the journal says who counted, by digest; what they sent was kept by the islands
        themselves, before it was sent. Nothing else is taken from the coordinator.
Rule 2: the founding state and every round's mean and outer step are computed anew, and
        must come to the digest that the journal has and every island ended with.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.disk import SystemDisk
from atoll.errors import NoSuchObject
from atoll.exchange.bucket import documents, keys
from atoll.exchange.bucket.documents import fetch
from atoll.exchange.bucket.means import header_of
from atoll.journal import Journal
from atoll.settings import RunSettings
from atoll.store import Store
from atoll.weights import FragmentLayout, FragmentState, agree, lay_out, terms_of
from atoll.wire import Header, RosterEntry, pack, read_frame, update_digest
from tests.e2e.stage import Island, Stage

Framed = tuple[Header, np.ndarray]
Report = Mapping[str, Any]
"""What an island's process wrote when it had left."""


@dataclass
class Again:
    """What came out of doing all rounds again."""

    digests: list[str] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    counted: Counter[str] = field(default_factory=Counter)
    """Updates of each island that counted."""

    work: Mapping[tuple[str, int, int], float] = field(default_factory=dict)
    """What counted, summed over weights, by island, incarnation and fragment."""


def ended_well(
    stage: Stage, *islands: Island, may_drop: str = ""
) -> tuple[Again, dict[str, Report]]:
    """Wait for the end of the run; require one anchor, and nobody's work lost or twice.

    Without `islands` of all that were started. `may_drop` names one that may have been
    away for longer than two rounds, and then says that it has dropped some.
    """
    reports: dict[str, Report] = {
        each.name: each.wait() for each in islands or stage.islands
    }
    stage.close_coordinator()
    again = rounds_again(stage.directory, stage.folder / "updates")
    require_same_end(again, reports.values())
    for name, report in reports.items():
        if name == may_drop and report["updates_dropped"]:
            require_nothing_twice(again, name, report)
        else:
            require_all_work(again, name, report)
    return again, reports


def rounds_again(directory: Path, updates: Path) -> Again:
    """Do every round of a journal again, and compare it to the bit.

    Nothing may have the directory open.
    """
    disk = SystemDisk(directory / "journal")
    try:
        return _again(Journal.open(disk), updates)
    finally:
        disk.close()


def _again(journal: Journal, updates: Path) -> Again:
    recorded = journal.recorded
    assert recorded.created is not None
    assert recorded.model is not None
    settings = RunSettings.from_dict(recorded.created.settings)
    again, work = Again(), defaultdict[tuple[str, int, int], float](float)
    for index, layout in enumerate(lay_out(recorded.model, settings)):
        last = recorded.fragments[index].round
        headers = [
            journal.outcome(index, round, has_body=False)[0]
            for round in range(1, last + 1)
        ]
        state = applied(again, work, updates, layout, settings, headers, index)
        assert state.digest == recorded.fragments[index].digest
        replayed = journal.state(index)
        assert replayed.anchor.tobytes() == state.anchor.tobytes()
        assert replayed.digest == state.digest
        again.digests.append(state.digest.hex())
        again.rounds.append(last)
    again.work = work
    return again


def applied(
    again: Again,
    work: dict[tuple[str, int, int], float],
    updates: Path,
    layout: FragmentLayout,
    settings: RunSettings,
    headers: Iterable[Header],
    index: int,
) -> FragmentState:
    """Return a fragment's state after all rounds, done again by what these say."""
    state = FragmentState.from_frame(*frame_of(updates, f"founded-{index}"))
    seen: set[bytes] = set()
    for header in headers:
        assert header.roster is not None
        assert header.outer is not None
        assert header.base == state.digest
        frames = _counted(updates, header.roster.counted, seen)
        agreed, body = agree(
            layout,
            terms_of(layout, settings),
            header.roster,
            frames,
            run=header.run,
            fragment=index,
            round=header.round,
            epoch=header.epoch,
            base=state.digest,
            outer=header.outer,
        )
        assert not header.is_sealed or pack(agreed) == pack(header)
        state.apply(agreed, body)
        for name, framed in frames.items():
            again.counted[name] += 1
            work[name, framed[0].incarnation, index] += _sum(framed)
    return state


def bucket_rounds_again(store: Store, updates: Path) -> Again:
    """Do every round of a run in a store again, from its rosters alone."""
    settings = fetch(store, documents.SETTINGS, keys.SETTINGS).settings
    model = fetch(store, documents.RUN, keys.RUN).model
    again, work = Again(), defaultdict[tuple[str, int, int], float](float)
    for index, layout in enumerate(lay_out(model, settings)):
        rosters = list(_rosters(store, index))
        down = terms_of(layout, settings).down
        headers = [header_of(each, each.roster, layout, down) for each in rosters]
        state = applied(again, work, updates, layout, settings, headers, index)
        again.digests.append(state.digest.hex())
        again.rounds.append(len(rosters))
    again.work = work
    return again


def moved_rounds_again(directory: Path, store: Store, updates: Path) -> Again:
    """Do every round of a run again that went from a coordinator into a store.

    Nothing may have the directory open.
    """
    disk = SystemDisk(directory / "journal")
    try:
        return _moved_again(Journal.open(disk), store, updates)
    finally:
        disk.close()


def _moved_again(journal: Journal, store: Store, updates: Path) -> Again:
    recorded = journal.recorded
    assert recorded.created is not None
    assert recorded.model is not None
    settings = RunSettings.from_dict(recorded.created.settings)
    again, work = Again(), defaultdict[tuple[str, int, int], float](float)
    for index, layout in enumerate(lay_out(recorded.model, settings)):
        last = recorded.fragments[index].round
        before = [
            journal.outcome(index, round, has_body=False)[0]
            for round in range(1, last + 1)
        ]
        down = terms_of(layout, settings).down
        rosters = list(_rosters(store, index, first=last + 1))
        after = [header_of(each, each.roster, layout, down) for each in rosters]
        headers = [*before, *after]
        state = applied(again, work, updates, layout, settings, headers, index)
        again.digests.append(state.digest.hex())
        again.rounds.append(len(headers))
    again.work = work
    return again


def _rosters(
    store: Store, fragment: int, *, first: int = 1
) -> Iterator[documents.RosterDocument]:
    for round in itertools.count(first):
        try:
            yield fetch(store, documents.ROSTER, keys.roster(fragment, round))
        except NoSuchObject:
            return


def require_same_end(again: Again, reports: Iterable[Report]) -> None:
    """Whoever was there at the end has what the rounds come to."""
    for report in reports:
        if report["why"] != "ended":
            continue  # it has left before the end
        assert report["digests"] == again.digests
        assert report["rounds"] == again.rounds


def require_all_work(again: Again, name: str, report: Report) -> None:
    """All that an island has learnt counted once, or is in its local weights still.

    One inner step moves a sum by far more than rounding does.
    """
    gone = report["why"] != "ended"
    for fragment, work in enumerate(report["work"]):
        counted = again.work.get((name, report["incarnation"], fragment), 0.0)
        rest = 0.0 if gone else report["rest"][fragment]
        assert counted + rest == pytest.approx(work, rel=1e-4, abs=1e-3)
    assert report["updates_dropped"] == report["updates_refused"] == 0


def require_nothing_twice(again: Again, name: str, report: Report) -> None:
    """What counted and what is left is less than what was learnt: some was dropped."""
    sums = [
        again.work.get((name, report["incarnation"], fragment), 0.0) + rest
        for fragment, rest in enumerate(report["rest"])
    ]
    slack = 1e-4 * max(report["work"])
    assert all(
        sum <= work + slack for sum, work in zip(sums, report["work"], strict=True)
    )
    assert any(
        sum < work - slack for sum, work in zip(sums, report["work"], strict=True)
    )
    assert report["updates_refused"] == 0


def _counted(
    updates: Path, entries: Iterable[RosterEntry], seen: set[bytes]
) -> dict[str, Framed]:
    """Return the updates of a roster; none of them has counted before."""
    frames = {}
    for entry in entries:
        assert entry.digest not in seen
        seen.add(entry.digest)
        header, body = frame_of(updates, entry.digest.hex())
        assert update_digest(header) == entry.digest
        frames[entry.island] = (header, body)
    return frames


def frame_of(updates: Path, name: str) -> Framed:
    with (updates / f"{name}.atoll").open("rb") as file:
        header, body = read_frame(file)
        return header, np.frombuffer(body, np.uint8).copy()


def _sum(framed: Framed) -> float:
    header, body = framed
    assert header.codec == "fp32"
    return float(body.view(np.float32).sum(dtype=np.float64))
