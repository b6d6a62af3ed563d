"""Owns the durable record of a run: its log, its states, compaction.

Does not know the caller that decides about records, nor the kind of disk.
Start reading at `journal.Journal`, then `log` and `snapshots`.
"""

from atoll.journal.journal import Journal
from atoll.journal.records import (
    ArrivedRecord,
    CommittedRecord,
    ConstantRecord,
    CountedRecord,
    CreatedRecord,
    EndedRecord,
    EpochRecord,
    FoundedRecord,
    JoinedRecord,
    LeftRecord,
    MoveRecord,
    PassedRecord,
    PauseRecord,
    RecoveredRecord,
    StagedRecord,
    WindowRecord,
)
from atoll.journal.replay import (
    CountedUpdate,
    JournalledMember,
    RecordedFragment,
    RecordedRun,
)
from atoll.journal.snapshots import (
    JournaledAnchors,
)

__all__ = [
    "ArrivedRecord",
    "CommittedRecord",
    "ConstantRecord",
    "CountedRecord",
    "CountedUpdate",
    "CreatedRecord",
    "EndedRecord",
    "EpochRecord",
    "FoundedRecord",
    "JoinedRecord",
    "Journal",
    "JournaledAnchors",
    "JournalledMember",
    "LeftRecord",
    "MoveRecord",
    "PassedRecord",
    "PauseRecord",
    "RecordedFragment",
    "RecordedRun",
    "RecoveredRecord",
    "StagedRecord",
    "WindowRecord",
]
