"""400 accidents to journals: an error with its place, the same run, or a told loss."""

from __future__ import annotations

import random
import re
from functools import cache
from typing import Any

import pytest

from atoll.errors import CorruptError, UsageError
from atoll.journal import Journal
from atoll.journal.constants import name_of
from atoll.journal.log import ENTRY_BYTES
from atoll.simulate.world import SimDisk
from atoll.wire import blake3_digest
from tests.attacks.mutations import Files, mutated
from tests.exchange.constant_samples import BASE, SPECS
from tests.journal.runs import Run, bits, view

MUTATIONS = 100
"""Per case: two journals, each as it is after a stop and after a kill."""

PLACE = re.compile(
    r"(log|means|bodies|states|departing|constants)/[\w.-]*|[Ff]ragment \d|segment \d"
    r"|receipts\.key"
)


@cache
def journal_files(segments: int, is_sealed: bool) -> Files:
    """Return the files of a run that has everything which a journal keeps."""
    run = Run(SimDisk(), sizes=(5, 17000)).start()
    run.journal.constants.store(SPECS[0], [BASE])
    run.join("a")
    for segment in range(segments):
        if segment:
            _forget_end(run.disk, max(_segments(run.disk)))
            run.reopen()
        for _ in range(2):
            for _ in range(2):
                run.commit(0)
                run.commit(1)
            run.journal.compact(0)
            run.journal.compact(1)
        run.commit(0, is_void=True)
        run.commit(1)
        run.stage(0, "a")
        run.join("b")
        run.journal.sync()
        run.journal.seal()
    if not is_sealed:
        _forget_end(run.disk, max(_segments(run.disk)))
    return {name: run.disk.read(name) for name in run.disk.names("")}


def _segments(disk: Any) -> list[str]:
    return [name for name in disk.names("log/") if not name.endswith(".end")]


def _forget_end(disk: Any, segment: str) -> None:
    """Leave what a kill right behind the last promise leaves: an older proof."""
    name = f"{segment}.end"
    data = disk.read(name)[:ENTRY_BYTES]
    disk.remove(name)
    disk.write_new(name, [data])


def renamed(rng: random.Random, name: str) -> str:
    """Return a name that another file of a journal has, or might have."""
    folder, _, last = name.rpartition("/")
    if not folder:
        return f"{name}.old"
    number = rng.choice([0, 1, 2, 3, 5, 9, 40])
    if folder == "log":
        suffix = rng.choice(["", ".end", ".old"])
        return f"log/{number:08d}{suffix}"
    if folder.startswith("departing"):
        return f"departing/{rng.randint(0, 2)}/{number}-{last.partition('-')[2]}"
    if folder == "constants":
        return f"constants/{blake3_digest(bytes([number])).hex()}"
    if folder == "bodies":
        return f"bodies/{number}"
    return f"{folder.partition('/')[0]}/{rng.randint(0, 2)}/{number}"


def seen(journal: Journal) -> tuple[object, ...]:
    """Return all that a journal says, down to the bits of weights and updates."""
    fragments = range(len(journal.recorded.fragments))
    states = tuple(bits(journal.state(fragment)) for fragment in fragments)
    outcomes = []
    for fragment in fragments:
        last = journal.recorded.fragments[fragment].round
        for round in range(max(1, last - 1), last + 1):
            header, body = journal.outcome(fragment, round)
            outcomes.append((header, None if body is None else body.tobytes()))
    staged = []
    for key in sorted(journal.recorded.staged):
        header, body = journal.staged(*key)
        staged.append((header, body.tobytes()))
    return view(journal), states, tuple(outcomes), tuple(staged)


def disk_of(files: Files) -> SimDisk:
    disk = SimDisk()
    for name, data in files.items():
        disk.write_new(name, [data])
    return disk


def opened(files: Files) -> Journal:
    return Journal.open(disk_of(files))


def require_goes_on(disk: SimDisk, journal: Journal) -> None:
    """Hold that what is written on such a journal is there when it is opened again."""
    run = Run(disk, sizes=(5, 17000))
    run.journal, fragments = journal, range(len(journal.recorded.fragments))
    run.states = [journal.state(fragment) for fragment in fragments]
    before = view(journal)
    for fragment in fragments:
        run.commit(fragment)
    after = view(journal)
    journal.seal()
    again = Journal.open(disk)
    assert before != after
    assert view(again) == after
    assert [again.state(each).digest for each in fragments] == [
        state.digest for state in run.states
    ]


@cache
def truth(segments: int, is_sealed: bool) -> tuple[tuple[object, ...], Any]:
    journal = opened(journal_files(segments, is_sealed))
    assert journal.damage == []
    assert journal.cut is None
    return seen(journal), [dict(f.digests) for f in journal.recorded.fragments]


def outcome_of(files: Files, segments: int, is_sealed: bool) -> str:
    """Return what became of a damaged journal, if that is allowed."""
    original, digests = truth(segments, is_sealed)
    try:
        disk = disk_of(files)
        journal = Journal.open(disk)
        found = seen(journal)
    except CorruptError as exc:
        return "an error" if PLACE.search(str(exc)) else f"no place: {exc}"
    for mine, theirs in zip(journal.recorded.fragments, digests, strict=False):
        assert mine.digests.items() <= theirs.items(), "another run"
    is_reported = bool(journal.damage or journal.cut)
    require_goes_on(disk, journal)
    if found == original:
        return "the same"
    assert is_reported, "a loss that nobody is told of"
    return "a reported loss"


@pytest.mark.parametrize("is_sealed", [True, False], ids=["stopped", "killed"])
@pytest.mark.parametrize("segments", [1, 3])
def test_no_accident_makes_another_run(segments: int, is_sealed: bool) -> None:
    """Whatever happens to a file, nothing else comes out, and no loss is silent."""
    files = journal_files(segments, is_sealed)
    rng = random.Random(f"journal {segments} {is_sealed}")
    counts: dict[str, int] = {}
    for number in range(MUTATIONS):
        changed, what = mutated(files, rng, renamed)
        try:
            became = outcome_of(changed, segments, is_sealed)
        except AssertionError as exc:
            raise AssertionError(f"mutation {number}, {what}: {exc}") from exc
        counts[became] = counts.get(became, 0) + 1

    assert sum(counts.values()) == MUTATIONS
    assert counts.keys() == {"the same", "an error", "a reported loss"}


def test_a_damaged_constant_is_noticed_by_its_name() -> None:
    """Its file is called by the digest of its bytes, which who takes it compares."""
    files = journal_files(1, True)
    (name,) = [each for each in files if each.startswith("constants/")]
    assert name == name_of(blake3_digest(files[name]).hex())
    assert opened({**files, name: files[name][:-1]}).constants.complete == set()


def test_a_missing_key_of_receipts_is_reported() -> None:
    """Another one does not know what islands hold."""
    files = dict(journal_files(1, True))
    del files["receipts.key"]

    (report,) = opened(files).damage
    assert "receipts.key is missing, and another key was made" in report


def test_an_empty_directory_is_no_journal() -> None:
    """Only where nothing of a run is left can one begin."""
    with pytest.raises(UsageError, match="There is no journal"):
        opened({})
