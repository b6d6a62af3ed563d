"""What is told of a run is what happened, and telling changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from atoll import RunSettings
from atoll.exchange import CoordinatorExchange
from atoll.island import Host
from atoll.island.numpy_model import VectorView, vector_model
from atoll.protocol import JoinRequest
from atoll.simulate import FaultPlan, SimWorld, TraceEvent, apply, random_plan, timeline
from atoll.simulate.hosts import CoordinatorHost, SimLine, SimRuntime
from atoll.simulate.process import SimProcess
from atoll.simulate.run import simulate
from atoll.simulate.story import CommitTrace

NAMES = [f"i{number}" for number in range(4)]
ROUNDS = 6
SETTINGS = RunSettings.from_dict(
    {
        "run": {"start_islands": 4, "end_rounds": ROUNDS, "quorum": 2},
        "sync": {"sync_every": 12, "num_fragments": 2, "overlap_steps": 1},
        "wire": {"up": "e3m0", "down": "int8"},
        "limits": {"deadline_max_s": 60.0},
    }
)
MODEL = vector_model({"h.0.w": (7,), "h.1.w": (5,)})


class Told:
    """A run whose rosters can be read afterwards, beside what was told of it."""

    def __init__(self, world: SimWorld, plan: FaultPlan) -> None:
        self.happenings: list[TraceEvent] = []
        self._world, self._open = world, set(NAMES)
        world.scheduler.trace = self.happenings.append
        self.coordinator = CoordinatorHost(world, SETTINGS)
        self.coordinator.start()
        for name in NAMES:
            process = world.add(name)
            process.start(partial(self._train, process))
        apply(plan, world)
        world.scheduler.run(600.0)

    def _train(self, process: SimProcess) -> None:
        exchange = CoordinatorExchange(
            SimLine(self._world, process),
            key=process.name.encode(),
            nonce=str(process.incarnation).encode(),
        )
        host = Host(
            exchange,
            VectorView(),
            JoinRequest(model=MODEL, island=process.name),
            runtime=SimRuntime(self._world, process),
        )
        while not host.has_ended:
            process.work(0.5)
            host.stepped()
        host.leave()
        self._open.discard(process.name)
        if not self._open:
            self._world.scheduler.stop()

    def commits(self) -> list[CommitTrace]:
        return [
            CommitTrace.parsed(each.detail)
            for each in self.happenings
            if each.action == "commit"
        ]

    def who(self, what: str) -> list[str]:
        return [each.subject for each in self.happenings if each.action == what]


def tell(plan: FaultPlan, seed: int = 0) -> Told:
    """Return a run under `plan`, with every committed round as its journal has it."""
    with SimWorld(seed) as world:
        told = Told(world, plan)
        service = told.coordinator.service
        assert service is not None
        rosters = service.journal.recorded.rosters
        assert [dict(each.verdicts) for each in told.commits()] == [
            {
                e.island: str(e.verdict)
                for e in rosters[each.fragment, each.round].entries
            }
            for each in told.commits()
        ]
        return told


def everything(rounds: int = ROUNDS) -> Iterator[tuple[int, int]]:
    """Yield every fragment and round of a run."""
    yield from ((fragment, n) for fragment in (0, 1) for n in range(1, rounds + 1))


def test_a_line_of_a_timeline_says_when_who_and_what() -> None:
    """Columns are aligned, and nothing trails behind the last word."""
    told = [TraceEvent(0.25, "i0", "join"), TraceEvent(12.0, "i10", "crash", "life 2")]

    assert list(timeline(told)) == [
        "     0.250000 s  i0            join",
        "    12.000000 s  i10           crash      life 2",
    ]


@pytest.mark.parametrize("verdicts", [{}, {"i0": "counted"}, {"a b": "late", "c": "x"}])
def test_a_commit_can_be_read_from_its_text(verdicts: dict[str, str]) -> None:
    """What a happening is about is the round, whatever the islands are called."""
    ages = dict.fromkeys(verdicts, 3)
    commit = CommitTrace(fragment=1, round=12, verdicts=verdicts, ages=ages)

    assert CommitTrace.parsed(str(commit)) == commit


def test_a_calm_run_tells_how_it_began_and_ended() -> None:
    """Everybody joins, one founds, all count in every round, and all leave."""
    told = tell(FaultPlan())

    assert sorted(told.who("join")) == sorted(told.who("leave")) == NAMES
    assert told.who("found") == told.who("join")[:1]
    assert told.who("begin") == ["coordinator"]
    assert [(each.fragment, each.round) for each in sorted(told.commits())] == list(
        everything()
    )
    assert {v for each in told.commits() for v in each.verdicts.values()} == {"counted"}
    assert told.who("carry") == told.who("lapse") == told.who("pause") == []


@pytest.mark.parametrize("seed", range(12))
def test_told_rosters_are_those_of_the_journal(seed: int) -> None:
    """Under any storm, every round is told once, with the verdicts it really had."""
    told = tell(random_plan(seed, NAMES, span_s=40.0), seed)
    commits = [(each.fragment, each.round) for each in told.commits()]

    assert sorted(commits) == list(everything())


@pytest.mark.parametrize(("for_s", "what"), [(18.0, "carry"), (25.0, "drop")])
def test_an_island_that_stands_still_is_told_of(for_s: float, what: str) -> None:
    """Its lease runs out, it is heard again, and what it missed is carried or not."""
    told = tell(FaultPlan().freeze("i1", at_s=8.0, for_s=for_s))

    assert told.who("lapse") == told.who("revive") == ["i1"]
    # A window takes 6 s once the others go on at 22 s: by 33 s it missed three rounds.
    assert set(told.who(what)) == {"i1"}


def test_a_coordinator_says_what_it_came_back_with() -> None:
    """Its next life has the rounds that were committed before it died."""
    told = tell(FaultPlan().kill("coordinator", at_s=20.0, back_after_s=5.0))
    before = [each for each in told.happenings if each.at_s < 20.0]
    rounds = [
        CommitTrace.parsed(h.detail).round for h in before if h.action == "commit"
    ]
    first, second = (h.detail for h in told.happenings if h.action == "open")

    assert first == "no weights"
    # Fragment 0 is sent after half of each window, fragment 1 after all of it.
    assert second == f"rounds {rounds[-1]} {rounds[-2]}" or second == (
        f"rounds {rounds[-2]} {rounds[-1]}"
    )


def test_a_run_below_its_quorum_pauses_and_goes_on() -> None:
    """Three of four islands are cut off, and two are needed to close a round."""
    told = tell(FaultPlan().partition(["i0", "i1", "i2"], at_s=10.0, for_s=40.0))
    (pause,) = [h for h in told.happenings if h.action == "pause"]
    (resume,) = [h for h in told.happenings if h.action == "resume"]

    assert 10.0 < pause.at_s < 50.0 < resume.at_s < 60.0
    assert pause.detail == "1 live, quorum 2"


def test_telling_changes_nothing() -> None:
    """A run that is traced is the run that it would have been."""
    plan = random_plan(5, NAMES, span_s=40.0)
    told: list[TraceEvent] = []
    traced = simulate(SETTINGS, islands=4, faults=plan, seed=5, trace=told.append)

    assert traced == simulate(SETTINGS, islands=4, faults=plan, seed=5)
    assert told
