"""Who holds the state of the training, who wants it, and who gives it: by rosters.

An island that joins late, or has fallen behind, takes part in the open rounds with
updates that it refuses itself: they say that it *wants* the state. Everyone reads the
same roster, so everyone knows the same donor without a word between them.

Rule 1: the donor is the first island whose update counted, by name; else the first that
        abstained, for it holds the state too.
Rule 2: where nobody but wanting islands took part, nobody holds the state. Rounds of
        fragment 0 then elect who has come furthest: its state is the run's from there.
Rule 3: a want has a number and is served once, however many rosters list it.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.wire import Header, Roster, RosterEntry, Verdict

WANTS = "torchft: wants the state"
ABSTAINS = "torchft: has the state, and contributes from the next round on"

Life = tuple[str, int]
"""An island and its incarnation."""

Served = dict[str, tuple[int, int]]
"""Of each island, the incarnation and the number of the want that was served last."""


@dataclass(frozen=True)
class Handover:
    """One island gives its state to those that want it."""

    number: int
    """Different for every round that calls for one."""

    donor: Life
    donor_has_state: bool
    """False: nobody has trained in this run, or nobody says that it did."""

    wanting: tuple[RosterEntry, ...]


def handover_of(agreed: Header, *, num_fragments: int) -> Handover | None:
    """Return what a round's roster calls for, whoever was served before."""
    roster = roster_of(agreed)
    wanting = tuple(entry for entry in roster.entries if is_want(entry))
    if not wanting:
        return None
    number = agreed.round * num_fragments + agreed.fragment
    holders = [*roster.counted, *filter(_abstains, roster.entries)]
    if holders:
        return Handover(number, _life(holders[0]), True, wanting)
    if not elects(agreed):
        return None
    donor = max(wanting, key=lambda entry: entry.inner_steps)
    return Handover(number, _life(donor), donor.inner_steps > 0, wanting)


def elects(agreed: Header) -> bool:
    """Return whether a round has found that nobody holds the state."""
    entries = roster_of(agreed).entries
    took_part = [entry for entry in entries if entry.verdict is not Verdict.LATE]
    return agreed.fragment == 0 and bool(took_part) and all(map(is_want, took_part))


def unserved(handover: Handover, served: Served) -> bool:
    """Return whether a handover is for somebody who was not served yet."""
    return any(
        (entry.incarnation, entry.tokens) > served.get(entry.island, (0, 0))
        for entry in handover.wanting
    )


def serve(handover: Handover, served: Served) -> None:
    """Note that all who wanted the state were served."""
    for entry in handover.wanting:
        before = served.get(entry.island, (0, 0))
        served[entry.island] = max(before, (entry.incarnation, entry.tokens))


def is_want(entry: RosterEntry) -> bool:
    """Return whether an island has said in a round that it wants the state."""
    return entry.verdict is Verdict.REFUSED and entry.reason == WANTS


def roster_of(agreed: Header) -> Roster:
    """Return the roster that every agreed frame has."""
    assert agreed.roster is not None
    return agreed.roster


def _abstains(entry: RosterEntry) -> bool:
    return entry.verdict is Verdict.REFUSED and entry.reason == ABSTAINS


def _life(entry: RosterEntry) -> Life:
    return entry.island, entry.incarnation
