"""Moves a run between a coordinator and a bucket.

Into a bucket (`MoveIn`):
Rule 1: every object is put before `settings/0`, which is put last and once: without it
        there is no run in the bucket, and with it there is. That put is the move.
Rule 2: `run.json` names the move by its nonce. Objects with another nonce, or none, did
        not come with it.
Rule 3: every put is safe to repeat, so that an interrupted move starts again.

Out of a bucket (`MoveOut`):
Rule 4: the control `move` comes first. An island reads the controls after each roster,
        and applies no roster while the run moves: so every roster that was applied is
        older than the control, and the move has read it. Nor does the move apply one
        once it has described the run: the copy has the described rounds.
Rule 5: then rounds are closed whose updates no island will send again, even below the
        quorum. Islands send the other updates to the run's new address; one that
        departs reads the controls after its last put, and departs there if the run
        moves.
Rule 6: the first of the controls `moved` and `stay` decides where the run is. After
        `stay` the rosters count that were put meanwhile. Every call is safe to repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from atoll.bundle import Bundle
from atoll.errors import CorruptError, NoSuchObject, OutcomeLost, UsageError
from atoll.exchange.api.bodies import integer, listed, table
from atoll.exchange.api.messages import MAX_FRAGMENTS
from atoll.exchange.base import Constants, Frame
from atoll.exchange.bucket import claims, documents, keys, large_objects
from atoll.exchange.bucket.create import bundle_in, codes_in
from atoll.exchange.bucket.exchange import put_roster, roster_document
from atoll.exchange.bucket.keys import IncarnationKey
from atoll.exchange.bucket.member import LateUpdates
from atoll.exchange.bucket.outcomes import Outcomes
from atoll.exchange.bucket.reader import BucketReader
from atoll.exchange.bucket.states import BASES, ROSTERS, States, counted_progress
from atoll.exchange.bucket.view import RunView
from atoll.fields import JsonField
from atoll.protocol import HeldRound, TensorSpec
from atoll.protocol.coordinator_state import Move
from atoll.protocol.operators import ASYNC_STAYS
from atoll.runtime import Runtime
from atoll.settings import RunSettings
from atoll.store import Data, Store
from atoll.wire import blake3_digest, pack, verify_body
from atoll.wire.digests import Bytes

MAX_ROWS = 65_536
"""Most members, controls, rosters or updates that move along."""

MOVER = "atoll-move"
"""The writer of the entry that ends the log of claims: it is no island."""

_SLOT_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class FragmentProgress:
    """The progress of a fragment that its state does not contain."""

    round: int
    counted: tuple[documents.CountedProgress, ...]
    bases: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True)
class MovedRun:
    """All that moves with a run, apart from weights."""

    settings: documents.SettingsDocument
    run: documents.RunDocument
    controls: tuple[documents.ControlDocument, ...]
    members: tuple[documents.MemberDocument, ...]
    fragments: tuple[FragmentProgress, ...]
    rosters: tuple[documents.RosterDocument, ...]
    """The last ones of each fragment, for islands that lack their outcomes."""

    rows: claims.LedgerDocument | None = None
    """The ledger of rows, of a run that deals them out."""


_PROGRESS = table(
    FragmentProgress,
    {
        "round": integer(),
        "counted": listed(documents.COUNTED, max_items=MAX_ROWS),
        "bases": listed(documents.BASE, max_items=1024),
    },
)
MOVED_RUN: JsonField[MovedRun] = table(
    MovedRun,
    {
        "settings": documents.SETTINGS,
        "run": documents.RUN,
        "controls": listed(documents.CONTROL, max_items=MAX_ROWS),
        "members": listed(documents.MEMBER, max_items=MAX_ROWS),
        "fragments": listed(_PROGRESS, min_items=1, max_items=MAX_FRAGMENTS),
        "rosters": listed(documents.ROSTER, max_items=MAX_ROWS),
    },
    optional={"rows": claims.LEDGER},
)


class MoveIn:
    """Puts a run into a store: `bring` its objects, then `settle` it there."""

    def __init__(self, store: Store, runtime: Runtime, moved: MovedRun) -> None:
        self._store, self._runtime, self._moved = store, runtime, moved

    def bring(
        self,
        state: Callable[[int], Frame],
        constants: Constants,
    ) -> None:
        """Put every object except the settings. Safe to repeat."""
        moved = self._moved
        for constant in large_objects.constants_of(moved.run):
            parts = constants.parts(constant)
            large_objects.put_constant(
                self._store.put, moved.run.founding, constant, parts
            )
        begun = [
            fragment
            for fragment, progress in enumerate(moved.fragments)
            if progress.round
        ]
        digests = [
            b"" if fragment in begun else self._put_first(state(fragment))
            for fragment in range(len(moved.fragments))
        ]
        document = replace(moved.run, states=tuple(digests))
        run = documents.packed(documents.RUN, document, keys.RUN)
        rosters, heads = self._chained(documents.digest_of(run))
        for fragment in begun:
            frame, progress = state(fragment), moved.fragments[fragment]
            self._put_state(
                frame, progress, heads.get(fragment, documents.digest_of(run))
            )
        objects = [*self._small_objects(), *rosters]
        self._runtime.gather(
            [partial(self._store.put, key, parts) for key, parts in objects]
        )
        self._store.put_new(keys.RUN, run)

    def _chained(
        self, run: bytes
    ) -> tuple[list[tuple[str, list[Data]]], dict[int, bytes]]:
        """Return the objects of the rosters, in a new chain, and each fragment's last.

        The first one names `run.json`, as in a run that began in the bucket.
        """
        objects, heads = [], dict[int, bytes]()
        for roster in sorted(self._moved.rosters, key=lambda roster: roster.round):
            key = keys.roster(roster.fragment, roster.round)
            before = heads.get(roster.fragment, run)
            linked = replace(roster, before=before, controls=0, claims=None)
            data = documents.packed(documents.ROSTER, linked, key)
            heads[roster.fragment] = documents.digest_of(data)
            objects.append((key, data))
        return objects, heads

    def settle(self) -> None:
        """Put the settings, which completes the move.

        Raises:
            UsageError: the bucket holds another run, or the move was given up.
        """
        settings = documents.packed(
            documents.SETTINGS, self._moved.settings, keys.SETTINGS
        )
        if self._store.put_new(keys.SETTINGS, settings):
            return
        if not is_here(self._store, self._moved.run):
            raise UsageError(
                "Another run was moved to this URL first, or this move was given up. "
                "Run `atoll move --back`, then choose another URL."
            )

    def _put_first(self, frame: Frame) -> bytes:
        """Put a fragment's first state; return the digest of its header."""
        _require_round(frame, 0)
        key = keys.founding(self._moved.run.founding, frame.header.fragment)
        head = pack(frame.header)
        self._store.put(key, [head, frame.body.data])
        return blake3_digest(head)

    def _put_state(
        self, frame: Frame, progress: FragmentProgress, roster: bytes
    ) -> None:
        _require_round(frame, progress.round)
        header = frame.header
        parts = large_objects.put_parts(self._store.put, self._runtime, frame)
        document = documents.StateDocument(
            run=header.run,
            fragment=header.fragment,
            round=header.round,
            parts=parts,
            head=pack(large_objects.anonymous(header)),
            counted=progress.counted,
            bases=progress.bases,
            roster=roster,
        )
        key = keys.state_complete(header.fragment, header.round)
        self._store.put(key, documents.packed(documents.STATE, document, key))

    def _small_objects(self) -> Iterable[tuple[str, list[Data]]]:
        moved = self._moved
        for number, control in enumerate(moved.controls, start=1):
            key = keys.control(number)
            yield key, documents.packed(documents.CONTROL, control, key)
        if moved.rows is not None:
            key = keys.ledger(moved.rows.number)
            yield key, documents.packed(claims.LEDGER, moved.rows, key)
        for member in moved.members:
            beat, key = member.beat, keys.slot(member.slot)
            slot = documents.SlotDocument(run=moved.run.run, island=beat.island)
            yield key, documents.packed(documents.SLOT, slot, key)
            key = keys.member(beat.island, beat.incarnation)
            # Digests and numbers of the objects that it has read differ here.
            document = replace(member, heads=(), controls=0, wants=())
            yield key, documents.packed(documents.MEMBER, document, key)


def _require_round(frame: Frame, round: int) -> None:
    if frame.header.round != round:
        raise CorruptError(
            f"The {frame.header.name} was brought, and the run is at round {round}. "
            "Move it again."
        )


def is_here(store: Store, run: documents.RunDocument) -> bool:
    """Return whether a run was moved to a store, by the move its document names."""
    try:
        settings = documents.fetch(store, documents.SETTINGS, keys.SETTINGS)
        existing = documents.fetch(store, documents.RUN, keys.RUN)
    except (NoSuchObject, CorruptError):
        return False
    # The founding is the nonce of the move: no other object has it.
    return settings.run == existing.run == run.run and existing.founding == run.founding


def require_free(store: Store, *, url: str) -> None:
    """Return if a run can be moved to a store.

    Raises:
        UsageError: the store is not empty, or has no conditional put.
    """
    # Before the traits: finding them out may leave an object for a moment.
    if existing := next(iter(store.items("")), None):
        raise UsageError(
            f"There is something at {url} already: {existing.key}. A run moves only to "
            "an empty URL. Choose another URL."
        )
    if not store.traits.has_put_new:
        raise UsageError(
            f"The store at {url} lets a second object replace the first, so that a "
            "move could be both done and given up. Choose another store."
        )


ABANDONED = b"A run was on its way here, and has stayed where it was."
"""At the key of the settings: no run can ever come here by that move."""


def give_up(store: Store, run: documents.RunDocument) -> bool:
    """Make sure that a move never completes here; return False if it has."""
    store.put_new(keys.SETTINGS, [ABANDONED])
    return not is_here(store, run)


class MoveOut:
    """Takes a run out of a store: `begin`, read objects, then `settle` or `stay`."""

    def __init__(
        self, reader: BucketReader, settings: documents.SettingsDocument
    ) -> None:
        self._reader, self._settings = reader, settings
        self._store, self._view = reader.store, reader.view
        self._outcomes = Outcomes(reader, None)
        self._states = States(reader, self._outcomes)
        self._late_updates = LateUpdates(reader)
        self._number = 0
        """Of the control by which this move began."""

    @classmethod
    def open(cls, store: Store, runtime: Runtime, *, url: str) -> MoveOut:
        """Return a move of the run at a URL.

        Raises:
            UsageError: there is no run, or it cannot be moved.
        """
        reader = BucketReader.open(store, runtime, url=url)
        if reader.founded is None:
            raise UsageError(
                f"The run at {url} has no weights yet, so that nothing can move. "
                "Make it where it shall be: `atoll serve RUN.toml`."
            )
        if reader.view.is_async:
            raise UsageError(ASYNC_STAYS)
        decider = reader.view.settings.store.decider
        if decider is not None:
            raise UsageError(
                f"{decider!r} alone decides in the run at {url}, and a coordinator "
                f"refuses store.decider. Export its weights, and begin a run with them."
            )
        if not store.traits.has_put_new:
            raise UsageError(
                f"The store at {url} lets a second object replace the first, so that a "
                "move could be both done and given up. Export the run's weights, and "
                "begin another with them."
            )
        settings = documents.fetch(store, documents.SETTINGS, keys.SETTINGS)
        return cls(reader, settings)

    @property
    def run(self) -> str:
        """The run's id."""
        return self._reader.run

    @property
    def settings(self) -> RunSettings:
        """The settings in force, by the controls that were read last."""
        return self._view.settings

    def bundle(self) -> Bundle | None:
        """Return the bundle that defines the model, if there is one.

        Raises:
            CorruptError: it is missing, or not the one that the settings name.
        """
        return bundle_in(self._store, self._settings.settings)

    def codes(self) -> Iterator[tuple[str, bytes]]:
        """Yield the code that islands were launched with, by its digest."""
        return codes_in(self._store)

    def look(self) -> Move | None:
        """Return the move that is in progress or over; None: the run stays."""
        self._reader.read_controls()
        return self._view.moves.move

    def begin(self, target: str, nonce: str) -> Move:
        """Keep islands from closing rounds, and return the move that is in force.

        A move that was begun before continues, with its own nonce. Nothing is put for
        a move that is over.

        Raises:
            UsageError: the run moves to another target, or the move was given up.
        """
        move = self._ensure_move(target, nonce)
        self._number = self._view.moves.number
        self._reader.stops_for_moves = False
        for fragment in range(len(self._view.layout)):
            self._states.begin(fragment)
        _read_all_members(self._reader)
        if self._reader.rows is not None and not move.is_over:
            self._reader.rows.end_log(move.nonce, island=MOVER)
        if not move.is_over:
            for fragment in range(len(self._view.layout)):
                self._close_abandoned(fragment)
        return move

    def _ensure_move(self, target: str, nonce: str) -> Move:
        """Put the control `move`, unless one is in force."""
        while (move := self.look()) is None:
            self._put_control("move", target, nonce)
        if move.target != target:
            raise UsageError(
                f"The run {'has moved' if move.is_over else 'is moving'} to "
                f"{move.target}, and not to {target}. Name that one."
            )
        return move

    def _put_control(self, action: str, target: str, nonce: str) -> None:
        """Put a control at the next number; if another took it, the caller reads it."""
        control = documents.ControlDocument(
            run=self._reader.run, action=action, values={}, target=target, nonce=nonce
        )
        key = keys.control(len(self._view.controls) + 1)
        self._store.put_new(key, documents.packed(documents.CONTROL, control, key))

    def _close_abandoned(self, fragment: int) -> None:
        """Close rounds with updates that no island will send to the new address."""
        while True:
            self._reader.read_round(fragment)
            self._reader.read_standing(fragment)
            self._late_updates.republish(fragment)
            round = self._view.state.rounds[fragment]
            is_abandoned = round.is_abandoned(self._view.state.members)
            if self._view.state.never_opens(round.number, fragment=fragment) or not (
                is_abandoned or self._reader.departed_ahead(fragment)
            ):
                return
            self._require_in_progress()
            self._close(fragment, round.number)

    def _close(self, fragment: int, number: int) -> None:
        """Close an open round even below the quorum, unless it is closed meanwhile."""
        state = self._states.read(fragment)
        if self._reader.rows is not None:
            self._reader.rows.read()
        with self._reader.lock:
            now_s = self._reader.runtime.now_s()
            base = HeldRound(state.round, state.digest)
            self._reader.base_view.note_proven(fragment, base, now_s)
            round = self._view.state.rounds[fragment]
            roster = self._reader.update_view.roster_now(round, now_s)
            # While the run moves, no island applies a roster and makes a shard's mean.
            document = replace(
                roster_document(self._reader, round, roster, now_s), shards=()
            )
        if round.number == number:
            put_roster(self._reader, document)

    def _require_in_progress(self) -> Move:
        """Return the move that was begun by this object.

        Raises:
            UsageError: there is none, or it was given up.
        """
        move = self._view.moves.move
        if move is None or self._view.moves.number != self._number:
            raise UsageError(
                "The move was given up, and the run continues in its store. "
                "Run `atoll move` again to begin another."
            )
        return move

    def belongings(self) -> MovedRun:
        """Return all that moves with the run, apart from weights.

        Raises:
            UsageError: the move was given up.
        """
        self.look()
        move = self._require_in_progress()
        ledger = self._ledger()
        # A roster whose put was in flight when the move began may come during the copy.
        self._reader.stops_for_moves = True
        founded = self._reader.founded
        assert founded is not None
        fragments = range(len(self._view.layout))
        return MovedRun(
            settings=self._settings,
            run=replace(founded, founding=move.nonce, states=()),
            controls=tuple(self._view.in_force),
            members=_members(self._view),
            fragments=tuple(_progress(self._view, fragment) for fragment in fragments),
            rosters=tuple(
                roster
                for fragment in fragments
                for roster in _last_rosters(self._reader, fragment)
            ),
            rows=ledger,
        )

    def _ledger(self) -> claims.LedgerDocument | None:
        """Return the ledger of rows after the described rounds, if there is one."""
        rows, fragments = self._reader.rows, range(len(self._view.layout))
        if rows is None:
            return None
        rows.read()
        while not all(map(rows.is_current, fragments)):
            rows.read()
        assert rows.log is not None
        # The target begins its own log.
        return replace(rows.log.document(self._reader.run), number=0)

    def state(self, fragment: int) -> Frame:
        """Return anchor and velocity of a fragment after its last closed round."""
        state = self._states.read(fragment)
        outer = self._view.terms(fragment).outer
        return Frame(
            *state.to_frame(run=self._reader.run, fragment=fragment, outer=outer)
        )

    def parts(self, constant: TensorSpec, first: int = 0) -> Iterator[Bytes]:
        """Yield a constant that the run keeps, in parts."""
        founded = self._reader.founded
        assert founded is not None
        return large_objects.ConstantObjects(self._store, founded).parts(
            constant, first
        )

    def agreed(self, fragment: int, round: int) -> Frame:
        """Return the agreed frame of a round.

        Raises:
            OutcomeLost: its means were removed.
        """
        frame = self._outcomes.frame(fragment, round)
        if not frame.header.is_sealed:
            raise OutcomeLost(
                f"The means of round {round} of fragment {fragment} have been removed. "
                "The state has all of it."
            )
        verify_body(frame.header, frame.body)
        return frame

    def settle(self) -> bool:
        """Put the control `moved`, which completes the move.

        False: the move was given up first, and the run is in its store.
        """
        self._decide("moved")
        move = self._view.moves.move
        is_own = self._view.moves.number == self._number
        return is_own and move is not None and move.is_over

    def stay(self) -> bool:
        """Give up a move that is in progress; return False if the run is elsewhere."""
        self.look()
        self._number = self._view.moves.number
        self._decide("stay")
        move = self._view.moves.move
        return move is None or not move.is_over

    def _decide(self, action: str) -> None:
        """Put a control about this move, unless one has decided it."""
        while True:
            self._reader.read_controls()
            move = self._view.moves.move
            if move is None or not self._view.moves.is_in_progress(self._number):
                return
            self._put_control(action, move.target, move.nonce)


def _read_all_members(reader: BucketReader) -> None:
    """Read every island's latest incarnation by its key: a list may lag behind."""
    reader.members.read()
    slots = {name: document.slot for name, document in reader.view.documents.items()}
    slot = 0
    while slot <= max(slots.values(), default=-1) + 1:  # there may be gaps
        try:
            slots.setdefault(_island_of(reader, keys.slot(slot)), slot)
        except NoSuchObject:
            pass
        except CorruptError as exc:
            reader.warn_once(str(exc))
        slot += 1
    for name in slots:
        _read_later_incarnations(reader, name)


def _island_of(reader: BucketReader, key: str) -> str:
    """Return the island that has a slot.

    Raises:
        NoSuchObject: none has.
        CorruptError: the object is damaged.
    """
    data = bytes(reader.store.get(key, 0, _SLOT_BYTES))
    if data.startswith(b"{"):
        return documents.parse(documents.SLOT, data, key=key, run=reader.run).island
    try:
        return data.decode()  # of 0.1.0: the name alone
    except UnicodeDecodeError as exc:
        raise CorruptError(
            f"{key} holds no island's name. {documents.RESTORE}"
        ) from exc


def _read_later_incarnations(reader: BucketReader, name: str) -> None:
    """Read the incarnations of an island that come after the last known one."""
    while True:
        latest = reader.view.documents.get(name)
        number = latest.beat.incarnation + 1 if latest else 1
        reader.members.read_incarnation(IncarnationKey(keys.slug(name), number))
        if reader.view.documents.get(name) is latest:
            return


def _members(view: RunView) -> tuple[documents.MemberDocument, ...]:
    """Return every island's last document; an evicted island has left."""
    members = view.state.members.known
    return tuple(
        replace(document, has_left=members[name].has_left)
        for name, document in sorted(view.documents.items())
    )


def _progress(view: RunView, fragment: int) -> FragmentProgress:
    state = view.state
    round = state.rounds[fragment]
    return FragmentProgress(
        round=round.number - 1,
        counted=counted_progress(state, fragment),
        bases=round.bases[-BASES:],
    )


def _last_rosters(
    reader: BucketReader, fragment: int
) -> Iterator[documents.RosterDocument]:
    """Yield the last rosters of a fragment, for islands that lack their outcomes."""
    number = reader.view.number(fragment)
    for round in range(max(1, number - ROSTERS), number):
        try:
            roster = reader.closed_roster(fragment, round)
            # The target links them into its own chain.
            yield replace(roster, before=b"", controls=0, claims=None, digest=b"")
        except NoSuchObject:
            continue  # from before the run was moved into this bucket
