"""Owns the durable record of a run: its log, its states, compaction.

Does not know the caller that decides about records, nor the kind of disk.
Start reading at `journal.Journal`, then `log` and `snapshots`.
"""

from atoll.journal.journal import Journal, Note
from atoll.journal.records import (
    ArrivedRecord,
    ClaimRecord,
    CommittedRecord,
    ConstantRecord,
    CountedRecord,
    CreatedRecord,
    DataRecord,
    EndedRecord,
    EndSetRecord,
    EpochRecord,
    FoundedRecord,
    HoldingRecord,
    JoinedRecord,
    LedgerRecord,
    LeftRecord,
    MoveRecord,
    PassedRecord,
    PauseRecord,
    RecoveredRecord,
    ReleasedRecord,
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
    "ClaimRecord",
    "CommittedRecord",
    "ConstantRecord",
    "CountedRecord",
    "CountedUpdate",
    "CreatedRecord",
    "DataRecord",
    "EndSetRecord",
    "EndedRecord",
    "EpochRecord",
    "FoundedRecord",
    "HoldingRecord",
    "JoinedRecord",
    "Journal",
    "JournaledAnchors",
    "JournalledMember",
    "LedgerRecord",
    "LeftRecord",
    "MoveRecord",
    "Note",
    "PassedRecord",
    "PauseRecord",
    "RecordedFragment",
    "RecordedRun",
    "RecoveredRecord",
    "ReleasedRecord",
    "StagedRecord",
    "WindowRecord",
]
