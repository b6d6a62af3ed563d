"""The books of a storm: which inner steps of which process are in the anchor.

Rule 1: rosters say which updates counted; the updates themselves are the copies that
        islands kept before they sent them.
Rule 2: of every process and fragment the counted updates must hold its first steps,
        each exactly once, without a gap, up to the seal of the last that counted. What
        a killed process did after that is gone, and nothing else is.
Rule 3: of a process that has ended by itself, all steps are counted, still in its
        local weights, or reported as given up.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from atoll.weights import lay_out
from atoll.wire import Header, RosterEntry, Verdict
from tests.e2e.places_again import headers_of, place_at
from tests.e2e.rounds_again import Again, applied, frame_of
from tests.kill_storm.process_files import joined_file, read
from tests.kill_storm.scene import Life, Scene

Key = tuple[int, int]
"""A process and a fragment."""


@dataclass
class Books:
    """What rosters and kept updates say, and every difference that was found."""

    differences: list[str] = field(default_factory=list)
    counted: dict[Key, int] = field(default_factory=lambda: defaultdict(int))
    """Inner steps in the anchor."""

    sealed_at: dict[Key, int] = field(default_factory=dict)
    """The process's inner steps at the seal of its last update that counted."""

    rounds: list[int] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    entries: dict[tuple[int, int], dict[str, RosterEntry]] = field(default_factory=dict)
    """Who is in the roster, by fragment and round."""

    gone: int = 0
    """Inner steps of killed processes that no update has brought."""

    given_up: int = 0
    """Inner steps that islands have dropped and reported."""

    overlooked: int = 0
    """Updates of killed processes that came while somebody closed their round."""

    def differ(self, text: str) -> None:
        self.differences.append(text)


def closed_books(scene: Scene) -> Books:
    """Return the books of a run that has ended; nothing may have it open."""
    books = Books()
    with place_at(scene.where) as place:
        settings, model = place.settings, place.model
        for fragment, layout in enumerate(lay_out(model, settings)):
            headers = list(headers_of([place], fragment))
            again = Again()
            try:
                state = applied(
                    again,
                    defaultdict(float),
                    scene.folder / "updates",
                    layout,
                    settings,
                    headers,
                    fragment,
                )
            except (AssertionError, FileNotFoundError) as exc:
                books.differ(f"fragment {fragment} cannot be done again: {exc!r}")
                continue
            anchor = np.zeros(scene.elements, np.int64)
            for header in headers:
                anchor -= _mean(books, scene, header)
            _compare(books, fragment, anchor, state.anchor)
            books.rounds.append(len(headers))
            books.digests.append(state.digest.hex())
    for life in scene.lives:
        _settle(books, scene, life, is_async=settings.sync.is_async)
        _require_spoken_for(books, scene, life)
    _require_same_end(books, scene.lives)
    if isinstance(scene.where, Path):
        _require_staged(books, scene.where)
    return books


def _mean(books: Books, scene: Scene, header: Header) -> np.ndarray[Any, Any]:
    """Return what a round takes from the anchor, in whole numbers; enter its work."""
    assert header.roster is not None
    entries = {entry.island: entry for entry in header.roster.entries}
    books.entries[header.fragment, header.round] = entries
    total = np.zeros(scene.elements, np.int64)
    for entry in header.roster.counted:
        total += _enter(books, scene, header, entry)
    size = max(1, len(header.roster.counted))
    if (total % size).any():
        books.differ(
            f"fragment {header.fragment}, round {header.round}: the sum of "
            f"{size} updates is not a multiple of {size}"
        )
    return total // size


def _enter(
    books: Books, scene: Scene, header: Header, entry: RosterEntry
) -> np.ndarray[Any, Any]:
    """Enter one counted update, and return its values."""
    where = f"fragment {header.fragment}, round {header.round}, {entry.island}"
    _, body = frame_of(scene.folder / "updates", entry.digest.hex())
    values = body.view(np.float32).astype(np.int64)
    touched = np.flatnonzero(values)
    if len(touched) > 1:
        books.differ(f"{where}: one update holds work of processes {touched}")
    for process in touched.tolist():
        life = scene.lives[process]
        if life.name != entry.island:
            books.differ(f"{where}: holds work of process {process} of {life.name}")
        steps, rest = divmod(int(values[process]), scene.unit)
        key = (process, header.fragment)
        books.counted[key] += steps
        said = read(joined_file(scene.folder, process)) or {}
        books.sealed_at[key] = entry.inner_steps - said.get("inner_steps", 0)
        if rest or steps < 0 or said.get("incarnation") != entry.incarnation:
            books.differ(
                f"{where}: {values[process]} of process {process}, {said}, {entry}"
            )
    return values


def _compare(
    books: Books,
    fragment: int,
    expected: np.ndarray[Any, Any],
    anchor: np.ndarray[Any, Any],
) -> None:
    for process in np.flatnonzero(anchor != expected).tolist():
        books.differ(
            f"fragment {fragment}: the anchor has {anchor[process]} of process "
            f"{process}, and the rosters come to {expected[process]}"
        )


def _settle(books: Books, scene: Scene, life: Life, *, is_async: bool) -> None:
    """Compare what a process did with what became of it.

    The local weights of an island that sees the end of an asynchronous run are on the
    last anchor: work in flight that no roster lists is reported as not counted.
    """
    made = int(life.marks["made"][0])
    report = life.report
    refused = report["updates_refused"] if report else life.marks["refused"][0]
    if refused:
        books.differ(f"process {life.number} of {life.name}: {refused} refused")
    for fragment in range(len(books.rounds)):
        key = (life.number, fragment)
        where = f"process {life.number} of {life.name}, fragment {fragment}"
        counted, sealed_at = books.counted[key], books.sealed_at.get(key, 0)
        marked = report["dropped"] if report else life.marks["dropped"][0]
        dropped = int(marked[fragment])
        if not 0 <= sealed_at - counted <= dropped:
            books.differ(
                f"{where}: {counted} steps counted, and the last update that did was "
                f"sealed at step {sealed_at}; {dropped} steps dropped"
            )
        if report is None:
            books.gone += made - counted
            continue
        is_over = report["why"] == "ended"  # else it has left and keeps nothing
        kept = round(report["rest"][fragment] / scene.unit) if is_over else 0
        lost = made - counted - kept
        not_counted = int(report["not_counted_steps"])
        if is_over:
            not_counted = not_counted - kept if is_async else 0
        reported = dropped, dropped + not_counted
        if not reported[0] <= lost <= reported[1]:
            books.differ(
                f"{where}: made {made} steps, {counted} counted, {kept} still local, "
                f"so that {lost} are lost, and {reported} are reported"
            )
        books.given_up += max(0, lost)


def _require_spoken_for(books: Books, scene: Scene, life: Life) -> None:
    """An update that stood in an open round when the next life joined has counted.

    In a store, whoever closes the round may have looked before the update was there:
    then the roster has no update of the island.
    """
    said = read(joined_file(scene.folder, life.number))
    for fragment, number in said["spoken_for"] if said else []:
        entries = books.entries.get((fragment, number))
        if said is None or entries is None:
            continue
        entry = entries.get(life.name)
        if not isinstance(scene.where, Path) and (entry is None or not entry.digest):
            books.overlooked += 1
            continue
        is_earlier = entry is not None and entry.incarnation < said["incarnation"]
        if entry is None or entry.verdict is not Verdict.COUNTED or not is_earlier:
            books.differ(
                f"process {life.number} of {life.name} was told that round {number} "
                f"of fragment {fragment} has an update of its name, and the roster "
                f"has {entry}"
            )


def _require_same_end(books: Books, lives: Iterable[Life]) -> None:
    """Whoever was there at the end holds what the rounds come to."""
    for life in lives:
        report = life.report
        if report is None or report["why"] != "ended":
            continue
        if report["digests"] != books.digests or report["rounds"] != books.rounds:
            books.differ(
                f"process {life.number} of {life.name} ended with {report['rounds']} "
                f"{report['digests']}, and the run with {books.rounds} {books.digests}"
            )


def _require_staged(books: Books, directory: Path) -> None:
    """What a coordinator has staged and then closed without dying has counted."""
    for staged, committed in _served(directory):
        for fragment, number in committed & staged.keys():
            entries = books.entries.get((fragment, number), {})
            for island in staged[fragment, number]:
                entry = entries.get(island)
                if entry is None or entry.verdict is not Verdict.COUNTED:
                    books.differ(
                        f"{island} was staged in round {number} of fragment "
                        f"{fragment}, and the roster has {entry}"
                    )


Staged = dict[tuple[int, int], set[str]]


def _served(directory: Path) -> Iterator[tuple[Staged, set[tuple[int, int]]]]:
    """Yield what each life of the coordinator has staged and committed."""
    staged: Staged = defaultdict(set)
    committed: set[tuple[int, int]] = set()
    last = 0
    for line in (directory / "events.jsonl").read_text().splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue  # the coordinator was killed while it wrote
        if event["number"] <= last:
            yield staged, committed
            staged, committed = defaultdict(set), set()
        last = event["number"]
        if event["event"] == "update_staged":
            staged[event["fragment"], event["round"]].add(event["island"])
        elif event["event"] == "round_committed":
            committed.add((event["fragment"], event["round"]))
    yield staged, committed
