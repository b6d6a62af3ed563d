"""Islands of a real Ray cluster: the contract of launchers, and a node that is lost."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from atoll.errors import Unreachable, UsageError
from atoll.launch.base import Handle, Report, State
from atoll.launch.engines.ray.actors import MAX_LINES, IslandLeader, LeaderTask, Ledger
from atoll.launch.registry import open_launcher
from atoll.launch.spec import Resources, Restarts
from atoll.testing import LAUNCHER_CLAIMS, LaunchStage
from atoll.testing.launcher_contract import STAY, are
from tests.launch.ray_cluster import Nodes, ray_cluster

NOTHING: Callable[[Handle], None] = lambda handle: None  # noqa: E731
AGAIN = (
    "import os, pathlib, sys, time\n"
    "mark = pathlib.Path(sys.argv[1], os.environ['ATOLL_ISLAND'])\n"
    "was_here = mark.exists()\n"
    "mark.touch()\n"
    "print('again' if was_here else 'here', flush=True)\n"
    "time.sleep(0 if was_here else 600)\n"
)
pytestmark = [
    pytest.mark.timeout(300),
    # Ray forks to start its daemons, and JAX may be in this process: none uses it.
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_cluster() as made:
        yield made


@pytest.fixture
def stage(nodes: Nodes, tmp_path: Path) -> LaunchStage:
    options = {"address": nodes.cluster.address}
    return LaunchStage(
        open_launcher=lambda: open_launcher("ray", options), scratch=tmp_path
    )


@pytest.mark.parametrize("claim", LAUNCHER_CLAIMS, ids=lambda claim: claim.__name__)
def test_it_is_a_launcher(
    claim: Callable[[LaunchStage], None], stage: LaunchStage
) -> None:
    """Ray keeps the contract."""
    claim(stage)


def test_an_island_outlives_its_node(nodes: Nodes, stage: LaunchStage) -> None:
    """A node that is lost gives its island to another one, in its next life."""
    has_one = {"num_gpus": 1, "resources": {"accelerator_type:CORAL": 1}}
    lost = nodes.add(**has_one)
    launcher = stage.open_launcher()
    needs = Resources(accelerators=1, accelerator="CORAL")
    order = stage.order(
        AGAIN, str(stage.scratch), num_islands=1, restarts=Restarts(), resources=needs
    )
    handle = launcher.launch(order, keep=NOTHING)
    try:
        stage.until_said(handle, 0, "here")
        nodes.add(**has_one)
        nodes.cluster.remove_node(lost, allow_graceful=False)
        (report,) = stage.until(handle, are(State.FINISHED))
    finally:
        launcher.cancel(handle, grace_s=1.0)

    assert report.restarts == 1
    assert "again" in launcher.logs(handle, 0)


def test_who_waits_for_a_place_is_cancelled(stage: LaunchStage) -> None:
    """An island that no node has room for is pending, and never starts."""
    launcher = stage.open_launcher()
    order = stage.order(STAY, num_islands=1, resources=Resources(cpus=64.0))
    handle = launcher.launch(order, keep=NOTHING)
    stage.until(handle, are(State.PENDING))
    launcher.cancel(handle)

    assert launcher.poll(handle)[0].state is State.CANCELLED


def test_rays_handler_of_sigterm_is_not_left_behind(stage: LaunchStage) -> None:
    """Whoever launches keeps its own way to end."""
    before = signal.getsignal(signal.SIGTERM)
    ray.shutdown()
    stage.open_launcher().cancel(stage.forgotten(_handle(stage)))

    assert signal.getsignal(signal.SIGTERM) == before


def test_no_cluster_is_told(stage: LaunchStage) -> None:
    """An address where nobody is says so, and what to do."""
    ray.shutdown()
    launcher = open_launcher("ray", {"address": "127.0.0.1:9"})
    with pytest.raises(Unreachable, match="ray start --head"):
        launcher.poll(_handle(stage))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"image": "reef:1"}, "image='reef:1' cannot be started by Ray's nodes"),
        ({"secrets": {"A": "engine:a"}}, "The secret A is to come from the engine"),
        ({"resources": Resources(time_limit_s=60.0)}, "Ray has none"),
    ],
)
def test_what_ray_cannot_do_is_refused(
    stage: LaunchStage, more: dict[str, Any], said: str
) -> None:
    """Nothing is submitted that could not run, and the reason is told by name."""
    with pytest.raises(UsageError, match=said):
        stage.open_launcher().plan(stage.order(STAY, **more))


def test_a_ledger_that_lost_its_node_believes_its_islands() -> None:
    """What it does not know any more is told to it again, and nobody is ended."""
    ledger = Ledger({0: "reef-0"}, now_s=lambda: 0.0)
    said = Report(index=0, name="reef-0", state=State.RUNNING).to_dict()

    assert ledger.hear(0, 2, said, ["one"]) is False
    assert ledger.hear(0, 1, said, ["late"]) is True
    assert ledger.reports()[0]["restarts"] == 1
    assert ledger.lines(0, 0) == ["one"]


def test_a_ledger_that_lost_its_node_knows_a_successor() -> None:
    """An actor that follows a lost one is no first life, though nobody was told."""
    ledger = Ledger({0: "reef-0"}, now_s=lambda: 0.0)

    assert ledger.begun(0, True) == (2, False)
    assert ledger.reports()[0]["restarts"] == 1


def test_a_ledger_keeps_the_last_lines() -> None:
    """Its memory is bounded, and what is dropped is the oldest."""
    ledger = Ledger({0: "reef-0"}, now_s=lambda: 0.0)
    said = Report(index=0, name="reef-0", state=State.RUNNING).to_dict()
    ledger.hear(0, 1, said, [str(number) for number in range(MAX_LINES + 2)])

    assert ledger.lines(0, 0)[0] == "2"
    assert ledger.lines(0, MAX_LINES + 1) == [str(MAX_LINES + 1)]


def test_who_hears_it_from_the_ledger_has_time_to_leave() -> None:
    """The ledger may know of a cancel before the actor: that is no reason to kill."""
    ledger = Ledger({0: "reef-0"})
    lead = LeaderTask(
        0, "reef-0", ["sh", "-c", LEAVES], {}, Restarts().to_dict(), False
    )
    thread = threading.Thread(
        target=IslandLeader(lead, _Called(ledger)).lead, args=[_same]
    )
    thread.start()
    _until(lambda: "up" in ledger.lines(0, 0))
    ledger.ask_to_go([0])
    thread.join(100.0)

    assert not thread.is_alive()
    assert ledger.lines(0, 0)[-1] == "left"
    assert ledger.reports()[0]["state"] == "cancelled"


LEAVES = """
trap 'sleep 1; echo left; exit 0' TERM
echo up
while true; do sleep 0.1; echo more; done
"""


class _Called:
    """Calls as Ray has them, without Ray."""

    def __init__(self, called: object) -> None:
        self._called = called

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._called, name))


def _same(answer: Any) -> Any:
    return answer


def _until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 100.0
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.05)


def _handle(stage: LaunchStage) -> Handle:
    order = stage.order(STAY)
    return order.handle("ray", {"namespace": "atoll"})
