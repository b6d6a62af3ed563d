"""State files: a fragment's anchor and velocity at one round, as a frame.

`states/<fragment>/<round>` is written once. The means after it lead to the present; the
log says what digest every state must have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from atoll.disk import Disk
from atoll.errors import CorruptError
from atoll.journal.stored import StoredBody, stored_frame
from atoll.weights import FragmentState
from atoll.wire import MOMENTS, Header, Kind

STATES = "states/"


def state_name(fragment: int, round: int) -> str:
    """Return the name of the file that holds a state."""
    return f"{STATES}{fragment}/{round}"


def state_rounds(disk: Disk, fragment: int) -> list[int]:
    """Return the rounds whose states are on the disk, latest first."""
    prefix = f"{STATES}{fragment}/"
    texts = (name.removeprefix(prefix) for name in disk.names(prefix))
    rounds = (
        int(text) for text in texts if text.isdecimal() and text == f"{int(text)}"
    )
    return sorted(rounds, reverse=True)


def stored_state(disk: Disk, fragment: int, round: int, digest: bytes) -> StoredBody:
    """Return a state whose header is the one that the log asks for.

    Raises:
        CorruptError: the file is missing, or is not that state.
    """
    name = state_name(fragment, round)
    stored = stored_frame(disk, name)
    header = stored.header
    if header.kind is not Kind.STATE:
        raise CorruptError(f"{name} is damaged: it holds the {header.name}.")
    found = (header.fragment, header.round, header.base)
    if found != (fragment, round, digest):
        raise CorruptError(
            f"{name} is damaged: it holds fragment {header.fragment}, round "
            f"{header.round}, digest {header.base.hex()}, and the log has digest "
            f"{digest.hex()}."
        )
    return stored


def begin(stored: StoredBody) -> FragmentState:
    """Return the state that a file holds, every bit verified."""
    return FragmentState.from_frame(stored.header, stored.read())


def rebuild(
    state: FragmentState, header: Header, means: Sequence[tuple[StoredBody, bytes]]
) -> None:
    """Apply means to a state, and compare each result with the digest beside it.

    Raises:
        CorruptError: bytes do not verify, or a digest differs; the state is spoilt.
    """
    require_same_optimizer(header, (mean.header for mean, _ in means))
    for mean, digest in means:
        state.apply(mean.header, mean.read())
        require_digest(mean.header, state.digest, digest)


def require_same_optimizer(state: Header, means: Iterator[Header]) -> None:
    """Return if every mean can be applied to a state of this kind."""
    assert state.outer is not None
    for mean in means:
        assert mean.outer is not None
        if MOMENTS[mean.outer.optimizer] != MOMENTS[state.outer.optimizer]:
            raise CorruptError(
                f"the {mean.name} is for {mean.outer.optimizer}, and the state of "
                f"round {state.round} for {state.outer.optimizer}."
            )


def require_digest(mean: Header, found: bytes, recorded: bytes) -> None:
    """Return if the state after a mean is the one that was recorded."""
    if found != recorded:
        raise CorruptError(
            f"Round {mean.round} of fragment {mean.fragment} replays to state "
            f"{found.hex()}, and the log has {recorded.hex()}. "
            "Restore the journal from a copy, or recover the run from its islands."
        )
