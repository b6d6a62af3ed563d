"""States that islands bring: the first ones of a run, and those that it has lost.

Nothing here changes anything: what is brought is verified, or refused with the reason.
"""

from __future__ import annotations

from atoll.errors import Refused
from atoll.exchange import FoundCall, Frame, RecoverCall
from atoll.journal import Recorded
from atoll.settings import RunSettings
from atoll.weights import FragmentState, Layout, require_state, terms_of
from atoll.wire import MOMENTS, Header, Kind, piece_count, verify_body

HEADER_BYTES, PIECE_BYTES = 8192, 32
"""What the header of a frame takes at most, beside its pieces' digests and roster."""


def states_bytes(layout: Layout, settings: RunSettings) -> int:
    """Return what the states of all fragments take."""
    vectors = 1 + MOMENTS[settings.outer.optimizer]
    return sum(4 * vectors * each.elements for each in layout)


def header_bytes(elements: int) -> int:
    """Return what the header of an update or a state of so many elements may take."""
    most_vectors = 1 + max(MOMENTS.values())
    return HEADER_BYTES + PIECE_BYTES * piece_count(most_vectors * elements)


def reserve_bytes(layout: Layout, settings: RunSettings) -> int:
    """Return what the next commits and compactions take on the disk.

    Of every fragment two rounds may be complete, the open one and that of departing
    islands after it; and compaction writes a state before it removes an older one.
    """
    means = sum(
        terms_of(each, settings).down.body_bytes(each.elements) for each in layout
    )
    heads = sum(header_bytes(each.elements) for each in layout)
    return 2 * means + states_bytes(layout, settings) + 3 * heads


def is_same_founding(call: FoundCall, recorded: Recorded) -> bool:
    """Return whether a run was founded with what is brought: the answer was lost."""
    founded = [each.digests.get(0) for each in recorded.fragments]
    return founded == [frame.header.base for frame in call.states]


def founding_states(
    call: FoundCall, layout: Layout, settings: RunSettings
) -> list[FragmentState]:
    """Return the run's first weights.

    Raises:
        Refused: there is not one state for each fragment, or one is of another shape.
        CorruptError: a body is not what its header says.
    """
    if len(call.states) != len(layout):
        raise Refused(
            f"{len(call.states)} states cannot found a run of {len(layout)} "
            "fragments. Bring one for each."
        )
    for frame, each in zip(call.states, layout, strict=True):
        require_state(frame.header, each, terms_of(each, settings), round=0)
    return [verified_state(frame, is_given=call.is_given) for frame in call.states]


def verified_state(frame: Frame, *, is_given: bool = False) -> FragmentState:
    """Return the state in a frame; its memory is kept only if it is given away.

    Raises:
        CorruptError: the body is not what the header says.
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
        what = (header.kind, header.run, header.fragment, header.round)
        if what != (Kind.AGREED, call.state.header.run, fragment, number):
            raise Refused(
                f"The {header.name} is not the outcome of round {number}, which leads "
                f"to the state of round {round}. Bring the last outcomes in order."
            )
    return tuple(each for each in call.outcomes if each.round > committed)
