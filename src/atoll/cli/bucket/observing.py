"""Looks at a run in a store on behalf of a person, and joins nothing.

Rule 1: nothing is put: who may only read can look.
Rule 2: an observer that has just come cannot know who is live. A member is live when
        its document has changed under the observer's eyes, and silent when it has not
        for a lease; before that it was only seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Self

from atoll.cli.bucket.whole_reads import WholeReads
from atoll.clock import Clock
from atoll.exchange.bucket import BucketReader, ThreadTiming
from atoll.exchange.bucket.create import require_there
from atoll.exchange.bucket.documents import RosterDocument
from atoll.exchange.bucket.outcomes import Outcomes
from atoll.exchange.bucket.states import States
from atoll.store import RetryingStore, open_store

LOOK_S = 1.0
"""Between two looks at documents that may change."""

LEFT, LIVE, SILENT, SEEN = "left", "live", "silent", "seen"


class Observing:
    """A look at the run at a URL. Close it, or use it in a `with` block.

    Raises:
        UsageError: there is no run, and the command that makes one is named.
        CorruptError: its settings are not those that it was made with.
        StoreDenied: a permission is missing.
        Unreachable: the store does not answer.
    """

    def __init__(self, url: str, *, clock: Clock | None = None) -> None:
        require_there(url)
        self.url = url
        self._timing = ThreadTiming(clock)
        try:
            self.store = RetryingStore(
                WholeReads(open_store(url)), pause=self._timing.pause
            )
            self.lookout = BucketReader.open(self.store, self._timing, url=url)
            self.outcomes = Outcomes(self.lookout, None)
            self.states = States(self.lookout, self.outcomes)
            self._begun_s = self._timing.now_s()
            self._changed_s: dict[str, float] = {}
            self._has_looked = self._has_begun = False
            self.look()
        except BaseException:
            self._timing.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timing.close()

    @property
    def watched_s(self) -> float:
        """How long this observer has been here."""
        return self._timing.now_s() - self._begun_s

    @property
    def now_s(self) -> float:
        return self._timing.now_s()

    def look(self) -> None:
        """Read what is new: operators' words, members, rosters and open rounds."""
        self.lookout.look_controls()
        self._look_members()
        if not self.lookout.look_founding():
            return
        fragments = range(len(self.lookout.sight.layout))
        if not self._has_begun:
            for fragment in fragments:
                self.states.begin(fragment)
            self._has_begun = True
        for fragment in fragments:
            self.lookout.look_round(fragment)

    def watch(self, seconds: float) -> None:
        """Look at members until all are known to live or to be silent, or time is up.

        Then look at the rest once more.
        """
        until_s = self._timing.now_s() + seconds
        while self._unknown() and self._timing.now_s() < until_s:
            self._timing.pause(min(LOOK_S, max(0.0, until_s - self._timing.now_s())))
            self._look_members()
        self.look()

    def read_rosters(self, wanted: Sequence[tuple[int, int]]) -> list[RosterDocument]:
        """Return the rosters of closed rounds, by fragment and round."""
        reads = [partial(self.lookout.roster, *at) for at in wanted]
        return self._timing.together(reads) if reads else []

    def pause(self, seconds: float) -> None:
        """Let time pass."""
        self._timing.pause(seconds)

    def standing(self, island: str) -> str:
        """Return what is known of an island: left, live, silent, or only seen."""
        member = self.lookout.sight.state.members.known[island]
        if member.has_left:
            return LEFT
        if self.unchanged_s(island) > self.lookout.sight.lease_s:
            return SILENT
        return LIVE if island in self._changed_s else SEEN

    def unchanged_s(self, island: str) -> float:
        """Return how long an island's document has not changed, as far as was seen."""
        return self._timing.now_s() - self._changed_s.get(island, self._begun_s)

    def _look_members(self) -> None:
        before = dict(self.lookout.sight.documents)
        self.lookout.look_members()
        now_s = self._timing.now_s()
        for island, document in self.lookout.sight.documents.items():
            # Who has come after the first look is live as well.
            is_news = before.get(island) != document
            if is_news and (island in before or self._has_looked):
                self._changed_s[island] = now_s
        self._has_looked = True

    def _unknown(self) -> list[str]:
        known = self.lookout.sight.state.members.known
        return [name for name in known if self.standing(name) == SEEN]
