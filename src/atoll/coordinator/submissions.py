"""Checks of uploads: founding states, lost states, and rounds reduced by a collective.

Rule 1: nothing here changes the run: an upload is verified, or refused with the reason.
Rule 2: the state machine decides about a collective's round as about any other: its
        roster, and whether it may close. If other islands take part too, the collective
        uploads its updates like every island.
Rule 3: a query changes nothing, and an agreed round is committed immediately or changes
        nothing: no round waits for a collective that has died.
Rule 4: every island vouches for the agreed frame with its own key. All of the frame is
        checked against the state machine except the body, which only they know.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from atoll.errors import CorruptError, Refused, Unreachable
from atoll.exchange import Frame, Outcome
from atoll.exchange.calls import AgreedCall, FoundCall, RecoverCall, Reply
from atoll.journal import (
    RecordedRun,
)
from atoll.protocol import Reception, refuse_all
from atoll.protocol.coordinator import advance
from atoll.protocol.coordinator_state import CoordinatorState, all_heard
from atoll.protocol.events import Action, CloseRound, UpdatesGathered
from atoll.protocol.membership import Member
from atoll.settings import RunSettings
from atoll.weights import (
    FragmentLayout,
    FragmentState,
    Layout,
    Terms,
    require_state,
    terms_of,
)
from atoll.weights.verify import exceeds_largest, require_terms
from atoll.wire import MOMENTS, FrameKind, Header, codec, piece_count, verify_body
from atoll.wire.frame import voucher
from atoll.wire.header import MAX_GATHERED_PIECES

HEADER_BYTES, PIECE_BYTES = 8192, 32
"""Largest size of a frame's header without pieces and roster, and of a piece's
digest."""


def states_bytes(layout: Layout, settings: RunSettings) -> int:
    """Return the size of the states of all fragments."""
    vectors = 1 + MOMENTS[settings.outer.optimizer]
    return sum(4 * vectors * fragment.elements for fragment in layout)


def header_bytes(elements: int) -> int:
    """Return the largest header of an update or a state with `elements` elements."""
    most_vectors = 1 + max(MOMENTS.values())
    return HEADER_BYTES + PIECE_BYTES * piece_count(most_vectors * elements)


def outcome_header_bytes(fragment: FragmentLayout, terms: Terms) -> int:
    """Return the largest header of an outcome or a state, without a roster.

    The updates in a gathered outcome take at most the bytes of their mean in fp32.
    """
    elements = fragment.elements
    if not terms.gathers:
        return header_bytes(elements)
    bodies = terms.down.body_bytes(elements) // terms.up.body_bytes(elements)
    pieces = min(bodies * piece_count(elements), MAX_GATHERED_PIECES)
    return max(header_bytes(elements), HEADER_BYTES + PIECE_BYTES * pieces)


def reserve_bytes(layout: Layout, settings: RunSettings) -> int:
    """Return the disk space that the next commits and compactions need.

    Of every fragment two rounds may be complete, the open one and that of departing
    islands after it; and compaction writes a state before it removes an older one.
    """
    terms = [terms_of(fragment, settings) for fragment in layout]
    means = sum(
        its.down.body_bytes(fragment.elements)
        for fragment, its in zip(layout, terms, strict=True)
    )
    heads = sum(map(outcome_header_bytes, layout, terms))
    return 2 * means + states_bytes(layout, settings) + 3 * heads


def is_same_founding(call: FoundCall, recorded: RecordedRun) -> bool:
    """Return whether a call repeats the founding of the run: its reply was lost."""
    founded = [fragment.digests.get(0) for fragment in recorded.fragments]
    return founded == [frame.header.base for frame in call.states]


def founding_states(
    call: FoundCall, layout: Layout, settings: RunSettings
) -> list[FragmentState]:
    """Return the run's first weights.

    Raises:
        Refused: there is not one state for each fragment, or one is of another shape.
        CorruptError: a body does not match its header.
    """
    if len(call.states) != len(layout):
        raise Refused(
            f"{len(call.states)} states cannot found a run of {len(layout)} "
            "fragments. Bring one for each."
        )
    for frame, fragment in zip(call.states, layout, strict=True):
        require_state(frame.header, fragment, terms_of(fragment, settings), round=0)
    return [verified_state(frame, is_given=call.is_given) for frame in call.states]


def verified_state(frame: Frame, *, is_given: bool = False) -> FragmentState:
    """Return the state in a frame; it reuses the frame's memory only if it is given.

    Raises:
        CorruptError: the body does not match the header.
    """
    verify_body(frame.header, frame.body)
    may_keep = is_given and frame.body.flags.writeable
    body = frame.body if may_keep else frame.body.copy()
    return FragmentState.from_frame(frame.header, body)


def lost_outcomes(call: RecoverCall, committed: int, round: int) -> tuple[Header, ...]:
    """Return the outcomes after the round `committed` that lead to a state.

    Raises:
        Refused: they are not the last ones of its fragment, without a gap.
    """
    expected = range(round - len(call.outcomes) + 1, round + 1)
    fragment = call.state.header.fragment
    for number, header in zip(expected, call.outcomes, strict=True):
        identity = (header.kind, header.run, header.fragment, header.round)
        if identity != (FrameKind.AGREED, call.state.header.run, fragment, number):
            raise Refused(
                f"The {header.name} is not the outcome of round {number}, which leads "
                f"to the state of round {round}. Bring the last outcomes in order."
            )
    return tuple(outcome for outcome in call.outcomes if outcome.round > committed)


OVERFLOWS = "norm: the mean overflows"
_BLANK = bytes(PIECE_BYTES)


@dataclass(frozen=True)
class CollectiveClose:
    """The state and the actions after a collective closes a round."""

    state: CoordinatorState
    close: CloseRound
    others: list[Action]
    """The other actions of the state machine."""


@dataclass(frozen=True)
class CollectiveRound:
    """A fragment that a collective reduces, as the coordinator knows it."""

    layout: FragmentLayout
    terms: Terms
    base: bytes
    """The digest of its state, on which the round is reduced."""

    def judge(
        self, call: AgreedCall, state: CoordinatorState, now_s: float
    ) -> Reply | CollectiveClose:
        """Return the outcome of a round with these updates, or its reception.

        Raises:
            Refused: the agreed frame is not the outcome of the round.
            Unreachable: no round closes now: ask again.
        """
        if state.rounds[call.fragment].staged:
            return Reception.WANTED  # other islands take part too
        self._require_updates(call.updates)
        after, actions = advance(state, UpdatesGathered(call.updates), now_s)
        close = next(
            (
                action
                for action in actions
                if isinstance(action, CloseRound) and action.fragment == call.fragment
            ),
            None,
        )
        if close is None:
            _require_closing(state, call.fragment, now_s)
            return Reception.WANTED
        expected = self._expected(close, run=state.run)
        if call.agreed is None:
            frame = Frame(expected, np.empty(0, np.uint8))
            return Outcome(frame, state.position(now_s))
        _require_agreed(call, expected, state.members.known)
        others = [action for action in actions if action is not close]
        return CollectiveClose(after, close, others)

    def most_bytes(self, islands: int) -> int:
        """Return the largest body of a call in a run with `islands` islands."""
        head = HEADER_BYTES + PIECE_BYTES * piece_count(self.layout.elements)
        body_bytes = self.terms.down.body_bytes(self.layout.elements)
        return body_bytes + (islands + 1) * head

    def _expected(self, close: CloseRound, *, run: str) -> Header:
        """Return the header of a round's outcome, its pieces still blank."""
        counted = bool(close.roster.counted)
        header = Header(
            kind=FrameKind.AGREED,
            run=run,
            fragment=close.fragment,
            round=close.round,
            epoch=close.epoch,
            base=self.base,
            codec=self.terms.down.name,
            elements=self.layout.elements if counted else 0,
            weight=0,
            outer=close.outer,
            roster=close.roster,
        )
        if not counted:
            return header
        return header.sealed(
            body_bytes=self.terms.down.body_bytes(header.elements),
            pieces=(_BLANK,) * piece_count(header.elements),
        )

    def _require_updates(self, updates: tuple[Header, ...]) -> None:
        """Check that updates fit the fragment, one of each island.

        Raises:
            Refused: they are not.
        """
        if len({update.island for update in updates}) != len(updates):
            raise Refused("An island is named twice. Bring one update of each.")
        for update in updates:
            if not update.refused:
                require_terms(update, self.layout, self.terms)


def _require_closing(state: CoordinatorState, fragment: int, now_s: float) -> None:
    """Check that a round stays open only because other islands take part."""
    is_heard = all_heard(state.members, now_s)
    if state.is_held or not is_heard or state.lost_state(fragment, now_s):
        raise Unreachable(
            f"No round of fragment {fragment} closes now: the run is paused, or has "
            "restarted and does not know yet the rounds of its islands. Ask again."
        )


def _require_agreed(
    call: AgreedCall, expected: Header, members: Mapping[str, Member]
) -> None:
    """Check that a frame is the outcome of a round, and that all islands vouch for it.

    Raises:
        Refused: it is another round's, has another roster, or is not vouched for.
    """
    assert call.agreed is not None
    header = call.agreed.header
    if header.elements != expected.elements:
        expected = _void(expected)
    if replace(header, pieces=expected.pieces) != expected:
        raise Refused(
            f"The {header.name} is not what this round comes to: its roster, base or "
            "outer values are others. Ask for the roster again."
        )
    vouchers = (
        *call.vouchers,
        *[b""] * len(call.updates),
    )  # a missing voucher is empty
    for island, shown in zip(
        [update.island for update in call.updates], vouchers, strict=False
    ):
        if not hmac.compare_digest(voucher(members[island].key, header), shown):
            raise Refused(
                f"Island {island!r} does not vouch for the {header.name}: it holds "
                "other bytes. Bring the updates themselves."
            )


def _void(expected: Header) -> Header:
    """Return the header of a round whose mean overflows."""
    assert expected.roster is not None
    roster = refuse_all(expected.roster, OVERFLOWS)
    return replace(expected, elements=0, body_bytes=0, pieces=(), roster=roster)


def require_sound(frame: Frame) -> None:
    """Check that an agreed frame's body verifies and can be applied.

    Needs no lock: it reads only the frame.

    Raises:
        CorruptError: the body does not verify, or holds values that are not finite or
            with which an outer step could overflow.
    """
    header = frame.header
    verify_body(header, frame.body)
    if not header.elements:
        return
    if exceeds_largest(codec(header.codec), frame.body, header.elements):
        raise CorruptError(
            f"The {header.name} holds values that {header.codec} cannot hold, or that "
            "no mean of counted updates has. Bring the updates themselves."
        )
