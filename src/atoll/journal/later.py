"""Files of rounds that the log does not have: they prove that it has lost its end.

A file may be ahead of the log after a crash, since it is durable before the record that
names it, but only by so much: the body of the next round, and a departing update for
the round after that. A state is written when its round is durable. What is further
ahead shows that rounds were committed which the log has lost: it is reported and kept,
not removed as unfinished.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from atoll.disk import Disk
from atoll.errors import CorruptError
from atoll.journal.bodies import MEANS
from atoll.journal.departing import DEPARTING
from atoll.journal.recorded import RecordedFragment
from atoll.journal.states import STATES

FOLDERS = {STATES: 0, MEANS: 1, DEPARTING: 2}
"""By how many rounds a file may be ahead of the log."""

REMEDY = (
    "Islands that still have the lost rounds bring them back; otherwise stop the "
    "coordinator and restore the journal from a copy."
)


class Later(NamedTuple):
    """A file that is later than the log."""

    name: str
    fragment: int
    round: int
    last: int
    """The last round that the log has of the fragment."""

    def __str__(self) -> str:
        return (
            f"{self.name} is later than the log, which ends with round {self.last} of "
            f"fragment {self.fragment}: rounds that were committed are lost. It is "
            f"kept, and not used. {REMEDY}"
        )


def later_files(disk: Disk, fragments: Sequence[RecordedFragment]) -> list[Later]:
    """Return the files that are later than the log, in order of their names."""
    found = []
    for folder, ahead in FOLDERS.items():
        for name in disk.names(folder):
            key = _fragment_and_round(name.removeprefix(folder))
            if key is None or key[0] >= len(fragments):
                continue
            fragment, round = key
            last = fragments[fragment].round
            if round > last + ahead:
                found.append(Later(name, fragment, round, last))
    return found


def require_not_founded(disk: Disk) -> None:
    """Return if nothing on the disk shows that a run without weights had some.

    Raises:
        CorruptError: naming what shows it.
    """
    for folder, ahead in FOLDERS.items():
        for name in disk.names(folder):
            key = _fragment_and_round(name.removeprefix(folder))
            if key is not None and (folder != STATES or key[1] > ahead):
                raise CorruptError(
                    f"{name} is there, and the log has no weights that it could "
                    "belong to: the log has lost its end. Restore the journal from a "
                    "copy."
                )


def _fragment_and_round(text: str) -> tuple[int, int] | None:
    """Return what `<fragment>/<round>` or `<fragment>/<round>-<island>` names."""
    fragment, _, rest = text.partition("/")
    round = rest.partition("-")[0]
    if not (fragment.isdecimal() and round.isdecimal()):
        return None
    return int(fragment), int(round)
