"""Islands on this machine: the contract of launchers, and what is this engine's own."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import atoll
from atoll import RunSettings
from atoll.errors import CorruptError, UsageError
from atoll.launch.base import Handle, Launcher, LaunchOrder, State
from atoll.launch.engines.local import (
    device_shares,
    thread_limits,
    visible_devices,
)
from atoll.launch.registry import open_launcher
from atoll.launch.spec import IslandSpec, Resources, Restarts
from atoll.testing import LAUNCHER_CLAIMS, LaunchStage
from atoll.testing.launcher_contract import FAIL, STAY, are_over

NOTHING: Callable[[Handle], None] = lambda handle: None  # noqa: E731


@pytest.fixture
def stage(tmp_path: Path) -> LaunchStage:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    options = {"directory": str(tmp_path / "local")}
    return LaunchStage(
        open_launcher=lambda: open_launcher("local", options), scratch=scratch
    )


@pytest.mark.parametrize("claim", LAUNCHER_CLAIMS, ids=lambda claim: claim.__name__)
def test_it_is_a_launcher(
    claim: Callable[[LaunchStage], None], stage: LaunchStage
) -> None:
    """This machine keeps the contract."""
    claim(stage)


def test_an_island_that_dies_at_once_is_left_dead(stage: LaunchStage) -> None:
    """Three times are enough, and its log says so."""
    restarts = Restarts(first_pause_s=0.05, longest_pause_s=0.1)
    order = stage.order(FAIL, num_islands=1, restarts=restarts)
    launcher = stage.open_launcher()
    handle = launcher.launch(order, keep=NOTHING)
    (report,) = stage.until(handle, are_over)

    assert (report.state, report.restarts, report.exit_code) == (State.FAILED, 2, 3)
    assert report.reason == "crashed 3 times in a row: exit code 3"
    said = launcher.logs(handle, 0)
    assert said.count("before the end") == 3
    assert said[-1] == "atoll: claim-0 ended with exit code 3, and is not restarted."


BEYOND = """
import atoll.torch, torch
from atoll import kernels

kernels.use("numpy")  # starts at once
models = [torch.nn.Linear(1, 1) for _ in "ab"]
first, second = (
    atoll.torch.join(model, torch.optim.SGD(model.parameters()), {run!r}, island=name)
    for model, name in zip(models, "ab")
)
for row in atoll.torch.shard(list(range(8)), second):
    print("a row")
"""
"""The second island of a run that cuts its data for one."""


@pytest.mark.torch
@pytest.mark.timeout(120)
def test_an_island_without_a_share_is_not_started_again(
    stage: LaunchStage, tmp_path: Path
) -> None:
    """It ends at once, and its log names the setting that helps."""
    run = str(tmp_path / "bucket")
    atoll.init(run, RunSettings.from_dict({"run": {"start_islands": 1}}))
    restarts = Restarts(first_pause_s=0.05, longest_pause_s=0.1)
    command = BEYOND.format(run=run)
    order = stage.order(command, num_islands=1, restarts=restarts)
    launcher = stage.open_launcher()
    handle = launcher.launch(order, keep=NOTHING)
    (report,) = stage.until(handle, are_over)

    said = launcher.logs(handle, 0)
    assert (report.state, report.restarts, report.exit_code) == (State.FAILED, 0, 6)
    assert report.reason == "exit code 6: it has no part in the run"
    assert "a row" not in said
    assert any("run.max_islands" in line for line in said)
    assert "is not restarted: it has no part in the run" in said[-1]


def test_a_killed_island_comes_back(stage: LaunchStage) -> None:
    """Its process is another one, and its name and index are the same."""
    restarts = Restarts(first_pause_s=0.05)
    launcher = stage.open_launcher()
    handle = launcher.launch(
        stage.order(STAY, num_islands=1, restarts=restarts), keep=NOTHING
    )
    try:
        stage.until_said(handle, 0, "here")
        (before,) = launcher.poll(handle)
        os.kill(int(before.host.split()[1]), signal.SIGKILL)
        (after,) = stage.until(
            handle,
            lambda all_: all_[0].state is State.RUNNING and all_[0].restarts == 1,
        )

        assert after.host != before.host
        assert (after.name, after.exit_code) == (before.name, -9)
        assert "signal 9 (SIGKILL)" in " ".join(launcher.logs(handle, 0))
    finally:
        launcher.cancel(handle, grace_s=1.0)
        stage.until(handle, are_over)


def test_islands_of_a_dead_supervisor_are_found_and_ended(stage: LaunchStage) -> None:
    """Whatever was killed, the handle ends the rest."""
    launcher = stage.open_launcher()
    handle = launcher.launch(stage.order(STAY, num_islands=1), keep=NOTHING)
    stage.until_said(handle, 0, "here")
    (before,) = launcher.poll(handle)
    process = int(before.host.split()[1])
    os.kill(_parent(process), signal.SIGKILL)
    (orphan,) = stage.until(handle, lambda all_: "supervisor" in all_[0].reason)
    launcher.cancel(handle, grace_s=1.0)
    (gone,) = stage.until(handle, are_over)

    assert orphan.state is State.RUNNING
    assert gone.state is State.LOST


def test_a_full_disk_ends_no_supervisor(stage: LaunchStage) -> None:
    """It leads on, and says what it knows when there is room again."""
    restarts = Restarts(first_pause_s=600.0, longest_pause_s=600.0)
    launcher = stage.open_launcher()
    order = stage.order(STAY, num_islands=1, restarts=restarts)
    handle = launcher.launch(order, keep=NOTHING)
    stage.until_said(handle, 0, "here")
    island = int(launcher.poll(handle)[0].host.split()[1])
    supervisor = _parent(island)
    before = resource.prlimit(supervisor, resource.RLIMIT_FSIZE)
    resource.prlimit(supervisor, resource.RLIMIT_FSIZE, (0, before[1]))
    os.kill(island, signal.SIGKILL)
    until_s = time.monotonic() + 1.0  # in which it has tried, and would be gone
    while time.monotonic() < until_s and _is_alive(supervisor):
        time.sleep(0.05)
    assert _is_alive(supervisor)
    resource.prlimit(supervisor, resource.RLIMIT_FSIZE, before)
    (led,) = stage.until(handle, lambda all_: all_[0].state is not State.RUNNING)
    launcher.cancel(handle)
    (gone,) = stage.until(handle, are_over)

    assert (led.state, led.exit_code) == (State.RESTARTING, -9)
    assert gone.state is State.CANCELLED


def test_an_island_that_does_not_go_is_ended(stage: LaunchStage) -> None:
    """SIGTERM asks, and after the grace SIGKILL does not."""
    deaf = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{STAY}"
    launcher = stage.open_launcher()
    handle = launcher.launch(stage.order(deaf, num_islands=1), keep=NOTHING)
    stage.until_said(handle, 0, "here")
    launcher.cancel(handle, grace_s=0.3)
    (report,) = stage.until(handle, are_over)

    assert (report.state, report.exit_code) == (State.CANCELLED, -9)


def test_what_an_island_started_ends_with_it(stage: LaunchStage) -> None:
    """A process that its island left behind does not speak for it any more."""
    leaves = (
        "import subprocess, sys\n"
        "print('child', subprocess.Popen(['sleep', '600']).pid, flush=True)\n"
    )
    handle = stage.open_launcher().launch(
        stage.order(leaves, num_islands=1), keep=NOTHING
    )
    stage.until(handle, are_over)
    (said,) = (each for each in stage.until_said(handle, 0, "child") if "child" in each)
    until_s = time.monotonic() + stage.wait_s
    while _is_alive(int(said.split()[1])):
        assert time.monotonic() < until_s, "it lives on"
        time.sleep(0.05)


def test_a_function_is_a_command(stage: LaunchStage, tmp_path: Path) -> None:
    """`module:function` is called with its arguments, and returns the exit code."""
    (tmp_path / "mine.py").write_text("def main(a, b):\n    print(a + b)\n    return 4")
    order = _order(("mine:main", "x", "y"), directory=str(tmp_path))
    launcher = stage.open_launcher()
    handle = launcher.launch(order, keep=NOTHING)
    (report,) = stage.until(handle, are_over)

    assert launcher.logs(handle, 0) == ["xy"]
    assert (report.state, report.exit_code) == (State.FAILED, 4)


@pytest.mark.torch
@pytest.mark.timeout(300)
def test_several_processes_are_one_island(stage: LaunchStage, tmp_path: Path) -> None:
    """One torchrun starts the ranks, one name; SIGTERM reaches each once."""
    (tmp_path / "rank.py").write_text(
        "import os, signal, sys, time\n"
        "heard = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: heard.append(1))\n"
        "print('rank', os.environ['RANK'], os.environ['ATOLL_ISLAND'], flush=True)\n"
        "while not heard: time.sleep(0.05)\n"
        "time.sleep(0.5)\n"
        "print('heard', len(heard), flush=True)\n"
    )
    order = _order(("rank.py",), directory=str(tmp_path), processes=2)
    launcher = stage.open_launcher()
    handle = launcher.launch(order, keep=NOTHING)
    for rank in (0, 1):
        stage.until_said(handle, 0, f"rank {rank} a-0")
    launcher.cancel(handle, grace_s=60.0)
    (report,) = stage.until(handle, are_over)

    assert report.state is State.CANCELLED
    assert launcher.logs(handle, 0).count("heard 1") == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"command": ("nowhere.py",)}, "no script 'nowhere.py' in "),
        ({"command": ("no-such-program-x",)}, "'no-such-program-x' cannot be run"),
        ({"command": ("./no-such",)}, "'./no-such' cannot be run"),
        ({"image": "torch"}, "image='torch' has no meaning"),
        ({"requirements": ("torch",)}, "requirements="),
        ({"secrets": {"A": "engine:a"}}, "this machine keeps none"),
        ({"resources": Resources(time_limit_s=5.0)}, "time_limit_s=5"),
        ({"resources": Resources(cpus=1e6)}, "cpus=1e.06 is more than"),
        ({"resources": Resources(memory_bytes=2**60)}, "and this machine has"),
        ({"resources": Resources(accelerators=999)}, "this machine shows"),
    ],
)
def test_what_this_machine_cannot_is_refused(
    given: dict[str, Any], message: str, stage: LaunchStage, tmp_path: Path
) -> None:
    """Before anything is started, by a plan as by a launch."""
    order = _order(**{"command": (sys.executable,), "directory": str(tmp_path)} | given)
    launcher = stage.open_launcher()
    with pytest.raises(UsageError, match=message):
        launcher.plan(order)
    with pytest.raises(UsageError, match=message):
        launcher.launch(order, keep=NOTHING)

    assert not (tmp_path / "local").exists()


def test_an_unknown_option_is_refused() -> None:
    """The engine names the nearest of its own."""
    with pytest.raises(UsageError, match=r"no option 'dir'. .*'directory'"):
        open_launcher("local", {"dir": "/tmp"})


def test_a_damaged_state_is_told(stage: LaunchStage, tmp_path: Path) -> None:
    """What a file does not say is not made up."""
    launcher: Launcher = stage.open_launcher()
    order = _order((sys.executable, "-c", ""))
    handle = launcher.launch(order, keep=NOTHING)
    stage.until(handle, are_over)
    (tmp_path / "local" / order.id / "state.json").write_bytes(b'[{"index": 0}]')
    with pytest.raises(CorruptError, match="the state of the islands is unknown"):
        launcher.poll(handle)


def test_devices_are_shared_out() -> None:
    """Every island has its own, and the same ones in every life."""
    order = _order(("a",), num_islands=2, resources=Resources(accelerators=2))
    more = _order(("a",), num_islands=1, first=1)
    visible = ["4", "5", "6", "7"]

    assert device_shares(order, visible) == {
        0: {"CUDA_VISIBLE_DEVICES": "4,5"},
        1: {"CUDA_VISIBLE_DEVICES": "6,7"},
    }
    assert device_shares(more, visible) == {1: {"CUDA_VISIBLE_DEVICES": "6,7"}}
    assert device_shares(more, ["0"]) == {1: {}}


def test_devices_are_those_that_can_be_seen(tmp_path: Path) -> None:
    """The variable says which; without it, what the machine has."""
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl"):
        (tmp_path / name).touch()

    assert visible_devices({"CUDA_VISIBLE_DEVICES": "3, GPU-a"}) == ["3", "GPU-a"]
    assert visible_devices({"CUDA_VISIBLE_DEVICES": ""}) == []
    assert visible_devices({}, dev=tmp_path) == ["0", "2", "10"]


def test_cores_are_shared_out() -> None:
    """Nobody is given more threads than its share, unless somebody has said so."""
    order = _order(("a",), num_islands=1, resources=Resources(cpus=6.0), processes=1)

    assert thread_limits(order, {}) == {"OMP_NUM_THREADS": "6"}
    assert thread_limits(order, {"OMP_NUM_THREADS": "2"}) == {}


def _order(
    command: tuple[str, ...], *, num_islands: int = 1, first: int = 0, **more: Any
) -> LaunchOrder:
    more = {"restarts": Restarts(max_restarts=0)} | more
    spec = IslandSpec(command=command, run="/runs/a", name="a", **more)
    return LaunchOrder(id="a-1", spec=spec, num_islands=num_islands, first=first)


def _parent(process: int) -> int:
    said = Path(f"/proc/{process}/stat").read_text()
    return int(said.rpartition(")")[2].split()[1])


def _is_alive(process: int) -> bool:
    try:
        said = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return said.rpartition(")")[2].split()[0] != "Z"
