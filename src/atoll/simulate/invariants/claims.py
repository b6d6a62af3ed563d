"""Invariants that hold under all faults, and the checks of rounds against a history.

`History` has the published updates and committed rounds as the simulator saw them, not
as an island or the coordinator reports them. `RoundCheck` has the invariants of rounds:
their order, their roster, their mean and their bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from atoll import weights
from atoll.algorithm.pace import aged_weight, buffer_share
from atoll.coordinator import Service
from atoll.errors import NonFinite
from atoll.exchange import Outcome
from atoll.settings import RunSettings
from atoll.simulate.storms import COORDINATOR
from atoll.wire import FrameKind, Header, RosterEntry, Verdict, codec, update_digest


@dataclass(frozen=True)
class Invariant:
    """A name, and the sentence that must be true."""

    name: str
    claim: str


@dataclass(frozen=True)
class Violation:
    """An invariant that did not hold."""

    at_s: float
    subject: str
    invariant: str
    detail: str

    def __str__(self) -> str:
        return f"{self.at_s:.6f} s, {self.subject}: {self.invariant}: {self.detail}"


Report = Callable[[Invariant, str, str], None]
"""Takes an invariant that did not hold, its subject, and the observation."""

SAME_STATE = Invariant(
    "same state",
    "All holders of a round of a fragment have the same anchor and velocity.",
)
SAME_OUTCOME = Invariant(
    "same outcome",
    "Every outcome that an island receives has the bytes that were committed.",
)
DURABLE_FIRST = Invariant(
    "durable first",
    "No process holds a round that the journal lacks, before or after any crash.",
)
ROUNDS_IN_ORDER = Invariant(
    "rounds in order",
    "A fragment commits rounds 1, 2, 3 and so on up to the last, each once.",
)
COUNTED_ONCE = Invariant(
    "counted once",
    "A counted update was published for its round or, in an asynchronous run, its "
    "label; no work of it counted before, and no roster lists an update again.",
)
TRUE_MEAN = Invariant(
    "true mean",
    "An agreed mean is that of the counted updates, each once with the weight of its "
    "age, and has their share of the buffer.",
)
WORK_CONSERVED = Invariant(
    "work conserved",
    "Committed, in hand and codec error add up to work less refused and dropped.",
)
TOKENS_CONSERVED = Invariant(
    "tokens conserved",
    "Every token is committed, in hand, refused, dropped or lost with a named death.",
)
ZOMBIES_CHANGE_NOTHING = Invariant(
    "zombies change nothing",
    "Messages of an earlier incarnation change nothing once the next has joined.",
)
NOTHING_LEFT_OUT = Invariant(
    "nothing left out",
    "While network and store have no faults, a roster lists every update that existed "
    "when it was decided; always, the uncounted departing updates its closer knows of.",
)
EVERYONE_COUNTS = Invariant(
    "everyone counts",
    "After a storm, every round from the third on counts every live island; with "
    "windows that change, it counts in one of two rounds. An asynchronous run lists "
    "every update in the round in which it was staged or in the next one.",
)
STANDS = Invariant(
    "stands",
    "An update that was acknowledged as staged is in the roster of that round, unless "
    "the coordinator died in between.",
)
AGES = Invariant(
    "ages",
    "The base of a counted update is the state before the round that it was sealed "
    "for; that of a departing update is at most later.",
)
PROGRESS = Invariant(
    "progress",
    "While a quorum is connected, no longer than a stated bound passes per round.",
)
BOUNDED = Invariant(
    "bounded",
    "Staged updates and bytes in flight are no more than islands can have sent.",
)
DEADLINES_BOUNDED = Invariant(
    "deadlines bounded",
    "No deadline lies outside deadline_min_s and deadline_max_s; an asynchronous "
    "round waits at most its grace, unless it is the last.",
)
ISLANDS_CONTINUE = Invariant(
    "islands continue",
    "An island that no fault killed sees the end of its run, or of its rows.",
)
ROWS_ONCE = Invariant(
    "rows once",
    "For each fragment no turn is in the counted rows of two rosters, and no turn that "
    "a roster lists is dealt again.",
)
ROWS_HELD = Invariant(
    "rows held",
    "An island holds the turns of its answered claims until a release, over every "
    "crash; no other island is dealt them, and a roster counts only held turns.",
)
ROWS_TRUE = Invariant(
    "rows true",
    "The turns of an update are exactly the rows that its island's loop was given in "
    "the inner steps of the update.",
)
ROWS_ADD_UP = Invariant(
    "rows add up",
    "Trained, partly trained, refused, in hand and free rows are all rows, and those "
    "are trained that rosters of every fragment count.",
)
ROWS_NAMED = Invariant(
    "rows named",
    "When its data has ended a run, every row is trained, partly trained, refused, or "
    "was held by an island that died or was silent.",
)

ALL = (
    *(SAME_STATE, SAME_OUTCOME, DURABLE_FIRST, ROUNDS_IN_ORDER),
    *(COUNTED_ONCE, TRUE_MEAN, WORK_CONSERVED, TOKENS_CONSERVED),
    *(ZOMBIES_CHANGE_NOTHING, NOTHING_LEFT_OUT, EVERYONE_COUNTS, PROGRESS),
    *(BOUNDED, DEADLINES_BOUNDED, ISLANDS_CONTINUE, STANDS, AGES),
    *(ROWS_ONCE, ROWS_HELD, ROWS_TRUE, ROWS_ADD_UP, ROWS_NAMED),
)


IncarnationKey = tuple[str, int]
"""An island's name and incarnation."""

F64 = NDArray[np.float64]


@dataclass(frozen=True)
class PublishedUpdate:
    """An update, as its island published it first."""

    header: Header
    digest: bytes
    body: bytes

    @property
    def incarnation(self) -> IncarnationKey:
        return self.header.island, self.header.incarnation

    @cached_property
    def values(self) -> F64:
        """The decoded update; read-only."""
        out = np.empty(self.header.elements, np.float32)
        body = np.frombuffer(self.body, np.uint8)
        codec(self.header.codec).decode(body, out)
        return out.astype(np.float64)


@dataclass(frozen=True)
class CommittedRound:
    """An outcome, as it was committed."""

    header: Header
    body: bytes
    digest_after: bytes
    at_s: float
    num_live: int | None = None
    """Number of live members when the round closed; None if that is not known."""

    def entry(self, island: str) -> RosterEntry | None:
        assert self.header.roster is not None
        return self.header.roster.entry(island)

    def counts(self, update: PublishedUpdate) -> bool:
        """Return whether the roster counts exactly this update."""
        entry = self.entry(update.header.island)
        return (
            entry is not None
            and entry.digest == update.digest
            and entry.verdict is Verdict.COUNTED
        )


@dataclass
class History:
    """Updates by their digests, and outcomes by fragment and round."""

    updates: dict[bytes, PublishedUpdate] = field(default_factory=dict)
    commits: dict[tuple[int, int], CommittedRound] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    """The last committed round of each fragment."""

    excused: set[bytes] = field(default_factory=set)
    """Departing updates that arrived while their round was being closed."""

    origins: dict[bytes, bytes] = field(default_factory=dict)
    """Updates that others have brought into a later round, with their originals."""

    last_rounds: dict[int, int] = field(default_factory=dict)
    """The last round of each fragment of an asynchronous run, once it is decided."""

    has_gaps: bool = False
    """Whether an old copy of the journal was restored, which may lose outcomes."""

    _listings: dict[bytes, CommittedRound] = field(default_factory=dict)
    """The first round whose roster lists an update, by its digest."""

    def publish(self, header: Header, body: NDArray[np.uint8]) -> PublishedUpdate:
        """Note an update that is being sent; its first bytes stay."""
        digest = update_digest(header)
        update = self.updates.get(digest)
        if update is None:
            update = PublishedUpdate(header, digest, body.tobytes())
            self.updates[digest] = update
        return update

    def bring_forward(
        self, header: Header, body: NDArray[np.uint8], origin: PublishedUpdate
    ) -> None:
        """Note that an island puts an update of another one into a later round."""
        self.origins[self.publish(header, body).digest] = origin.digest

    def counting(self, update: PublishedUpdate) -> PublishedUpdate | None:
        """Return the update if it counted, or its counted copy of a later round."""
        copies = [
            key for key, origin in self.origins.items() if origin == update.digest
        ]
        for candidate in (update, *(self.updates[digest] for digest in copies)):
            commit = self.listing(candidate.digest)
            if commit is not None and commit.counts(candidate):
                return candidate
        return None

    def listing(self, digest: bytes) -> CommittedRound | None:
        """Return the round whose roster lists an update, counted or refused."""
        return self._listings.get(digest)

    def has_ended(self, fragment: int) -> bool:
        """Return whether a fragment has committed its last round, if it is known."""
        last = self.last_rounds.get(fragment)
        return last is not None and self.last.get(fragment, 0) >= last

    def commit(self, commit: CommittedRound) -> None:
        fragment, round = commit.header.fragment, commit.header.round
        if round <= self.last.get(fragment, 0):
            self._abandon(fragment, round)
        self.commits[fragment, round] = commit
        self.last[fragment] = round
        assert commit.header.roster is not None
        for entry in commit.header.roster.entries:
            if entry.digest:
                self._listings.setdefault(entry.digest, commit)

    def _abandon(self, fragment: int, round: int) -> None:
        """Forget the listings of rounds that are lost and repeated."""
        self._listings = {
            digest: commit
            for digest, commit in self._listings.items()
            if commit.header.fragment != fragment or commit.header.round < round
        }


class RoundCheck:
    """Checks every commit, every restart, and every state that islands hold."""

    def __init__(
        self,
        history: History,
        settings: RunSettings,
        layout: weights.Layout,
        report: Report,
    ) -> None:
        self._history, self._settings, self._layout = history, settings, layout
        self._staleness = settings.asynchronous.staleness
        self._report = report
        self._attempts: dict[tuple[int, int], CommittedRound] = {}
        self._founded: dict[int, bytes] = {}
        self._counted: dict[bytes, int] = {}
        """The rounds that counted updates, by digest."""

        self._steps: dict[tuple[IncarnationKey, int], int] = {}

    def attempted(self, commit: CommittedRound) -> None:
        """Note an outcome that the disk may still refuse."""
        self._attempts[commit.header.fragment, commit.header.round] = commit

    def committed(self, commit: CommittedRound) -> None:
        """Check an outcome that is durable."""
        self._require_next(commit)
        self._abandon(commit)
        self._history.commit(commit)
        self._require_listed_once(commit)
        for update in self._require_published(commit):
            self._require_once(commit, update)
            self._require_base(commit, update)
        self._require_weights(commit)
        self._require_mean(commit)
        self._require_share(commit)

    def opened(self, service: Service, *, was_put_back: bool = False) -> None:
        """Check the state of a coordinator that has just started.

        If an old copy of its disk was restored, it may lack committed rounds, and its
        journal will have gaps; all else must hold.
        """
        self._history.has_gaps |= was_put_back
        for fragment, state in enumerate(service.weights):
            last = self._history.last.get(fragment, 0)
            if state.round < last and not was_put_back:
                self._report(
                    DURABLE_FIRST,
                    COORDINATOR,
                    f"came back at round {state.round} of fragment {fragment}, and "
                    f"round {last} was committed",
                )
            attempt = self._attempts.get((fragment, last + 1))
            if state.round == last + 1 and attempt is not None:
                # The disk has the complete record of a write that had failed.
                self._history.commit(attempt)
            self.holds(COORDINATOR, fragment, state)

    def founded(self, states: Sequence[weights.FragmentState]) -> None:
        """Take the run's first weights as the state of round 0."""
        for fragment, state in enumerate(states):
            if state.round == 0:
                self._founded.setdefault(fragment, state.digest)

    def holds(self, holder: str, fragment: int, state: weights.FragmentState) -> None:
        """Check a fragment's state that an island or the coordinator holds."""
        if state.round == 0:
            expected = self._founded.get(fragment, state.digest)
        else:
            commit = self._history.commits.get((fragment, state.round))
            if commit is None:
                self._report(
                    DURABLE_FIRST,
                    holder,
                    f"holds round {state.round} of fragment {fragment}, which was "
                    "never committed",
                )
                return
            expected = commit.digest_after
        if state.digest != expected:
            self._report(
                SAME_STATE,
                holder,
                f"holds {state.digest.hex()[:12]} at round {state.round} of fragment "
                f"{fragment}, where others hold {expected.hex()[:12]}",
            )

    def learned(self, island: str, outcome: Outcome) -> None:
        """Check an outcome that an island received."""
        header = outcome.agreed.header
        commit = self._history.commits.get((header.fragment, header.round))
        if commit is None:
            self._report(
                DURABLE_FIRST,
                island,
                f"received round {header.round} of fragment {header.fragment}, which "
                "was never committed",
            )
            return
        has_same_body = not outcome.has_body or (
            outcome.agreed.body.tobytes() == commit.body
        )
        has_same_header = header is commit.header or header == commit.header
        if not header.is_sealed:
            # The body is collected, and so are its size and its pieces.
            sealed = header.sealed(
                body_bytes=commit.header.body_bytes, pieces=commit.header.pieces
            )
            has_same_header = sealed == commit.header
        if not has_same_header or not has_same_body:
            self._report(
                SAME_OUTCOME,
                island,
                f"received another outcome of round {header.round} of fragment "
                f"{header.fragment} than was committed",
            )

    def ended(self, service: Service) -> None:
        """Check the journal at the end: it has all rounds, each once."""
        if self._history.has_gaps:
            return
        for fragment, record in enumerate(service.journal.recorded.fragments):
            rounds = sorted(record.positions)
            if rounds != list(range(1, self._history.last.get(fragment, 0) + 1)):
                self._report(
                    ROUNDS_IN_ORDER,
                    COORDINATOR,
                    f"its journal has rounds {rounds} of fragment {fragment}",
                )

    def _require_next(self, commit: CommittedRound) -> None:
        fragment, round = commit.header.fragment, commit.header.round
        last = self._history.last.get(fragment, 0)
        last_round = self._last_round(fragment)
        is_beyond = last_round is not None and round > last_round
        is_next = round == last + 1 or self._history.has_gaps
        if not is_next or is_beyond:
            self._report(
                ROUNDS_IN_ORDER,
                COORDINATOR,
                f"committed round {round} of fragment {fragment} after round {last}; "
                f"the last one is {last_round}",
            )

    def _last_round(self, fragment: int) -> int | None:
        """Return the last round of a fragment, if it is known."""
        if self._settings.sync.is_async:
            return self._history.last_rounds.get(fragment)
        return self._settings.run.end_rounds

    def ends(self, fragment: int, last_round: int | None) -> None:
        """Check the last round of a fragment, which never changes once it is decided.

        Only an asynchronous run decides it while it runs: its fragments may end with
        different rounds.
        """
        before = self._history.last_rounds.get(fragment, last_round)
        if last_round is not None:
            self._history.last_rounds[fragment] = last_round
        if before != last_round and not self._history.has_gaps:
            self._report(
                ROUNDS_IN_ORDER,
                COORDINATOR,
                f"changes the last round of fragment {fragment} from {before} to "
                f"{last_round}",
            )

    def _abandon(self, commit: CommittedRound) -> None:
        """Forget the counted updates of rounds that are lost and repeated.

        An old journal was restored, and no island is left that has adopted them.
        """
        fragment, round = commit.header.fragment, commit.header.round
        if round > self._history.last.get(fragment, 0):
            return
        self._steps = {k: v for k, v in self._steps.items() if k[1] != fragment}
        for digest, update in self._history.updates.items():
            is_over = self._counted.get(digest, 0) >= round
            if update.header.fragment == fragment and is_over:
                del self._counted[digest]

    def _require_published(self, commit: CommittedRound) -> list[PublishedUpdate]:
        """Return the counted updates; report those that were never published."""
        assert commit.header.roster is not None
        updates = []
        for entry in commit.header.roster.counted:
            update = self._history.updates.get(entry.digest)
            label = self._label(commit, entry)
            key = (commit.header.fragment, label, entry.island)
            if update is None or key != _key(update):
                self._report(
                    COUNTED_ONCE,
                    entry.island,
                    f"round {commit.header.round} of fragment {key[0]} counts an "
                    f"update that was never published for round {label}",
                )
            else:
                updates.append(update)
        return updates

    def _label(self, commit: CommittedRound, entry: RosterEntry) -> int:
        """Return the round for which a listed update must have been sealed."""
        age = entry.age if self._settings.sync.is_async else 0
        return commit.header.round - age

    def _require_listed_once(self, commit: CommittedRound) -> None:
        """Report an update that the roster of an earlier round lists already."""
        header = commit.header
        assert header.roster is not None
        for entry in header.roster.entries:
            before = self._history.listing(entry.digest)
            if before is not None and before.header.round != header.round:
                self._report(
                    COUNTED_ONCE,
                    entry.island,
                    f"round {header.round} of fragment {header.fragment} lists an "
                    f"update that round {before.header.round} has listed",
                )

    def _require_base(self, commit: CommittedRound, update: PublishedUpdate) -> None:
        """Check that an update was made from the state before its label's round."""
        header, round = update.header, commit.header.round
        first = header.round - 1 if header.kind is FrameKind.UPDATE else 0
        last = header.round if header.kind is FrameKind.UPDATE else round
        bases = [
            self._digest_after(header.fragment, number) for number in range(first, last)
        ]
        is_known = None not in bases and not self._history.has_gaps
        if is_known and header.base not in bases:
            self._report(
                AGES,
                header.island,
                f"round {round} of fragment {header.fragment} counts an update for "
                f"round {header.round} with base {header.base.hex()[:12]}, which is "
                f"not a state of rounds {first} to {last - 1}",
            )

    def _digest_after(self, fragment: int, round: int) -> bytes | None:
        commit = self._history.commits.get((fragment, round))
        if round == 0:
            return self._founded.get(fragment)
        return commit.digest_after if commit is not None else None

    def _require_once(self, commit: CommittedRound, update: PublishedUpdate) -> None:
        header, key = update.header, (update.incarnation, update.header.fragment)
        origin = self._history.origins.get(update.digest, update.digest)
        round = commit.header.round
        before = self._counted.setdefault(origin, round)
        steps = header.progress.inner_steps
        # A departing update may have no steps, only the residual of its codec. And a
        # restored journal may give the same incarnation number twice. An update that
        # was brought into a later round may be older than the island's next one.
        may_go_back = self._history.has_gaps or origin != update.digest
        goes_back = steps < self._steps.get(key, 0) and not may_go_back
        if before != round or goes_back:
            self._report(
                COUNTED_ONCE,
                header.island,
                f"round {round} of fragment {header.fragment} counts inner "
                f"steps up to {steps}, and {self._steps.get(key, 0)} had counted in "
                f"round {before} or before",
            )
        if origin == update.digest:
            self._steps[key] = steps

    def _require_mean(self, commit: CommittedRound) -> None:
        header, layout = commit.header, self._layout[commit.header.fragment]
        assert header.roster is not None
        parts = [
            weights.Contribution(
                codec(update.header.codec),
                np.frombuffer(update.body, np.uint8),
                aged_weight(update.header.weight, entry.age, kind=self._staleness),
            )
            for entry in header.roster.counted
            if (update := self._history.updates.get(entry.digest)) is not None
        ]
        if header.gathered:
            mean = b"".join([part.body.tobytes() for part in parts])
        else:
            mean = self._mean(layout, parts)
        if mean != commit.body:
            self._report(
                TRUE_MEAN,
                COORDINATOR,
                f"the body of round {header.round} of fragment {header.fragment} is "
                f"not the mean of its {len(parts)} counted updates, nor these",
            )

    def _require_weights(self, commit: CommittedRound) -> None:
        """Check that the roster weighs each counted update by its age."""
        assert commit.header.roster is not None
        for entry in commit.header.roster.counted:
            update = self._history.updates.get(entry.digest)
            weight = update.header.weight if update else entry.weight
            if entry.weight != aged_weight(weight, entry.age, kind=self._staleness):
                self._report(
                    TRUE_MEAN,
                    entry.island,
                    f"weight {weight} at age {entry.age} became {entry.weight}",
                )

    def _require_share(self, commit: CommittedRound) -> None:
        """Check the share of an asynchronous round; others have none."""
        header = commit.header
        assert header.roster is not None
        assert header.outer is not None
        ages = [entry.age for entry in header.roster.counted]
        buffer, share = 0, 0.0
        if ages and self._settings.sync.is_async:
            buffer = self._buffer(commit)
            share = buffer_share(ages, kind=self._staleness, buffer=buffer)
        if (header.outer.buffer, header.outer.share) != (buffer, share):
            self._report(
                TRUE_MEAN,
                COORDINATOR,
                f"round {header.round} of fragment {header.fragment} has share "
                f"{header.outer.share} of buffer {header.outer.buffer}, and not "
                f"{share} of {buffer}",
            )

    def _buffer(self, commit: CommittedRound) -> int:
        """Return how many updates fill the buffer of a round."""
        buffer = self._settings.asynchronous.buffer
        if buffer is None:
            buffer = commit.num_live
        if buffer is None:  # it depends on the view of the island that decides
            assert commit.header.outer is not None
            buffer = commit.header.outer.buffer
        return max(buffer, 1)

    def _mean(
        self, layout: weights.FragmentLayout, parts: list[weights.Contribution]
    ) -> bytes:
        """Return the agreed body of these updates; a void round has none."""
        if not parts:
            return b""
        terms = weights.terms_of(layout, self._settings)
        try:
            return weights.reduce(
                layout, parts, down=terms.down, merge=terms.merge
            ).tobytes()
        except NonFinite:
            return b""


def _key(update: PublishedUpdate) -> tuple[int, int, str]:
    return update.header.fragment, update.header.round, update.header.island
