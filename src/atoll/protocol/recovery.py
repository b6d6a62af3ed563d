"""What a coordinator lost that its islands still have, and whom it asks for it.

Rule 1: after a restart nothing closes before every live member of the journal has said
        what it holds, for one lease from the restart at most. Nothing renews that.
Rule 2: a fragment has lost rounds when a live member holds one that is not committed.
        It opens again after the newest of them: no island is ever asked to go back.
        Only a holding with the run's receipt counts: the host refuses a message with
        any other at or beyond the open round before it comes here.
Rule 3: of several digests for that round, the one that most islands report is right.
Rule 4: every holder that stands still is asked for it; the first to bring it is heard.
"""

from __future__ import annotations

from collections import Counter

from atoll.protocol.membership import Member, Members
from atoll.protocol.messages import Holding
from atoll.protocol.rounds import Round


def all_heard(members: Members, now_s: float) -> bool:
    """Return whether every live member has said what it holds."""
    return not members.look(now_s).unheard


def lost_state(round: Round, members: Members, now_s: float) -> Holding | None:
    """Return the state that the run must take before this round can go on, if any."""
    held = [
        holding
        for name in members.live(now_s)
        if (holding := held_by(members.known[name], round.fragment))
        and holding.round >= round.number
    ]
    if not held:
        return None
    newest = max(holding.round for holding in held)
    votes = Counter(holding.digest for holding in held if holding.round == newest)
    most = max(votes.values())
    return Holding(newest, min(each for each in votes if votes[each] == most))


def held_by(member: Member, fragment: int) -> Holding | None:
    """Return what a member has said that it holds of a fragment."""
    return member.holds[fragment] if fragment < len(member.holds) else None
