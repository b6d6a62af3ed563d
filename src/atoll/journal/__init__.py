"""Owns the durable record of a run: its log, its states, compaction.

Does not know who decides what is recorded, nor what disk it is on.
Start reading at `journal.Journal`, then `log` and `snapshots`.
"""

from atoll.journal.journal import Journal
from atoll.journal.past import Past
from atoll.journal.recorded import Counted, JournalledMember, Recorded, RecordedFragment
from atoll.journal.records import (
    Arrived,
    Committed,
    ConstantKept,
    CountedSet,
    Created,
    Ended,
    EpochSet,
    Founded,
    Joined,
    Left,
    MoveSet,
    Passed,
    PauseSet,
    Recovered,
    Staged,
)

__all__ = [
    "Arrived",
    "Committed",
    "ConstantKept",
    "Counted",
    "CountedSet",
    "Created",
    "Ended",
    "EpochSet",
    "Founded",
    "Joined",
    "Journal",
    "JournalledMember",
    "Left",
    "MoveSet",
    "Passed",
    "Past",
    "PauseSet",
    "Recorded",
    "RecordedFragment",
    "Recovered",
    "Staged",
]
