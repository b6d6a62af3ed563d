"""Damage is found by digest, said in words, and done without where that is possible."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import CorruptError
from atoll.journal import Journal
from atoll.journal.files import departing_name
from atoll.simulate.world import SimDisk
from atoll.weights import FragmentState
from atoll.wire import FrameKind, Header, OuterValues, pack, with_body
from tests.journal.runs import (
    NESTEROV,
    RUN,
    Run,
    a_created,
    a_departing,
    an_agreed,
    view,
)


def a_run() -> Run:
    """Return a run with everything on its disk: compacted, and gone on from there."""
    run = Run(SimDisk()).start()
    run.join("a")
    for _ in range(2):
        for _ in range(3):
            run.commit(0)
            run.commit(1)
        run.journal.compact(0)
        run.journal.compact(1)
    run.commit(0, is_void=True)
    run.commit(0)
    run.commit(1)
    run.stage(0, "a")
    run.join("b")
    run.journal.sync()
    return run


def files_of(run: Run) -> dict[str, bytes]:
    return {name: run.disk.read(name) for name in run.disk.names("")}


FILES = files_of(a_run())


def disk_with(changes: dict[str, bytes | None]) -> SimDisk:
    """Return the disk of `a_run` with files that differ, or are missing (None)."""
    disk = SimDisk()
    for name, data in (FILES | changes).items():
        if data is not None:
            disk.write_new(name, [data])
    return disk


def flipped(name: str, at: int = -1, bit: int = 0) -> dict[str, bytes | None]:
    data = bytearray(FILES[name])
    data[at] ^= 1 << bit
    return {name: bytes(data)}


def reopened(changes: dict[str, bytes | None]) -> Run:
    run = a_run()
    run.disk = disk_with(changes)
    return run.reopen()


def test_the_disk_has_every_kind_of_file() -> None:
    """The damage below is done to all that a journal writes."""
    assert sorted(FILES) == [
        "bodies/1",
        "departing/0/9-17762fddd969a453925d65717ac3eea2",
        "log/00000001",
        "log/00000001.end",
        "means/1/4",
        "means/1/5",
        "means/1/6",
        "means/1/7",
        "receipts.key",
        "states/0/3",
        "states/0/6",
        "states/1/3",
        "states/1/6",
    ]


@settings(max_examples=200)
@given(data=st.data())
def test_any_flipped_byte_is_found_or_harmless(data: st.DataObject) -> None:
    """Whatever byte of whatever file flips, no wrong bit comes out of the journal."""
    name = data.draw(st.sampled_from(sorted(FILES)))
    at = data.draw(st.integers(0, len(FILES[name]) - 1))
    bit = data.draw(st.integers(0, 7))
    run = a_run()
    run.disk = disk_with(flipped(name, at, bit))

    try:
        run.reopen()
        run.check()
    except CorruptError:
        return
    assert view(run.journal) == view(a_run().journal)


@pytest.mark.parametrize("fragment", [0, 1])
@pytest.mark.parametrize("how", ["flipped", "cut", "missing", "another"])
def test_a_damaged_state_is_done_without(fragment: int, how: str) -> None:
    """The state before it and the means in between lead to the same bits."""
    name = f"states/{fragment}/6"
    changes: dict[str, dict[str, bytes | None]] = {
        "flipped": flipped(name),
        "cut": {name: FILES[name][:-1]},
        "missing": {name: None},
        "another": {name: FILES[f"states/{fragment}/3"]},
    }
    run = reopened(changes[how])

    run.check()
    damage = run.journal.damage
    assert how == "missing" or [name in line for line in damage] == [True]

    run.journal.compact(fragment)
    run.reopen().check()
    assert run.journal.damage == []
    assert name not in run.disk.names("states/")


def test_a_damaged_state_of_the_newest_round_is_written_again() -> None:
    """Compaction replaces a damaged state by a good one under its own name."""
    run = a_run()
    run.journal.compact(1)
    name, disk = "states/1/7", SimDisk()
    for each in run.disk.names(""):
        data = run.disk.read(each)
        disk.write_new(each, [data[:-1] if each == name else data])
    good = run.disk.read(name)
    run.disk = disk
    run.reopen()
    assert len(run.journal.damage) == 1

    run.journal.compact(1)

    assert disk.read(name) == good
    run.reopen().check()
    assert run.journal.damage == []


def test_without_a_state_to_fall_back_on_the_journal_is_corrupt() -> None:
    """Two damaged states are too many, and the error says what to do."""
    changes = flipped("states/1/6") | flipped("states/1/3")

    with pytest.raises(
        CorruptError,
        match=r"Fragment 1 cannot be replayed to round 7: no state .* recover the run",
    ):
        reopened(changes)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"means/1/7": None}, r"Fragment 1 .* round 7: the body of round 7 is missing"),
        ({"bodies/1": None}, r"Fragment 0 .* round 8: the body of round 8 is missing"),
        (
            {"states/1/6": None, "states/1/3": None},
            r"Fragment 1 cannot be replayed to round 7: no state of it",
        ),
        (
            {"states/1/6": None, "means/1/5": None},
            r"Fragment 1 .* the body of round 5 is missing",
        ),
        (
            flipped("means/1/7"),
            r"means/1/7 is damaged: piece 0 .*does not match its digest",
        ),
        (flipped("means/1/7", 0), r"means/1/7 is damaged: its header is not the one"),
        ({"means/1/7": FILES["means/1/7"][:-1]}, r"means/1/7 is too short"),
        (flipped("bodies/1"), r"bodies/1 is damaged: piece 0 of the agreed frame"),
    ],
)
def test_a_body_that_is_needed_and_damaged_is_named(
    changes: dict[str, bytes | None], match: str
) -> None:
    """What the present state cannot do without is an error with its name."""
    with pytest.raises(CorruptError, match=match):
        reopened(changes)


def test_a_lost_body_that_a_state_covers_is_reported() -> None:
    """A missing body of the last rounds, or of the fallback, is damage, not an end."""
    run = reopened({"means/1/6": None})

    assert run.journal.damage == ["The body of round 6 of fragment 1 is missing."]
    assert run.journal.outcome(1, 6) == (run.outcomes[1, 6][0], None)
    assert run.states[1].round == 7


def a_run_that_lost(rounds: int) -> tuple[Run, SimDisk]:
    """Return a run, and a copy of its disk whose log lacks the last rounds."""
    run = Run(SimDisk()).start()
    for _ in range(4):
        run.commit(1)
    size = len(run.disk.read(LOG))
    for _ in range(rounds):
        run.commit(1)
    copy = SimDisk()
    for name in run.disk.names(""):
        data = run.disk.read(name)
        if name == LOG:
            data = data[:size]
        if not name.endswith(".end"):  # as if it was killed before it was sealed
            copy.write_new(name, [data])
    return run, copy


LOG = "log/00000001"


def test_a_body_that_a_crash_left_is_no_damage() -> None:
    """It is durable before its record, which nobody was promised."""
    run, disk = a_run_that_lost(1)

    journal = Journal.open(disk)

    assert journal.damage == []
    assert run.disk.names("means/1/")[-1] == "means/1/5"
    assert disk.names("means/1/")[-1] == "means/1/4"


def test_bodies_later_than_the_log_are_reported_and_kept() -> None:
    """The round before a body is durable: a log without it has lost its end."""
    run, disk = a_run_that_lost(3)

    run.disk = disk
    run.reopen()

    assert disk.names("means/1/")[-2:] == ["means/1/6", "means/1/7"]
    assert [line.partition(":")[0] for line in run.journal.damage] == [
        f"means/1/{round} is later than the log, which ends with round 4 of fragment 1"
        for round in (6, 7)
    ]
    assert "Islands that still have the lost rounds" in run.journal.damage[0]
    for _ in range(3):
        run.commit(1, value=2.0)
    run.reopen().check()
    assert run.journal.damage == []
    assert run.states[1].round == 7


def test_a_departing_update_later_than_the_log_is_reported_and_kept() -> None:
    """It may be for the round after the next, and not beyond."""
    _, disk = a_run_that_lost(0)
    for round in (6, 7):
        header, body = a_departing(1, round, "a")
        disk.write_new(departing_name((1, round, "a")), [pack(header), body.tobytes()])

    journal = Journal.open(disk)

    (report,) = journal.damage
    assert report.startswith(
        "departing/1/7-17762fddd969a453925d65717ac3eea2 is later than the log"
    )
    assert len(disk.names("departing/")) == 1
    journal.draft(*a_departing(1, 7, "a", value=2.0))


def test_a_state_later_than_the_log_is_reported_and_not_used() -> None:
    """A log that lost its end to damage is told by what it does not explain."""
    run, disk = a_run_that_lost(1)
    run.journal.compact(1)
    disk.write_new("states/1/5", [run.disk.read("states/1/5")])
    run.disk = disk
    run.reopen()

    assert run.states[1].round == 4
    (report,) = run.journal.damage
    assert "states/1/5 is later than the log, which ends with round 4" in report
    run.commit(1)
    run.journal.compact(1)
    assert run.reopen().journal.damage == []


@pytest.mark.parametrize("name", ["states/0/3", "means/1/7", "departing/0/9-a"])
def test_a_log_that_lost_the_founding_is_not_a_new_run(name: str) -> None:
    """What only a run with weights writes is not removed as unfinished."""
    disk = SimDisk()
    Journal.create(disk, a_created())
    disk.write_new("states/0/0", [FILES["states/0/3"]])
    disk.write_new(name, [b"anything"])

    with pytest.raises(CorruptError, match=f"{name} exists, and the log has no"):
        Journal.open(disk)
    assert name in disk.names("")


@pytest.mark.parametrize(
    "name", ["states/0/0", "means/1/7", "bodies/1", "constants/ab", "departing/0/9-a"]
)
def test_a_journal_without_its_log_is_no_new_one(name: str) -> None:
    """A run is not begun, nor found absent, where files of another one lie."""
    disk = SimDisk()
    disk.write_new(name, [b"anything"])

    with pytest.raises(CorruptError, match=f"{name} exists, and no log that names"):
        Journal.open(disk)
    with pytest.raises(CorruptError, match="Restore the journal from a copy"):
        Journal.create(disk, a_created())
    assert disk.names("") == [name]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda data: data[:-1], "is too short"),
        (lambda data: data[:-1] + b"\xff", "piece 0 of the departing frame"),
        (lambda data: data + b"\0", "bytes follow the departing frame"),
        (lambda data: b"", "0 bytes are too few for a frame"),
        (lambda data: FILES["means/1/7"], "holds another frame than was staged"),
        (lambda data: None, "is missing, and the journal needs it"),
    ],
)
def test_a_damaged_departing_update_is_named(
    change: Callable[[bytes], bytes | None], match: str
) -> None:
    """An acknowledged update that cannot be read is not silently left out."""
    (name,) = (name for name in FILES if name.startswith("departing/"))
    journal = Journal.open(disk_with({name: change(FILES[name])}))

    with pytest.raises(CorruptError, match=match):
        journal.staged(0, 9, "a")


def test_a_record_that_replays_to_other_bits_names_both_digests() -> None:
    """A digest in the log that its means do not lead to is found."""
    run = Run(SimDisk()).start()
    state = run.states[0]
    frame = an_agreed(state, 0)
    before = state.digest
    state.apply(*frame)
    run.journal.commit(*frame, digest_after=bytes(15) + b"\1", epoch=0)

    for act in (run.journal.state, run.journal.compact):
        with pytest.raises(
            CorruptError,
            match=rf"Round 1 of fragment 0 replays to state {state.digest.hex()}, and "
            "the log has 00000000000000000000000000000001",
        ):
            act(0)
    assert run.disk.names("states/0/") == ["states/0/0"]
    assert before != state.digest


def test_a_mean_for_another_optimizer_is_refused() -> None:
    """A round that names an optimizer with other moments cannot be applied."""
    run = Run(SimDisk()).start()
    adam = OuterValues(optimizer="adam", lr=0.5, momentum=0.5)
    frame = an_agreed(run.states[0], 0, outer=adam)
    run.journal.commit(*frame, digest_after=bytes(16), epoch=0)

    for act in (run.journal.state, run.journal.compact):
        with pytest.raises(CorruptError, match="is for adam, and the state of round 0"):
            act(0)


def test_a_mean_of_another_length_is_refused() -> None:
    """A body that does not fit the fragment is found before any of it is used."""
    run = Run(SimDisk()).start()
    other = FragmentState.found(np.zeros(7, np.float32), "nesterov")
    header, body = an_agreed(other, 0)
    fields = {**header.__dict__, "base": run.states[0].digest}
    run.journal.commit(Header(**fields), body, digest_after=bytes(16), epoch=0)

    for act in (run.journal.state, run.journal.compact):
        with pytest.raises(CorruptError, match="has 7 elements, and the fragment 5"):
            act(0)


def test_a_state_file_with_anything_else_in_it_is_done_without() -> None:
    """A frame of another kind, or a state with NaN in it, is no state."""
    update = Header(
        kind=FrameKind.UPDATE, run=RUN, fragment=0, round=6, island="a", elements=1
    )
    zeros = np.zeros(4, np.uint8)
    nan = np.full(10, np.nan, np.float32).view(np.uint8)
    digest = a_run().journal.recorded.fragments[0].digests[6]
    state = Header(
        kind=FrameKind.STATE,
        run=RUN,
        fragment=0,
        round=6,
        base=digest,
        elements=10,
        outer=NESTEROV,
    )
    for header, body, match in (
        (update, zeros, "it holds the update frame"),
        (state, nan, "is nan"),
    ):
        data = pack(with_body(header, body)) + body.tobytes()
        run = reopened({"states/0/6": data})
        run.check()
        assert len(run.journal.damage) == 1
        assert match in run.journal.damage[0]
