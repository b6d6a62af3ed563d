"""`python -m tests.journal.golden`: write the golden journal anew.

Only for a new version of the format, beside the old one: old journals must stay
readable.
"""

from __future__ import annotations

import json
from pathlib import Path

from atoll.journal import Created, Ended, EpochSet, Joined, Journal, Left
from atoll.simulate.disk import SimDisk
from tests.journal.runs import RUN, Run, a_departing

FILE = Path(__file__).with_name("golden-v1.json")

CREATED = Created(
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
    append(Joined(island="a", incarnation=1, slot=0, key_digest=bytes(range(32))))
    append(Joined(island="tokyo é", incarnation=1, slot=1, nonce=b"once"))
    run.commit(0, value=0.5, islands=2)
    run.commit(1, value=-0.25, down="bf16")
    run.journal.compact(0)
    append(EpochSet(number=1, values={"outer.lr": 0.25, "run.end_rounds": None}))
    run.commit(0, is_void=True)
    append(Left(island="a", incarnation=1, reason="lease"))
    append(Joined(island="a", incarnation=2, slot=0))
    run.journal.stage(*a_departing(0, 3, "a"))
    run.commit(1, value=2.0)
    append(Ended(reason="drained"))
    run.journal.sync()
    return run


def files_of(run: Run) -> dict[str, str]:
    return {name: run.disk.read(name).hex() for name in run.disk.names("")}


if __name__ == "__main__":
    FILE.write_text(json.dumps(files_of(golden_run()), indent=1) + "\n")
