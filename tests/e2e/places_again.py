"""Does all rounds of a run again that were closed at several places, one after another.

Every round is taken from a place that knows its roster: a coordinator's journal, or a
store. Places that share a round must agree on it, apart from a roster that came too
late for a move.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from atoll.disk import SystemDisk
from atoll.errors import NoSuchObject
from atoll.exchange.bucket import BucketReader
from atoll.exchange.bucket.means import header_of
from atoll.journal import Journal
from atoll.protocol import ModelSpec
from atoll.runtime import SystemRuntime
from atoll.settings import RunSettings
from atoll.store import open_store
from atoll.weights import lay_out, terms_of
from atoll.wire import Header
from tests.e2e.rounds_again import Again, applied


class Place(Protocol):
    """Where a run has been."""

    settings: RunSettings
    model: ModelSpec

    def header(self, fragment: int, round: int) -> Header | None:
        """Return the outcome of a round; None: it was not closed here."""
        ...


class InJournal:
    """The directory of a coordinator that is not served now."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        created, model = journal.recorded.created, journal.recorded.model
        assert created is not None
        assert model is not None
        self.settings, self.model = RunSettings.from_dict(created.settings), model

    def header(self, fragment: int, round: int) -> Header | None:
        if round not in self._journal.recorded.fragments[fragment].positions:
            return None
        return self._journal.outcome(fragment, round, has_body=False)[0]


class InStore:
    """A store in which islands have met."""

    def __init__(self, reader: BucketReader) -> None:
        self._reader = reader
        assert reader.founded is not None
        self.settings, self.model = reader.view.settings, reader.founded.model

    def header(self, fragment: int, round: int) -> Header | None:
        try:
            closed = self._reader.roster(fragment, round)
        except NoSuchObject:
            return None
        layout = self._reader.view.layout[fragment]
        down = terms_of(layout, self.settings).down
        return header_of(closed, closed.roster, layout, down)


def rounds_at(updates: Path, *where: Path | str) -> Again:
    """Do every round again; nothing may have the directories among `where` open."""
    with ExitStack() as stack:
        places = [stack.enter_context(place_at(each)) for each in where]
        again, work = Again(), defaultdict[tuple[str, int, int], float](float)
        settings, model = places[0].settings, places[0].model
        for index, layout in enumerate(lay_out(model, settings)):
            headers = list(headers_of(places, index))
            state = applied(again, work, updates, layout, settings, headers, index)
            again.digests.append(state.digest.hex())
            again.rounds.append(len(headers))
        again.work = work
        return again


@contextmanager
def place_at(where: Path | str) -> Iterator[Place]:
    """Open the directory of a coordinator, or the store at a URL."""
    if isinstance(where, Path):
        disk = SystemDisk(where / "journal")
        try:
            yield InJournal(Journal.open(disk))
        finally:
            disk.close()
        return
    runtime = SystemRuntime()
    try:
        yield InStore(BucketReader.open(open_store(where), runtime, url=where))
    finally:
        runtime.close()


def headers_of(places: list[Place], fragment: int) -> Iterator[Header]:
    """Yield the outcomes of a fragment's rounds, from the first on.

    The last roster of a place does not count if it came too late for a move: then the
    next place has another one.
    """
    round = 1
    while True:
        known = [
            (place, header)
            for place in places
            if (header := place.header(fragment, round)) is not None
        ]
        if not known:
            return
        _, last = known[-1]
        same = [last]
        for place, other in known[:-1]:
            said = (other.base, other.roster, other.outer)
            if said == (last.base, last.roster, last.outer):
                same.append(other)
            else:
                assert place.header(fragment, round + 1) is None
        yield next((header for header in same if header.is_sealed), last)
        round += 1
