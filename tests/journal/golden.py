"""`python -m tests.journal.golden`: write the golden journal anew.

Only for a new version of the format, beside the old one: old journals must stay
readable.
"""

from __future__ import annotations

import json
from pathlib import Path

from atoll.journal import (
    CountedRecord,
    CreatedRecord,
    EndedRecord,
    EpochRecord,
    JoinedRecord,
    Journal,
    LeftRecord,
    MoveRecord,
    PauseRecord,
)
from atoll.simulate.world import SimDisk
from tests.journal.runs import RUN, Run, a_departing

FILES = [Path(__file__).with_name(f"golden-v{version}.json") for version in (1, 2)]
MOVED_FILES = [
    Path(__file__).with_name(f"golden-moved-v{version}.json") for version in (1, 2)
]
"""By version of the log's format, oldest first."""

CREATED = CreatedRecord(
    run=RUN,
    settings={"run": {"name": "lagoon"}, "outer": {"lr": 0.5}},
    fingerprint="0123456789abcdef",
)


def golden_run() -> Run:
    """Return a small run in which everything that is recorded happens."""
    run = Run(SimDisk(), sizes=(3, 2))
    run.journal = Journal.create(run.disk, CREATED)
    run.found()
    append = run.journal.append
    append(JoinedRecord(island="a", incarnation=1, slot=0, key_digest=bytes(range(32))))
    append(JoinedRecord(island="tokyo é", incarnation=1, slot=1, nonce=b"once"))
    run.commit(0, value=0.5, islands=2)
    run.commit(1, value=-0.25, down="bf16")
    run.journal.compact(0)
    append(EpochRecord(number=1, values={"outer.lr": 0.25, "run.end_rounds": None}))
    run.commit(0, is_void=True)
    append(LeftRecord(island="a", incarnation=1, reason="lease"))
    append(JoinedRecord(island="a", incarnation=2, slot=0))
    run.journal.stage(*a_departing(0, 3, "a"))
    run.commit(1, value=2.0)
    append(EndedRecord(reason="drained"))
    run.journal.sync()
    run.journal.seal()
    return run


def moved_run() -> Run:
    """Return a small run that came from elsewhere, and is on its way again."""
    there = Run(SimDisk(), sizes=(3, 2)).start()
    there.commit(0, value=0.5, islands=2)
    there.commit(0, is_void=True)
    there.commit(1, value=-0.25, down="bf16")
    run = Run(SimDisk(), sizes=(3, 2), after=there.after, outcomes=there.outcomes)
    run.journal, known = Journal.create(run.disk, CREATED), there.journal.recorded
    assert known.model is not None
    states = [
        state.to_frame(run=RUN, fragment=index, outer=there.outer)
        for index, state in enumerate(there.states)
    ]
    run.journal.arrive(known.model, states)
    for index, fragment in enumerate(known.fragments):
        last = range(max(1, fragment.round - 1), fragment.round + 1)
        run.journal.passed(
            index,
            bases=[fragment.digests[round] for round in range(fragment.round)],
            outcomes=[there.outcomes[index, round] for round in last],
        )
    append = run.journal.append
    append(
        CountedRecord(fragment=0, island="tokyo é", round=1, inner_steps=20, tokens=300)
    )
    append(PauseRecord(is_paused=True))
    append(JoinedRecord(island="tokyo é", incarnation=4, slot=2, nonce=b"once"))
    append(MoveRecord(target="s3://lagoon/run", nonce="ab" * 16))
    run.journal.sync()
    run.journal.seal()
    run.states = there.states
    return run


def files_of(run: Run) -> dict[str, str]:
    """Return every file in hex but the key of receipts, which is random."""
    names = (name for name in run.disk.names("") if name != "receipts.key")
    return {name: run.disk.read(name).hex() for name in names}


if __name__ == "__main__":
    for file, run in ((FILES[-1], golden_run()), (MOVED_FILES[-1], moved_run())):
        file.write_text(json.dumps(files_of(run), indent=1) + "\n")
