"""Islands of a real Slurm: the contract of launchers, and what is this engine's own."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import UsageError
from atoll.launch.base import Handle, LaunchOrder, Report, State
from atoll.launch.bootstrap import bootstrap_argv
from atoll.launch.engines.slurm import INDEX, LEADER, PROGRAMS, IslandFiles, numbers
from atoll.launch.registry import open_launcher
from atoll.launch.spec import IslandSpec, Resources, Restarts
from atoll.security import Secret
from atoll.security.private_files import replace_private
from atoll.testing import LAUNCHER_CLAIMS, LaunchStage
from atoll.testing.launcher_contract import STAY, are
from tests.launch.slurm_cluster import Cluster, slurm_cluster

NOTHING: Callable[[Handle], None] = lambda handle: None  # noqa: E731
LEAVE = (
    "import signal, sys, time\n"
    "def leave(number, frame):\n"
    "    print('left cleanly', flush=True)\n"
    "    sys.exit(0)\n"
    "signal.signal(signal.SIGTERM, leave)\n"
    "print('here', flush=True)\n"
    "time.sleep(600)\n"
)
RANKS = (
    "import time\n"
    "from atoll.island.signals import Termination\n"
    "with Termination() as termination:\n"
    "    print('here', flush=True)\n"
    "    while not termination.is_asked:\n"
    "        time.sleep(0.1)\n"
    "    time.sleep(3)\n"
    "    print('left cleanly', flush=True)\n"
)
AGAIN = (
    "import os, pathlib, sys, time\n"
    "mark = pathlib.Path(sys.argv[1], os.environ['ATOLL_ISLAND'])\n"
    "was_here = mark.exists()\n"
    "mark.touch()\n"
    "print('again' if was_here else 'here', flush=True)\n"
    "time.sleep(0 if was_here else 600)\n"
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm") / "home") as made:
        yield made


@pytest.fixture
def stage(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> LaunchStage:
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    options = {"directory": str(tmp_path / "slurm")}

    def forgotten(handle: Handle) -> Handle:
        reference = {"directory": str(tmp_path / "slurm" / "nowhere"), "job": None}
        return replace(handle, id="claim-unknown", reference=reference)

    return LaunchStage(
        open_launcher=lambda: open_launcher("slurm", options),
        scratch=scratch,
        forgotten=forgotten,
    )


@pytest.mark.parametrize("claim", LAUNCHER_CLAIMS, ids=lambda claim: claim.__name__)
def test_it_is_a_launcher(
    claim: Callable[[LaunchStage], None], stage: LaunchStage
) -> None:
    """Slurm keeps the contract."""
    claim(stage)


def test_a_job_that_slurm_requeues_goes_on(
    cluster: Cluster, stage: LaunchStage
) -> None:
    """A preempted island comes back under its name, and is not over in between."""
    order = stage.order(AGAIN, str(stage.scratch), num_islands=1, restarts=Restarts())
    launcher = stage.open_launcher()
    handle = launcher.launch(order, keep=NOTHING)
    stage.until_said(handle, 0, "here")
    task = f"{handle.reference['job']}_0"
    cluster.tell("scontrol", "requeue", task)
    (waiting,) = stage.until(handle, lambda all_: all_[0].restarts == 1)
    assert not waiting.state.is_over
    _begin_now(cluster, stage, handle, task)
    (report,) = stage.until(handle, are(State.FINISHED))

    assert report.restarts == 1
    assert "again" in launcher.logs(handle, 0)


def test_an_island_outlives_its_node(cluster: Cluster, stage: LaunchStage) -> None:
    """A node that dies gives its island to another one."""
    order = stage.order(AGAIN, str(stage.scratch), num_islands=1, restarts=Restarts())
    launcher = stage.open_launcher()
    handle = launcher.launch(order, keep=NOTHING)
    stage.until_said(handle, 0, "here")
    (running,) = launcher.poll(handle)
    try:
        cluster.kill_node(running.host)
        stage.until(handle, lambda all_: all_[0].restarts == 1)
        _begin_now(cluster, stage, handle, f"{handle.reference['job']}_0")
        (report,) = stage.until(handle, are(State.FINISHED))
    finally:
        cluster.start_node(running.host)

    assert report.host != running.host
    assert "again" in launcher.logs(handle, 0)


def test_whom_slurm_cancels_is_told_once(cluster: Cluster, stage: LaunchStage) -> None:
    """An operator's `scancel` is a clean leave, and the island is cancelled."""
    launcher = stage.open_launcher()
    handle = launcher.launch(stage.order(LEAVE, num_islands=1), keep=NOTHING)
    stage.until_said(handle, 0, "here")
    cluster.tell("scancel", str(handle.reference["job"]))
    (report,) = stage.until(handle, are(State.CANCELLED))

    assert report.exit_code == 0
    assert launcher.logs(handle, 0).count("left cleanly") == 1


@pytest.mark.torch
def test_ranks_that_are_told_twice_leave_cleanly(
    cluster: Cluster, stage: LaunchStage
) -> None:
    """Slurm tells every process of the task, and torchrun tells its ranks again."""
    launcher = stage.open_launcher()
    (stage.scratch / "ranks.py").write_text(RANKS)
    order = stage.order(RANKS, num_islands=1)
    command = (str(stage.scratch / "ranks.py"),)
    ranks = replace(order, spec=replace(order.spec, command=command, processes=2))
    handle = launcher.launch(ranks, keep=NOTHING)
    _until(lambda: launcher.logs(handle, 0).count("here") == 2)
    cluster.tell("scancel", str(handle.reference["job"]))
    stage.until(handle, are(State.CANCELLED))

    assert launcher.logs(handle, 0).count("left cleanly") == 2


def test_the_signal_before_the_time_limit_is_a_clean_leave(
    cluster: Cluster, stage: LaunchStage
) -> None:
    """What Slurm sends to the leader alone reaches the island as SIGTERM."""
    limit = Resources(time_limit_s=600.0)
    order = stage.order(LEAVE, num_islands=1, resources=limit)
    launcher = stage.open_launcher()
    assert "#SBATCH --signal=B:USR1@60\n" in launcher.plan(order).text
    handle = launcher.launch(order, keep=NOTHING)
    stage.until_said(handle, 0, "here")
    job = str(handle.reference["job"])
    cluster.tell("scancel", "--batch", "--signal=USR1", f"{job}_0")
    (report,) = stage.until(handle, are(State.CANCELLED))

    assert report.exit_code == 0
    assert launcher.logs(handle, 0).count("left cleanly") == 1


def test_who_waits_for_a_place_is_cancelled(stage: LaunchStage) -> None:
    """An island that Slurm has not started never starts."""
    launcher = stage.open_launcher()
    order = stage.order(STAY, num_islands=5, resources=Resources(cpus=3.0))
    handle = launcher.launch(order, keep=NOTHING)
    reports = stage.until(
        handle, lambda all_: sum(each.state is State.RUNNING for each in all_) == 3
    )
    assert [each.state for each in reports].count(State.PENDING) == 2
    launcher.cancel(handle, grace_s=5.0)
    stage.until(handle, are(State.CANCELLED))


def test_secrets_are_there_as_long_as_a_task_may_start(
    cluster: Cluster, stage: LaunchStage
) -> None:
    """A requeued island finds them; when all are over, or cancelled, they are gone.

    They are for this user's eyes alone as long as they are there.
    """
    more = {"secrets": {"A": "env:A"}, "values": {"A": Secret("hush")}}
    order = stage.order(
        AGAIN, str(stage.scratch), num_islands=1, restarts=Restarts(), **more
    )
    launcher = stage.open_launcher()
    handle = launcher.launch(order, keep=NOTHING)
    kept = Path(handle.reference["directory"]) / "secrets.json"
    stage.until_said(handle, 0, "here")
    task = f"{handle.reference['job']}_0"
    cluster.tell("scontrol", "requeue", task)
    stage.until(handle, lambda all_: all_[0].restarts == 1)
    assert kept.stat().st_mode & 0o777 == 0o600
    _begin_now(cluster, stage, handle, task)
    stage.until(handle, are(State.FINISHED))
    _until(lambda: launcher.poll(handle) and not kept.exists())

    other = launcher.launch(stage.order(STAY, num_islands=2, **more), keep=NOTHING)
    kept = Path(other.reference["directory"]) / "secrets.json"
    launcher.cancel(other, indexes=[0], grace_s=5.0)
    assert "hush" in kept.read_text()
    launcher.cancel(other, grace_s=5.0)
    assert not kept.exists()
    stage.until(other, are(State.CANCELLED))


def test_a_task_that_starts_without_secrets_starts_nothing(tmp_path: Path) -> None:
    """Cancelled it ends as such; and else it says what has become of them."""
    files = IslandFiles(tmp_path, 0)
    files.make()
    words = [sys.executable, "-m", LEADER, "--place", str(tmp_path), "--name", "a"]
    words += ["--restarts", "{}", "--", "bootstrap", "--", "echo", "here"]
    around = {**os.environ, INDEX: "0"}
    done = subprocess.run(words, env=around, capture_output=True, text=True)
    assert done.returncode == 1
    assert "was over, and its secrets are gone" in done.stderr
    files.request_cancel(5.0)
    done = subprocess.run(words, env=around, capture_output=True, text=True)

    assert (done.returncode, files.lines(0)) == (0, [])
    report = files.read_state(incarnation=0)
    assert report is not None
    assert report.state is State.CANCELLED


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("COMPLETING", State.RUNNING),
        ("COMPLETED", State.CANCELLED),
        ("PENDING", State.RESTARTING),
    ],
)
def test_whom_slurm_told_to_go_is_over_by_its_word(
    word: str, state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preempted island whose leader has ended is not over: it may come back."""
    handle = _island_that_slurm_cancelled(tmp_path)
    _fake_programs(
        tmp_path, monkeypatch, f"JobState={word} Restarts={int(word == 'PENDING')}"
    )
    (report,) = open_launcher("slurm").poll(handle)

    assert report.state is state


@pytest.mark.parametrize(
    "record",
    [
        "JobState=RUNNING Restarts=0",
        "JobState=COMPLETING Restarts=1",
        "JobState=PENDING,COMPLETING Restarts=1",
        "JobState=REQUEUED Restarts=1",
        "JobState=PENDING Restarts=1 Reason=BeginTime",
        "JobState=RESV_DEL_HOLD Restarts=1",
        "JobState=CONFIGURING Restarts=1",
        "JobState=FAILED,REQUEUED Restarts=0 ExitCode=1:0",
        "JobState=RUNNING Restarts=1",
    ],
)
def test_a_poll_during_a_requeue_keeps_the_secrets(
    record: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The secrets remain in every state from which Slurm starts the task again."""
    handle = _island_that_slurm_cancelled(tmp_path)
    secrets = Path(handle.reference["directory"]) / "secrets.json"
    replace_private(secrets, b"{}")
    _fake_programs(tmp_path, monkeypatch, record)
    open_launcher("slurm").poll(handle)

    assert secrets.exists()
    _fake_programs(tmp_path, monkeypatch, "JobState=FAILED Restarts=1 ExitCode=1:0")
    open_launcher("slurm").poll(handle)
    assert not secrets.exists()


def _island_that_slurm_cancelled(tmp_path: Path) -> Handle:
    """Return the handle of an island whose first leader has received SIGTERM."""
    directory = tmp_path / "launch"
    directory.mkdir()
    files = IslandFiles(directory, 0)
    files.make()
    report = Report(index=0, name="a-0", state=State.CANCELLED, exit_code=0)
    files.write_state(report, incarnation=0)
    reference = {"job": 7, "directory": str(directory)}
    return Handle(
        id="a", engine="slurm", run="/r", name="a", num_islands=1, reference=reference
    )


def _fake_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: str
) -> None:
    """Put programs in front that print one record of the job."""
    line = f"JobId=7 ArrayTaskId=0 JobName=a {record}"
    for program in PROGRAMS:
        (tmp_path / program).write_text(f"#!/bin/sh\necho '{line}'\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def test_a_plan_is_what_sbatch_takes(
    cluster: Cluster, stage: LaunchStage, tmp_path: Path
) -> None:
    """What `--dry-run` prints is submitted as it stands."""
    more = Resources(cpus=2.0, memory_bytes=2**20, time_limit_s=600.0)
    plan = stage.open_launcher().plan(stage.order(STAY, resources=more))
    (tmp_path / "plan.sh").write_text(plan.text)

    cluster.tell("sbatch", "--test-only", str(tmp_path / "plan.sh"))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"image": "reef:1"}, "Slurm cannot install image='reef:1'"),
        ({"requirements": ("torch",)}, "Slurm cannot install requirements="),
        ({"secrets": {"A": "engine:a"}}, "The secret A is to come from the engine"),
        ({"resources": Resources(time_limit_s=60.0)}, "leaves no time to train"),
        ({"directory": "/with a space"}, "cannot be written into a batch script"),
    ],
)
def test_what_slurm_cannot_do_is_refused(
    stage: LaunchStage, more: dict[str, Any], said: str
) -> None:
    """Nothing is submitted that could not run, and the reason is told by name."""
    with pytest.raises(UsageError, match=said):
        stage.open_launcher().plan(stage.order(STAY, **more))


def test_impossible_resources_are_slurms_own_words(stage: LaunchStage) -> None:
    """What no node of the cluster has is refused when it is submitted."""
    order = stage.order(STAY, resources=Resources(memory_bytes=2**60))
    with pytest.raises(UsageError, match=r"sbatch says: .*not available"):
        stage.open_launcher().launch(order, keep=NOTHING)


def test_a_machine_without_slurm_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no sbatch, nothing can be launched; a plan needs none."""
    monkeypatch.setenv("PATH", "/nowhere")
    launcher = open_launcher("slurm")
    spec = IslandSpec(command=("train.py",), run="/runs/a", name="a")
    order = LaunchOrder(id="a-1", spec=spec, num_islands=1)
    with pytest.raises(UsageError, match="sbatch is not on this machine"):
        launcher.launch(order, keep=NOTHING)

    assert "#SBATCH --job-name=a-1" in launcher.plan(order).text


@pytest.mark.parametrize(
    ("said", "found"),
    [("3", [3]), ("0-2,5", [0, 1, 2, 5]), ("1-2%4", [1, 2]), ("N/A", []), ("", [])],
)
def test_the_numbers_of_tasks_are_read(said: str, found: list[int]) -> None:
    """A record of tasks that wait is about several, one of a task about itself."""
    assert list(numbers(said)) == found


def test_a_full_disk_ends_no_leader(tmp_path: Path) -> None:
    """It leads on, and writes down how its island ended when there is room again."""
    files = IslandFiles(tmp_path, 0)
    files.make()
    replace_private(tmp_path / "secrets.json", b"{}")
    waits = f"echo here; while [ ! -e {tmp_path}/go ]; do sleep 0.1; done"
    spec = IslandSpec(command=("sh", "-c", waits), run="/no/run", name="a")
    words = [sys.executable, "-m", LEADER, "--place", str(tmp_path), "--name", "a"]
    words += ["--restarts", "{}", "--"]
    words += bootstrap_argv(spec, index=0, python=sys.executable)
    with subprocess.Popen(words, env={**os.environ, INDEX: "0"}) as leader:
        until_s = time.monotonic() + 100.0
        while "here" not in files.lines(0):
            assert time.monotonic() < until_s
            time.sleep(0.05)
        before = resource.prlimit(leader.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(leader.pid, resource.RLIMIT_FSIZE, (0, before[1]))
        (tmp_path / "go").touch()
        with pytest.raises(subprocess.TimeoutExpired):
            leader.wait(3.0)  # in which it has tried, and would be gone
        resource.prlimit(leader.pid, resource.RLIMIT_FSIZE, before)
        assert leader.wait(100.0) == 0
    report = files.read_state(incarnation=0)

    assert report is not None
    assert report.state is State.FINISHED


def _until(is_so: Callable[[], object]) -> None:
    until_s = time.monotonic() + 100.0
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.2)


def _begin_now(cluster: Cluster, stage: LaunchStage, handle: Handle, task: str) -> None:
    """Spare the two minutes that Slurm waits before it starts a job again.

    A node refuses a job whose credential is not newer than the revocation of the last
    one, in whole seconds: then Slurm ends the job as FAILED with exit code 1, without
    having started the batch script.
    """
    until_s = time.monotonic() + stage.wait_s
    while "JobState=PENDING" not in cluster.tell("scontrol", "show", "job", task):
        assert time.monotonic() < until_s
        time.sleep(0.2)
    revoked_by_s = int(time.time())
    while int(time.time()) == revoked_by_s:
        time.sleep(0.05)
    cluster.tell("scontrol", "update", f"JobId={task}", "StartTime=now")
