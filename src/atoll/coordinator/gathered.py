"""Rounds that islands of a collective have reduced among themselves.

Rule 1: the machine decides, as for any round: who counts, and whether it may close. A
        round that others take part in is not theirs alone, and they bring their updates
        like everybody.
Rule 2: asking changes nothing, and bringing commits at once or changes nothing: no
        round waits for a collective that has died.
Rule 3: every island vouches for the agreed frame by its own key, and the frame is what
        the machine would have made it but for the body, which only they can know.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from atoll.coordinator.brought import HEADER_BYTES, PIECE_BYTES
from atoll.errors import CorruptError, Refused, Unreachable
from atoll.exchange import AgreedCall, Frame, Outcome, Reply
from atoll.protocol import Reception, refuse_all
from atoll.protocol.coordinator import advance
from atoll.protocol.events import Action, Close, Gathered
from atoll.protocol.membership import Member
from atoll.protocol.recovery import all_heard
from atoll.protocol.run_state import CoordinatorState
from atoll.weights import FragmentLayout, Terms
from atoll.weights.body_norm import exceeds_largest
from atoll.weights.verify import require_terms
from atoll.wire import Header, Kind, codec, piece_count, verify_body
from atoll.wire.voucher import voucher

OVERFLOWS = "norm: the mean overflows"
_BLANK = bytes(PIECE_BYTES)


@dataclass(frozen=True)
class Closing:
    """That a round closes with what a collective has brought."""

    state: CoordinatorState
    close: Close
    others: list[Action]
    """What else the machine wants done."""


@dataclass(frozen=True)
class Gathering:
    """What a coordinator knows of a fragment that a collective asks about."""

    layout: FragmentLayout
    terms: Terms
    base: bytes
    """The digest of its state, on which the round is reduced."""

    def judge(
        self, call: AgreedCall, state: CoordinatorState, now_s: float
    ) -> Reply | Closing:
        """Return what a round comes to by these updates, or that others take part.

        Raises:
            Refused: what was brought is not what the round comes to.
            Unreachable: no round closes now: ask again.
        """
        if state.rounds[call.fragment].staged:
            return Reception.WANTED  # of others: this round is not theirs alone
        self._require_updates(call.updates)
        after, actions = advance(state, Gathered(call.updates), now_s)
        close = next(
            (
                each
                for each in actions
                if isinstance(each, Close) and each.fragment == call.fragment
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
        others = [each for each in actions if each is not close]
        return Closing(after, close, others)

    def most_bytes(self, islands: int) -> int:
        """Return how large the body of a call can be in a run that knows so many."""
        head = HEADER_BYTES + PIECE_BYTES * piece_count(self.layout.elements)
        body_bytes = self.terms.down.body_bytes(self.layout.elements)
        return body_bytes + (islands + 1) * head

    def _expected(self, close: Close, *, run: str) -> Header:
        """Return the header of a round's outcome, its pieces still blank."""
        counted = bool(close.roster.counted)
        header = Header(
            kind=Kind.AGREED,
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
        """Return when updates are what the fragment takes, one of each island.

        Raises:
            Refused: they are not.
        """
        if len({each.island for each in updates}) != len(updates):
            raise Refused("An island is named twice. Bring one update of each.")
        for each in updates:
            if not each.refused:
                require_terms(each, self.layout, self.terms)


def _require_closing(state: CoordinatorState, fragment: int, now_s: float) -> None:
    """Return if only others that take part keep a round from closing."""
    is_heard = all_heard(state.members, now_s)
    if state.is_held or not is_heard or state.lost_state(fragment, now_s):
        raise Unreachable(
            f"No round of fragment {fragment} closes now: the run is paused, or has "
            "restarted and does not know yet what its islands have. Ask again."
        )


def _require_agreed(
    call: AgreedCall, expected: Header, known: Mapping[str, Member]
) -> None:
    """Return when a frame is the outcome of a round, by its islands' own word.

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
    words = (*call.vouchers, *[b""] * len(call.updates))  # who says nothing lacks one
    for island, said in zip(
        [each.island for each in call.updates], words, strict=False
    ):
        if not hmac.compare_digest(voucher(known[island].key, header), said):
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
    """Return when an agreed frame's body is what it says, and can be applied.

    Needs no lock: it looks at nothing but the frame.

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
