"""Moves a run out of its bucket to a coordinator.

Rule 1: the control `move` comes first. Then each fragment is frozen by a roster that
        names it: no round can be closed here any more, however late an island reads
        the control.
Rule 2: only frozen updates move along. An island that came too late for that reads the
        control before it leaves, and brings its own update.
Rule 3: the first of `moved` and `stay` decides where the run is. All is safe to repeat.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from atoll.bundle import Bundle
from atoll.errors import UsageError
from atoll.exchange.base import Frame
from atoll.exchange.bucket import documents, keys
from atoll.exchange.bucket import round_closer as luggage
from atoll.exchange.bucket.create import bundle_in, codes_in
from atoll.exchange.bucket.documents import (
    ControlDocument,
    RosterDocument,
    SettingsDocument,
    fetch,
    fetch_roster,
    packed,
)
from atoll.exchange.bucket.large_objects import ConstantObjects
from atoll.exchange.bucket.move_in import MovedRun, UnclaimedUpdate
from atoll.exchange.bucket.outcomes import Outcomes
from atoll.exchange.bucket.reader import BucketReader
from atoll.exchange.bucket.round_closer import LateUpdates
from atoll.exchange.bucket.runtime import Timing
from atoll.exchange.bucket.states import States
from atoll.protocol import TensorSpec
from atoll.protocol.coordinator_state import Move
from atoll.settings import RunSettings
from atoll.store import Store
from atoll.wire import Header, Roster
from atoll.wire.digests import Bytes


class MoveOut:
    """Takes a run out of a store: `begin`, read all it has, then `settle` or `stay`."""

    def __init__(self, lookout: BucketReader, settings: SettingsDocument) -> None:
        self._lookout, self._settings = lookout, settings
        self._store, self._sight = lookout.store, lookout.sight
        self._outcomes = Outcomes(lookout, None)
        self._states = States(lookout, self._outcomes)
        self._leftovers = LateUpdates(lookout)
        self._left: dict[UnclaimedUpdate, Header] = {}
        self._number = 0
        """Of the word by which this move began."""

    @classmethod
    def open(cls, store: Store, timing: Timing, *, url: str) -> MoveOut:
        """Return the way out for the run at a URL.

        Raises:
            UsageError: there is none, or it cannot go anywhere.
        """
        lookout = BucketReader.open(store, timing, url=url)
        if lookout.founded is None:
            raise UsageError(
                f"The run at {url} has no weights yet, so that nothing can move. "
                "Make it where it shall be: `atoll serve RUN.toml`."
            )
        decider = lookout.sight.settings.store.decider
        if decider is not None:
            raise UsageError(
                f"{decider!r} alone decides in the run at {url}, and a coordinator "
                f"refuses store.decider. Export its weights, and begin a run with them."
            )
        if not store.traits.has_put_new:
            raise UsageError(
                f"The store at {url} lets a second object replace the first, so that a "
                "move could be done and given up at once. Export the run's weights, "
                "and begin another with them."
            )
        settings = fetch(store, documents.SETTINGS, keys.SETTINGS)
        return cls(lookout, settings)

    @property
    def run(self) -> str:
        """The run's id."""
        return self._lookout.run

    @property
    def settings(self) -> RunSettings:
        """What is in force, as last looked."""
        return self._sight.settings

    def bundle(self) -> Bundle | None:
        """Return what defines the model, if anything does.

        Raises:
            CorruptError: it is not what the settings name, or is not there.
        """
        return bundle_in(self._store, self._settings.settings)

    def codes(self) -> Iterator[tuple[str, bytes]]:
        """Yield the code that islands were launched with, by its digest."""
        return codes_in(self._store)

    def look(self) -> Move | None:
        """Return the move that is under way or over; None: the run stays."""
        self._lookout.look_controls()
        return self._sight.moves.move

    def begin(self, target: str, nonce: str) -> Move:
        """Keep every round from closing, and return the move that stands.

        One that was begun before goes on, with its own nonce. Nothing is put for one
        that is over.

        Raises:
            UsageError: the run goes elsewhere, or somebody has given the move up.
        """
        move = self._say_move(target, nonce)
        self._number = self._sight.moves.number
        for fragment in range(len(self._sight.layout)):
            self._states.begin(fragment)
            if not move.is_over:
                self._freeze(fragment)
        return move

    def _say_move(self, target: str, nonce: str) -> Move:
        """Say that the run goes, unless that was said."""
        while (move := self.look()) is None:
            self._put_word("move", target, nonce)
        if move.target != target:
            raise UsageError(
                f"The run {'has moved' if move.is_over else 'is on its way'} to "
                f"{move.target}, and not to {target}. Name that one."
            )
        return move

    def _put_word(self, action: str, target: str, nonce: str) -> None:
        """Say something at the next free number; whoever else took it is read next."""
        said = ControlDocument(
            run=self._lookout.run, action=action, values={}, target=target, nonce=nonce
        )
        key = keys.control(len(self._sight.controls) + 1)
        self._store.put_new(key, packed(documents.CONTROL, said, key))

    def _freeze(self, fragment: int) -> None:
        """Put a roster that names the move where the open round would be closed."""
        while True:
            self._lookout.follow(fragment)  # and past what moves have left before
            self._require_under_way()
            round = self._sight.state.rounds[fragment]
            document = RosterDocument(
                run=self._lookout.run,
                fragment=fragment,
                round=round.number,
                epoch=self._sight.state.epoch,
                base=round.base,
                outer=round.outer,
                shards=(),
                roster=Roster(()),
                move=self._number,
                before=self._sight.heads[fragment].digest,
                controls=len(self._sight.controls),
            )
            key = self._lookout.roster_key(fragment, round.number)
            self._store.put_new(key, packed(documents.ROSTER, document, key))
            if fetch_roster(self._store, key).move == self._number:
                return

    def _require_under_way(self) -> Move:
        """Return the move that was begun here.

        Raises:
            UsageError: none was, or it was given up.
        """
        move = self._sight.moves.move
        if move is None or self._sight.moves.number != self._number:
            raise UsageError(
                "The move was given up, and the run goes on in its store. "
                "Say `atoll move` again to begin another."
            )
        return move

    def belongings(self) -> MovedRun:
        """Return all that the run takes along, apart from weights and updates.

        Raises:
            UsageError: the move was given up.
        """
        self.look()
        move = self._require_under_way()
        founded = self._lookout.founded
        assert founded is not None
        luggage.look_everybody(self._lookout)
        fragments = range(len(self._sight.layout))
        self._left.clear()
        for fragment in fragments:
            self._look_updates(fragment)
        return MovedRun(
            settings=self._settings,
            run=replace(founded, founding=move.nonce, states=()),
            controls=tuple(self._sight.in_force),
            members=luggage.members(self._sight),
            fragments=tuple(luggage.progress(self._sight, each) for each in fragments),
            rosters=tuple(
                roster
                for fragment in fragments
                for roster in luggage.last_rosters(self._lookout, fragment)
            ),
            left=tuple(self._left),
        )

    def _look_updates(self, fragment: int) -> None:
        """Find what stands in the open round, and what departed ahead of it."""
        self._lookout.look_round(fragment)
        self._lookout.look_stands(fragment)
        self._leftovers.bring(fragment)
        self._left.update(luggage.standing(self._lookout, fragment))

    def state(self, fragment: int) -> Frame:
        """Return anchor and velocity of a fragment after its last closed round."""
        state = self._states.read(fragment)
        outer = self._sight.terms(fragment).outer
        return Frame(
            *state.to_frame(run=self._lookout.run, fragment=fragment, outer=outer)
        )

    def parts(self, constant: TensorSpec, first: int = 0) -> Iterator[Bytes]:
        """Yield a constant that the run keeps, in parts."""
        founded = self._lookout.founded
        assert founded is not None
        return ConstantObjects(self._store, founded).parts(constant, first)

    def agreed(self, fragment: int, round: int) -> Frame:
        """Return what a round came to.

        Raises:
            OutcomeLost: its means are not kept any more.
        """
        return luggage.agreed(self._outcomes, fragment, round)

    def update(self, left: UnclaimedUpdate) -> Frame:
        """Return an update that comes along.

        Raises:
            UsageError: there is none.
            CorruptError: its bytes do not verify.
        """
        header = self._left.get(left)
        if header is None:
            raise UsageError(
                f"No update of island {left.island!r} stands for round {left.round} of "
                f"fragment {left.fragment}."
            )
        return luggage.whole_update(self._lookout, header)

    def settle(self) -> bool:
        """Say that the run is where it goes: the moment of the move.

        False: it was given up first, and the run is in its store.
        """
        self._decide("moved")
        move = self._sight.moves.move
        is_this = self._sight.moves.number == self._number
        return is_this and move is not None and move.is_over

    def stay(self) -> bool:
        """Say that the run stays, if it is on its way; False: it is elsewhere."""
        self.look()
        self._number = self._sight.moves.number
        self._decide("stay")
        move = self._sight.moves.move
        return move is None or not move.is_over

    def _decide(self, action: str) -> None:
        """Say a word about this move, unless one was said that decides."""
        while True:
            self._lookout.look_controls()
            move = self._sight.moves.move
            if move is None or not self._sight.moves.is_under_way(self._number):
                return
            self._put_word(action, move.target, move.nonce)
