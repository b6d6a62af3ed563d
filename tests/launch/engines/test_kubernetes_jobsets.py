"""Islands as JobSets: several pods each, which live and die together."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from atoll.errors import UsageError
from atoll.launch.api import plan_spec
from atoll.launch.base import Handle, LaunchOrder, State
from atoll.launch.registry import open_launcher
from atoll.launch.spec import IslandSpec, Resources, Restarts
from atoll.testing import LAUNCHER_CLAIMS, LaunchStage
from atoll.testing.launcher_contract import FAIL, STAY, are, are_over
from tests.launch.kubernetes_jobs import validate
from tests.launch.kubernetes_server import KubernetesServer, until
from tests.launch.planned import SECRETS, both

PAGE = Path(__file__).parents[3] / "docs" / "launching-kubernetes.md"
COUNT = (
    "import os, pathlib, sys, time\n"
    "number = os.environ['JOB_COMPLETION_INDEX']\n"
    "for turn in range(3):\n"
    "    while not pathlib.Path(sys.argv[1], f'{number}{turn}').exists():\n"
    "        time.sleep(0.02)\n"
    "    print(turn, flush=True)\n"
)
NOTHING: Callable[[Handle], None] = lambda handle: None  # noqa: E731


@pytest.fixture
def server(tmp_path: Path) -> Iterator[KubernetesServer]:
    place = tmp_path / "cluster"
    place.mkdir()
    with KubernetesServer(place).serving() as server:
        yield server


def _stage(server: KubernetesServer, scratch: Path, **more: str) -> LaunchStage:
    given = {"kubeconfig": str(server.kubeconfig()), "python": sys.executable}
    options = {**given, "jobset": "true", **more}
    return LaunchStage(
        open_launcher=lambda: open_launcher("kubernetes", options),
        scratch=scratch,
        spec={"image": "reef/atoll:1"},
    )


@pytest.mark.parametrize("claim", LAUNCHER_CLAIMS, ids=lambda claim: claim.__name__)
def test_it_is_a_launcher(
    claim: Callable[[LaunchStage], None], server: KubernetesServer, tmp_path: Path
) -> None:
    """A cluster with JobSet keeps the contract."""
    claim(_stage(server, tmp_path))


def test_pods_of_an_island_begin_anew_together(
    server: KubernetesServer, tmp_path: Path
) -> None:
    """If the machine of one dies, all of them are others, and one restart is told."""
    stage = _stage(server, tmp_path, hosts="2")
    launcher = stage.open_launcher()
    order = stage.order(STAY, num_islands=1, restarts=Restarts(max_restarts=1))
    handle = launcher.launch(order, keep=NOTHING)
    try:
        stage.until_said(handle, 0, "pod 0: here")
        stage.until_said(handle, 0, "pod 1: here")
        before = server.pods()
        before[0].kill()
        (report,) = stage.until(
            handle, lambda all_: all_[0].restarts == 1 and are(State.RUNNING)(all_)
        )
        until(server, lambda: len(server.pods()) == 2)

        assert report.name == "claim-0"
        assert not set(before) & set(server.pods())
    finally:
        launcher.cancel(handle)
        stage.until(handle, are_over)


def test_an_island_of_one_pod_that_dies_at_once_is_left_dead(
    server: KubernetesServer, tmp_path: Path
) -> None:
    """Its leader has tried three times, with pauses, and JobSet does not try on."""
    stage = _stage(server, tmp_path)
    restarts = Restarts(first_pause_s=0.1, max_crashes=3)
    order = stage.order(FAIL, num_islands=1, restarts=restarts)
    handle = stage.open_launcher().launch(order, keep=NOTHING)
    (report,) = stage.until(handle, are_over)

    assert (report.state, report.restarts, report.exit_code) == (State.FAILED, 2, 3)
    assert report.reason == "crashed 3 times in a row: exit code 3"
    assert stage.open_launcher().logs(handle, 0).count("before the end") == 3


def test_pods_that_die_at_once_go_after_a_pause_that_grows(
    server: KubernetesServer, tmp_path: Path
) -> None:
    """JobSet knows no pause between two lives of an island, and its leaders do."""
    stage = _stage(server, tmp_path, hosts="2")
    restarts = Restarts(max_restarts=2, first_pause_s=0.5)
    order = stage.order(FAIL, num_islands=1, restarts=restarts)
    handle = stage.open_launcher().launch(order, keep=NOTHING)
    (report,) = stage.until(handle, are_over)
    said = [each.read_text() for each in server.directory.glob("*/log")]
    paused = set(re.findall(r"exit code 3, and exits in (\S+) s", "".join(said)))

    assert paused == {"0.5", "1"}
    assert (report.state, report.restarts) == (State.FAILED, 2)


def test_lines_of_several_pods_are_in_one_order_that_stays(
    server: KubernetesServer, tmp_path: Path
) -> None:
    """Whoever follows sees every line once, whichever pod speaks; and so later."""
    stage = _stage(server, tmp_path, hosts="2")
    launcher = stage.open_launcher()
    order = stage.order(COUNT, str(tmp_path), num_islands=1)
    handle = launcher.launch(order, keep=NOTHING)
    told: list[str] = []
    for turn in ("10", "00", "11"):
        (tmp_path / turn).touch()
        stage.until_said(handle, 0, f"pod {turn[0]}: {turn[1]}")
        told += launcher.logs(handle, 0, after=len(told))
    for turn in ("01", "02", "12"):
        (tmp_path / turn).touch()
    stage.until(handle, are_over)
    told += launcher.logs(handle, 0, after=len(told))

    assert told[:3] == ["pod 1: 0", "pod 0: 0", "pod 1: 1"]
    assert sorted(told[3:]) == ["pod 0: 1", "pod 0: 2", "pod 1: 2"]
    assert stage.open_launcher().logs(handle, 0)[:3] == told[:3]


def test_a_log_is_followed_from_life_to_life(
    server: KubernetesServer, tmp_path: Path
) -> None:
    """A cluster has the log of a life no more: the next one's lines are not skipped."""
    stage = _stage(server, tmp_path)
    launcher = stage.open_launcher()
    order = stage.order(STAY, num_islands=1, restarts=Restarts(max_restarts=1))
    handle = launcher.launch(order, keep=NOTHING)
    try:
        stage.until_said(handle, 0, "here")
        told = launcher.logs(handle, 0)
        (pod,) = server.pods()
        pod.kill()
        until(server, lambda: server.pods() and pod not in server.pods())
        stage.until_said(handle, 0, "here")

        assert launcher.logs(handle, 0, after=len(told)) == ["here"]
    finally:
        launcher.cancel(handle)
        stage.until(handle, are_over)


def test_an_island_that_is_not_admitted_waits_and_is_cancelled(
    server: KubernetesServer, tmp_path: Path
) -> None:
    """It says that it is suspended, and goes without ever having had a pod."""
    stage = _stage(server, tmp_path, queue="reef-queue")
    launcher = stage.open_launcher()
    handle = launcher.launch(stage.order(STAY, num_islands=1), keep=NOTHING)
    (suspended,) = server.jobsets.values()
    until(server, lambda: "conditions" in suspended.form["status"])
    (waiting,) = launcher.poll(handle)
    launcher.cancel(handle)

    assert waiting.state is State.PENDING
    assert waiting.reason == "SuspendedJobs: jobset is suspended"
    assert server.jobsets == {}


def test_a_plan_is_what_is_submitted(
    server: KubernetesServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One JobSet after the other, with the references of all secrets."""
    options = {"kubeconfig": str(server.kubeconfig()), "python": sys.executable}
    options |= {"jobset": "true", "hosts": "2"}
    each = both(
        "kubernetes", tmp_path, monkeypatch, options=options, image="reef/atoll:1"
    )
    sets = [it for it in server.submitted if it["kind"] == "JobSet"]

    assert each.as_planned(sets) == each.plan.data
    assert all(f"name: {name}\n" in each.plan.text for name in SECRETS)


def test_the_example_of_a_slice_is_what_is_submitted(server: KubernetesServer) -> None:
    """The page shows the JobSet of a TPU slice as `--dry-run` prints it."""
    options = {
        "kubeconfig": str(server.kubeconfig()),
        "jobset": "true",
        "hosts": "4",
        "queue": "multislice-queue",
        "exclusive_topology": "cloud.google.com/gke-nodepool",
        "accelerator_resource": "google.com/tpu",
        "accelerator_label": "cloud.google.com/gke-tpu-accelerator",
        "node_selector": "cloud.google.com/gke-tpu-topology=4x4",
    }
    spec = IslandSpec(
        command=("train.py",),
        run="gs://reef/lagoon",
        name="tpu",
        image="reef/atoll:1",
        resources=Resources(accelerators=4, accelerator="tpu-v5-lite-podslice"),
    )
    plan = plan_spec("kubernetes", 1, spec, options=options)
    (shown,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)

    assert yaml.safe_load(shown) == plan.data[0]
    validate(plan.data[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"jobset": "true", "hosts": "0"}, "hosts=0: an island has 1 pod or more"),
        ({"hosts": "2"}, "hosts=2 is for islands of several pods. Add jobset=true"),
    ],
)
def test_impossible_hosts_are_refused(
    options: dict[str, str], message: str, server: KubernetesServer
) -> None:
    """When the launcher is made."""
    with pytest.raises(UsageError, match=message):
        open_launcher("kubernetes", {"kubeconfig": str(server.kubeconfig()), **options})


def test_a_cluster_without_jobsets_is_told(server: KubernetesServer) -> None:
    """They are an extension, which somebody has to install."""
    server.has_jobsets = False
    options = {"kubeconfig": str(server.kubeconfig()), "jobset": "true"}
    spec = IslandSpec(command=("a",), run="gs://reef/a", name="a", image="i")
    order = LaunchOrder(id="a-1", spec=spec, num_islands=1)
    with pytest.raises(UsageError, match=r"knows no JobSet in reef\. Install"):
        open_launcher("kubernetes", options).launch(order, keep=NOTHING)


def test_a_name_too_long_for_pods_is_refused(server: KubernetesServer) -> None:
    """JobSet would refuse it later, and say less."""
    options = {"kubeconfig": str(server.kubeconfig()), "jobset": "true"}
    spec = IslandSpec(command=("a",), run="gs://reef/a", name="a", image="i")
    order = LaunchOrder(id="a" * 50, spec=spec, num_islands=1)
    with pytest.raises(UsageError, match=r"too long .* characters shorter"):
        open_launcher("kubernetes", options).plan(order)
