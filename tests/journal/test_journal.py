"""The journal says what was put in, refuses what cannot be, and forgets on time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest

from atoll.disk import Data
from atoll.errors import UsageError
from atoll.journal import (
    CreatedRecord,
    EndedRecord,
    EpochRecord,
    JoinedRecord,
    Journal,
    LeftRecord,
    StagedRecord,
)
from atoll.settings import RunSettings
from atoll.simulate.world import SimDisk
from atoll.weights import FragmentState
from atoll.wire import Roster, Verdict
from tests.journal.runs import (
    NESTEROV,
    RUN,
    Run,
    a_created,
    a_departing,
    an_agreed,
    an_entry,
    bits,
    view,
)


def test_a_run_is_created_once() -> None:
    """A second journal on a disk, or none, is a usage error."""
    disk = SimDisk()
    with pytest.raises(UsageError, match="There is no journal"):
        Journal.open(disk)

    Journal.create(disk, a_created())

    with pytest.raises(UsageError, match="There is a journal"):
        Journal.create(disk, a_created())


def test_settings_come_back_as_they_were() -> None:
    """The settings in the journal are the run's, and have its fingerprint."""
    settings = RunSettings.from_dict({"sync": {"sync_every": 7}, "outer": {"lr": 0.3}})
    created = CreatedRecord(
        run=RUN, settings=settings.to_dict(), fingerprint=settings.fingerprint
    )
    disk = SimDisk()
    Journal.create(disk, created)

    found = Journal.open(disk).recorded.created

    assert found == created
    assert RunSettings.from_dict(dict(found.settings)) == settings


def test_everything_that_was_recorded_comes_back() -> None:
    """Members, epochs, rounds, rosters and the end are what they were."""
    run = Run(SimDisk()).start()
    run.join("b")
    run.join("a")
    run.leave("b")
    run.join("b")
    run.set_epoch()
    run.commit(0)
    run.commit(1, islands=3)
    run.commit(0, is_void=True)
    run.stage(0, "a")
    run.journal.append(EndedRecord(reason="drained"))
    run.journal.sync()
    before = view(run.journal)

    recorded = run.reopen().journal.recorded

    assert view(run.journal) == before
    assert [(m.island, m.incarnation, m.slot) for m in recorded.members.values()] == [
        ("b", 2, 0),
        ("a", 1, 1),
    ]
    assert not recorded.members["b"].has_left
    assert recorded.epochs == [EpochRecord(number=1, values={"outer.lr": 0.25})]
    assert recorded.model is not None
    assert [tensor.name for tensor in recorded.model.tensors] == ["w0", "w1"]
    assert sorted(recorded.rosters) == [(0, 1), (0, 2), (1, 1)]
    assert len(recorded.rosters) == 3
    assert (0, 3) not in recorded.rosters
    assert [e.verdict for e in recorded.rosters[0, 2].entries] == [Verdict.LATE]
    assert len(recorded.rosters[1, 1].counted) == 3
    assert recorded.ended == EndedRecord(reason="drained")
    run.check()


def test_the_last_update_that_counted_is_known_for_each_island() -> None:
    """A void round, or one that an island missed, leaves its progress alone."""
    run = Run(SimDisk()).start()
    run.commit(0, islands=2)
    run.commit(0, islands=1)
    run.commit(0, is_void=True)

    counted = run.reopen().journal.recorded.counted

    assert {key: value.round for key, value in counted.items()} == {
        (0, "island-000"): 2,
        (0, "island-001"): 1,
    }
    assert counted[0, "island-001"].tokens == an_entry("island-001").tokens


def test_a_replay_gives_the_same_bits_without_compaction() -> None:
    """Many means after the founding state lead to the live bits."""
    run = Run(SimDisk()).start()
    for value in range(20):
        run.commit(0, value=value / 3)
        run.commit(1, value=-value / 7, down="int8")

    live = [bits(state) for state in run.states]

    assert [bits(state) for state in run.reopen().states] == live


def test_what_was_only_appended_is_in_this_journal_at_once() -> None:
    """A record counts for its writer before it is durable."""
    run = Run(SimDisk()).start()
    run.join("a")

    assert "a" in run.journal.recorded.members


def test_a_departing_update_is_kept_until_its_round_is_over() -> None:
    """It can be read, staging it twice is staging it once, and a commit ends it."""
    disk = SimDisk()
    run = Run(disk).start()
    frame = a_departing(0, 1, "An Island, with a name in UTF-8: é")
    run.journal.stage(*frame)
    run.journal.stage(*frame)
    run.journal.stage(*a_departing(0, 2, "a"))
    run.reopen()

    header, body = run.journal.staged(0, 1, frame[0].island)
    assert header == frame[0]
    assert body.tobytes() == frame[1].tobytes()
    with pytest.raises(UsageError, match="Another departing update of island 'An Isl"):
        run.journal.stage(*a_departing(0, 1, frame[0].island, value=2.0))

    run.commit(0)

    assert list(run.journal.recorded.staged) == [(0, 2, "a")]
    with pytest.raises(UsageError, match="No departing update of island 'An Isl"):
        run.journal.staged(0, 1, frame[0].island)
    with pytest.raises(UsageError, match="Round 1 of fragment 0 is over"):
        run.journal.stage(*frame)
    run.journal.compact(0)
    assert len(disk.names("departing/")) == 1


def test_rosters_are_kept_for_life_and_bodies_are_collected() -> None:
    """After compactions, old outcomes have a header and no body."""
    disk = SimDisk()
    run = Run(disk).start()
    for _ in range(3):
        for _ in range(5):
            run.commit(0)
            run.commit(1)
        run.journal.compact(0)
        run.journal.compact(1)
    run.reopen()

    for fragment in (0, 1):
        for round in range(1, 16):
            header, body = run.journal.outcome(fragment, round)
            assert header == run.outcomes[fragment, round][0]
            # States of rounds 15 and 10 are kept, and the means after the older one.
            # Small bodies share a file, which goes when the last of them does.
            assert (body is not None) == (round > 10 or fragment == 0)
    assert disk.names("states/") == [
        "states/0/10",
        "states/0/15",
        "states/1/10",
        "states/1/15",
    ]
    assert disk.names("means/") == [f"means/1/{n}" for n in range(11, 16)]
    run.check()


def test_the_last_two_bodies_are_kept_whatever_the_states() -> None:
    """A compaction at every round leaves the outcomes that late islands ask for."""
    run = Run(SimDisk()).start()
    for _ in range(4):
        run.commit(1)
        run.journal.compact(1)

    kept = [run.journal.outcome(1, round)[1] is not None for round in range(1, 5)]

    assert kept == [False, False, True, True]


def test_small_bodies_are_collected_with_the_file_they_share() -> None:
    """When every body of a shared file is old, the file goes, and a new one is used."""
    disk = SimDisk()
    run = Run(disk, sizes=(16000,)).start()
    # 64000 bytes each: 66 of them are beyond the 4 MiB of a shared file.
    for _ in range(66):
        run.commit(0)
    run.journal.compact(0)
    run.commit(0)
    run.journal.compact(0)
    # Round 66 is in the first file, and one of the last two.
    assert disk.names("bodies/") == ["bodies/1", "bodies/2"]

    run.commit(0)
    run.journal.compact(0)

    assert disk.names("bodies/") == ["bodies/2"]
    run.reopen().check()
    run.commit(0)
    run.check()


def test_compacting_with_nothing_new_changes_nothing() -> None:
    """Repeating a compaction, also at round 0, is harmless."""
    disk = SimDisk()
    run = Run(disk).start()
    run.journal.compact(0)
    run.commit(0)
    run.journal.compact(0)
    before = {name: disk.read(name) for name in disk.names("")}

    run.journal.compact(0)

    assert {name: disk.read(name) for name in disk.names("")} == before
    run.check()


def test_a_journal_older_than_its_islands_takes_their_state() -> None:
    """After a recovery the run goes on from the island's round, with its rosters."""
    run = Run(SimDisk()).start()
    run.commit(0)
    old = {name: run.disk.read(name) for name in run.disk.names("")}
    for _ in range(5):
        run.commit(0)
    island = run.states[0]
    headers = [run.outcomes[0, round][0] for round in (5, 6)]

    disk = SimDisk()
    for name, data in old.items():
        disk.write_new(name, [data])
    run.disk = disk
    run.reopen()
    assert run.states[0].round == 1
    frame = island.to_frame(run=RUN, fragment=0, outer=NESTEROV)
    run.journal.recover(frame, headers)
    run.reopen()

    assert bits(run.states[0]) == bits(island)
    assert run.journal.recorded.rosters[0, 6] == headers[1].roster
    assert run.journal.outcome(0, 5) == (headers[0], None)
    with pytest.raises(UsageError, match="Round 3 of fragment 0 has no outcome here"):
        run.journal.outcome(0, 3)
    # Digests before and after the rounds that are known again.
    assert sorted(run.journal.recorded.fragments[0].digests) == [0, 1, 4, 5, 6]
    run.commit(0)
    run.journal.compact(0)
    run.commit(0)
    run.reopen().check()


def test_a_new_name_takes_the_slot_of_one_that_never_counted() -> None:
    """The other name is forgotten, and a journal that is opened again agrees."""
    run = Run(SimDisk()).start()
    run.join("a")
    run.journal.append(JoinedRecord(island="b", incarnation=1, slot=0))
    assert list(run.journal.recorded.members) == ["b"]

    run.reopen()
    assert list(run.journal.recorded.members) == ["b"]


def test_a_name_that_counted_keeps_its_slot() -> None:
    """Its data is dealt out by it; and so does one whose update is staged."""
    run = Run(SimDisk()).start()
    run.join("island-000")
    run.commit(0)
    run.join("b")
    run.stage(0, "b")

    for slot in (0, 1):
        with pytest.raises(UsageError, match="a slot belongs to one name for life"):
            run.journal.append(JoinedRecord(island="c", incarnation=1, slot=slot))


@pytest.mark.parametrize(
    ("act", "match"),
    [
        (lambda run: run.found(), "has been founded already"),
        (
            lambda run: run.journal.append(
                JoinedRecord(island="a", incarnation=1, slot=0)
            ),
            "Incarnation 1 of island 'a' cannot follow incarnation 1",
        ),
        (
            lambda run: run.journal.append(
                JoinedRecord(island="a", incarnation=2, slot=1)
            ),
            "a slot belongs to one name for life",
        ),
        (
            lambda run: run.journal.append(LeftRecord(island="a", incarnation=2)),
            "Incarnation 2 of island 'a' cannot leave",
        ),
        (
            lambda run: run.journal.append(LeftRecord(island="z", incarnation=1)),
            "cannot leave: the journal knows None",
        ),
        (
            lambda run: run.journal.append(EpochRecord(number=2, values={})),
            "Epoch 2 cannot follow epoch 0",
        ),
        (
            lambda run: run.journal.append(
                StagedRecord(fragment=0, round=9, island="a", digest=bytes(32))
            ),
            "StagedRecord has its own files",
        ),
        (
            lambda run: run.journal.stage(*a_departing(7, 1, "a")),
            "Fragment 7 does not exist: the journal knows 2",
        ),
        (
            lambda run: run.journal.stage(*an_agreed(run.states[0], 0)),
            r"takes its departing frame",
        ),
        (
            lambda run: run.journal.commit(
                *run.outcomes[0, 1], digest_after=bytes(16), epoch=0
            ),
            "Round 1 of fragment 0 is over",
        ),
        (
            lambda run: run.journal.commit(
                *an_agreed(run.states[1], 0), digest_after=bytes(16), epoch=0
            ),
            r"Round 1 of fragment 0 is over",
        ),
        (
            lambda run: run.journal.commit(
                *an_agreed(run.states[0], 1), digest_after=bytes(16), epoch=0
            ),
            r"cannot be committed: next is round 1 on state",
        ),
        (
            lambda run: run.journal.commit(
                *an_agreed(run.states[0], 0, is_void=True),
                digest_after=bytes(16),
                epoch=0,
            ),
            "is void, and cannot change the state",
        ),
        (
            lambda run: run.journal.commit(
                an_agreed(run.states[0], 0)[0],
                np.zeros(3, np.uint8),
                digest_after=bytes(16),
                epoch=0,
            ),
            "A body of 3 bytes is not that of the agreed frame",
        ),
        (
            lambda run: run.journal.recover(
                run.states[0].to_frame(run=RUN, fragment=0, outer=NESTEROV)
            ),
            "Round 1 of fragment 0 is over",
        ),
        (
            lambda run: run.journal.recover(
                later(run).to_frame(run=RUN, fragment=0, outer=NESTEROV),
                [run.outcomes[0, 1][0]],
            ),
            r"outcomes of rounds \[1\] do not belong to the recovery",
        ),
        (lambda run: run.journal.outcome(0, 2), "Round 2 of fragment 0 has no outcome"),
        (lambda run: run.journal.state(2), "Fragment 2 does not exist"),
        (lambda run: run.journal.compact(-1), "Fragment -1 does not exist"),
    ],
)
def test_what_cannot_follow_is_refused_and_leaves_no_trace(
    act: Callable[[Run], None], match: str
) -> None:
    """A record that contradicts the journal is never written."""
    disk = SimDisk()
    run = Run(disk).start()
    run.join("a")
    run.join("b")
    run.commit(0)
    before = {name: disk.read(name) for name in disk.names("")}

    with pytest.raises(UsageError, match=match):
        act(run)

    assert {name: disk.read(name) for name in disk.names("")} == before
    run.check()


def later(run: Run) -> FragmentState:
    """Return a state of the first fragment that the journal does not have."""
    state = run.journal.state(0)
    state.apply(*an_agreed(state, 0))
    return state


def test_an_end_is_said_once() -> None:
    """A run that has ended cannot end again."""
    run = Run(SimDisk()).start()
    run.journal.append(EndedRecord(reason="drained"))

    with pytest.raises(UsageError, match="has ended already: 'drained'"):
        run.journal.append(EndedRecord())


def test_another_runs_frames_are_refused() -> None:
    """A frame belongs to the run that it names."""
    disk = SimDisk()
    journal = Journal.create(
        disk, CreatedRecord(run="atoll", settings={}, fingerprint="")
    )
    run = Run(SimDisk()).start()
    frames = [
        state.to_frame(run=RUN, fragment=index, outer=NESTEROV)
        for index, state in enumerate(run.states)
    ]
    model = run.journal.recorded.model
    assert model is not None

    with pytest.raises(UsageError, match="of run 'lagoon' does not belong here"):
        journal.found(model, frames)
    with pytest.raises(UsageError, match="cannot found fragment 0"):
        run_of(SimDisk()).found(model, frames[::-1])


def run_of(disk: SimDisk) -> Journal:
    return Journal.create(disk, a_created())


def test_a_disk_that_turns_read_only_commits_nothing() -> None:
    """The error is a usage error, nothing has changed, and it can be repeated."""
    disk = SimDisk()
    run = Run(disk).start()
    run.commit(0)
    disk.is_read_only = True
    before = view(run.journal)

    acts: tuple[Callable[[], None], ...] = (
        lambda: run.commit(0),
        lambda: run.commit(1),
        lambda: run.stage(1, "a"),
        lambda: run.join("a"),
        lambda: run.journal.compact(0),
    )
    for act in acts:
        with pytest.raises(UsageError, match="read-only"):
            act()
        assert view(run.journal) == before
    disk.is_read_only = False
    run.commit(0)
    run.commit(1)
    run.reopen().check()
    assert [state.round for state in run.states] == [2, 1]


def test_rounds_are_committed_while_a_compaction_goes_on() -> None:
    """A compaction holds nobody up, and takes nothing that came meanwhile for old."""
    disk = Meanwhile(SimDisk())
    run = Run(disk).start()
    for _ in range(3):
        run.commit(1)

    def go_on() -> None:
        run.commit(1)
        run.commit(0)
        run.stage(1, "a")

    disk.act = go_on
    run.journal.compact(1)

    assert disk.names("states/1/") == ["states/1/0", "states/1/3"]
    run.check()
    run.reopen().check()
    assert run.states[1].round == 4
    run.journal.compact(1)
    run.reopen().check()


class Meanwhile:
    """A disk on which something happens in the middle of writing a state."""

    def __init__(self, inner: SimDisk) -> None:
        self._inner = inner
        self.append, self.read, self.sync = inner.append, inner.read, inner.sync
        self.names, self.remove = inner.names, inner.remove
        self.free_bytes = inner.free_bytes
        self.act: Callable[[], None] | None = None

    def write_new(self, name: str, parts: Iterable[Data]) -> None:
        self._inner.write_new(name, self._interrupted(parts))

    def _interrupted(self, parts: Iterable[Data]) -> Iterator[Data]:
        for part in parts:
            yield part
            act, self.act = self.act, None
            if act is not None:
                act()


def test_a_small_round_costs_two_syncs() -> None:
    """One for the body and one for the record; a void round costs one."""
    tally = SyncTally(SimDisk())
    run = Run(tally).start()
    run.join("a")

    for how, cost in (({}, 2), ({"is_void": True}, 1), ({"down": "bf16"}, 2)):
        tally.syncs = 0
        run.commit(0, **how)
        assert tally.syncs == cost


class SyncTally:
    """A disk that counts how often something is made durable."""

    def __init__(self, inner: SimDisk) -> None:
        self._inner = inner
        self.append, self.read = inner.append, inner.read
        self.names, self.remove = inner.names, inner.remove
        self.free_bytes = inner.free_bytes
        self.syncs = 0

    def sync(self, name: str) -> None:
        self.syncs += 1
        self._inner.sync(name)

    def write_new(self, name: str, parts: Iterable[Data]) -> None:
        self.syncs += 2
        self._inner.write_new(name, parts)


def test_a_roster_of_many_is_kept() -> None:
    """A round with a thousand islands is one record."""
    run = Run(SimDisk()).start()
    run.commit(0, islands=1000)

    roster = run.reopen().journal.recorded.rosters[0, 1]

    assert isinstance(roster, Roster)
    assert len(roster.counted) == 1000
