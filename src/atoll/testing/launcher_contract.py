"""What every `Launcher` must do, as claims that any engine's tests can run.

A claim takes a `LaunchStage`. Run each by itself:

    @pytest.mark.parametrize("claim", LAUNCHER_CLAIMS, ids=lambda claim: claim.__name__)
    def test_it_is_a_launcher(claim, stage):
        claim(stage)

`PLAN_CLAIMS` are those of them for which nothing has to run.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from atoll.errors import UsageError
from atoll.launch.base import Handle, Launcher, LaunchOrder, Report, State
from atoll.launch.spec import IslandSpec, Restarts
from atoll.security import Secret
from atoll.testing.fixtures import raises

LOOK_S = 0.2
HIDDEN = "hush-4f1c09d2"
"""The value of a secret, which is nowhere but in an island's environment."""

TELL = (
    "import os\n"
    "for name in ('RUN', 'ISLAND', 'ISLAND_INDEX'):\n"
    "    print(name, os.environ['ATOLL_' + name], flush=True)\n"
)
STAY = "import time\nprint('here', flush=True)\ntime.sleep(600)\n"
FAIL = "import sys\nprint('before the end', flush=True)\nsys.exit(3)\n"
HEAR = (
    "import os, sys\n"
    "heard = os.environ.get('HIDDEN', '')\n"
    "print('heard', len(heard), heard[::-1], flush=True)\n"
)
ONCE = (
    "import os, pathlib, sys\n"
    "mark = pathlib.Path(sys.argv[1], os.environ['ATOLL_ISLAND'])\n"
    "was_here = mark.exists()\n"
    "mark.touch()\n"
    "print('again' if was_here else 'first', flush=True)\n"
    "sys.exit(0 if was_here else 1)\n"
)


@dataclass(frozen=True, kw_only=True)
class LaunchStage:
    """An engine, and what its islands are given so that they run there."""

    open_launcher: Callable[[], Launcher]
    """A new one each time, as another process would make it."""

    scratch: Path
    """A directory that islands of several lives see and may write."""

    run: str = "http://127.0.0.1:9"
    """What islands are told; nobody calls there."""

    spec: Mapping[str, Any] = field(default_factory=dict)
    """More fields of every `IslandSpec`: an image, a directory."""

    forgotten: Callable[[Handle], Handle] = lambda handle: replace(
        handle, id="claim-unknown"
    )
    """Return a handle of a launch that the engine knows nothing of: it has another id,
    and whatever else an engine's reference is."""

    counts_lives: bool = True
    """Whether the engine tells how often it has started an island again."""

    wait_s: float = 100.0
    """For whatever is to happen."""

    def order(
        self, code: str, *arguments: str, num_islands: int = 2, **more: Any
    ) -> LaunchOrder:
        """Return an order of islands that run a few lines of Python."""
        values = more.pop("values", {})
        fields = {"restarts": Restarts(max_restarts=0), **self.spec, **more}
        command = ("python", "-c", code, *arguments)
        name = "claim"
        spec = IslandSpec(command=command, run=self.run, name=name, **fields)
        launch = f"claim-{secrets.token_hex(4)}"
        return LaunchOrder(id=launch, spec=spec, num_islands=num_islands, values=values)

    def until(
        self,
        handle: Handle,
        is_so: Callable[[Sequence[Report]], bool],
        launcher: Launcher | None = None,
    ) -> tuple[Report, ...]:
        """Return the reports of islands once they are so."""
        launcher = launcher or self.open_launcher()
        end_s = time.monotonic() + self.wait_s
        while not is_so(reports := launcher.poll(handle)):
            assert time.monotonic() < end_s, f"it never came: {reports}"
            time.sleep(LOOK_S)
        return reports

    def until_said(self, handle: Handle, index: int, text: str) -> list[str]:
        """Return what an island has said once a text is in it."""
        launcher = self.open_launcher()
        end_s = time.monotonic() + self.wait_s
        while text not in "\n".join(said := launcher.logs(handle, index)):
            assert time.monotonic() < end_s, f"{text!r} was never said: {said}"
            time.sleep(LOOK_S)
        return said


Claim = Callable[[LaunchStage], None]


def are(*states: State) -> Callable[[Sequence[Report]], bool]:
    """Return whether every island is in one of these states."""
    return lambda reports: all(each.state in states for each in reports)


def are_over(reports: Sequence[Report]) -> bool:
    """Return whether nothing becomes of any island any more."""
    return all(each.state.is_over for each in reports)


def a_plan_is_data(stage: LaunchStage) -> None:
    """It can be written as JSON, says the run, and two of one order are equal."""
    order = stage.order(TELL)
    plan, again = (stage.open_launcher().plan(order) for _ in range(2))

    assert json.dumps(plan.data) == json.dumps(again.data)
    assert plan.text == again.text
    assert stage.run in plan.text


def a_plan_shows_no_secret(stage: LaunchStage) -> None:
    """Whoever reads a plan learns that there is a secret, and not which."""
    order = stage.order(
        TELL, secrets={"HIDDEN": "env:HIDDEN"}, values={"HIDDEN": Secret(HIDDEN)}
    )
    plan = stage.open_launcher().plan(order)

    assert HIDDEN not in plan.text + json.dumps(plan.data)


def islands_run_under_their_names(stage: LaunchStage) -> None:
    """Each is told its run, its name and its index, and ends as its command did."""
    handle = _kept_by(stage.order(TELL), stage.open_launcher())
    reports = stage.until(handle, are_over)

    assert [each.state for each in reports] == [State.FINISHED] * 2
    assert [(each.index, each.name) for each in reports] == [
        (0, "claim-0"),
        (1, "claim-1"),
    ]
    for index in handle.indexes:
        said = stage.until_said(handle, index, f"ISLAND_INDEX {index}")
        assert f"RUN {stage.run}" in said
        assert f"ISLAND claim-{index}" in said


def indexes_begin_where_they_are_told(stage: LaunchStage) -> None:
    """Islands that are added to a launch go on with its numbers."""
    order = stage.order(TELL, num_islands=1)
    later = LaunchOrder(id=order.id, spec=order.spec, num_islands=1, first=4)
    handle = _kept_by(later, stage.open_launcher())
    (report,) = stage.until(handle, are_over)

    assert (report.index, report.name) == (4, "claim-4")
    assert report.state is State.FINISHED
    assert "ISLAND claim-4" in stage.until_said(handle, 4, "ISLAND_INDEX 4")


def a_failure_is_told_with_its_last_words(stage: LaunchStage) -> None:
    """What an island said is there after it failed, and so is its exit code."""
    handle = _kept_by(stage.order(FAIL, num_islands=1), stage.open_launcher())
    (report,) = stage.until(handle, are_over)

    assert report.state is State.FAILED
    assert report.exit_code in (3, None)
    assert "before the end" in stage.until_said(handle, 0, "before the end")


def a_failed_island_is_started_again(stage: LaunchStage) -> None:
    """It comes back under its name, and its lives are in one log."""
    more = {"restarts": Restarts(max_restarts=3, first_pause_s=0.1)}
    order = stage.order(ONCE, str(stage.scratch), num_islands=1, **more)
    handle = _kept_by(order, stage.open_launcher())
    (report,) = stage.until(handle, are_over)

    assert report.state is State.FINISHED
    assert report.restarts == (1 if stage.counts_lives else 0)
    assert "again" in stage.until_said(handle, 0, "again")


def a_cancelled_launch_is_over(stage: LaunchStage) -> None:
    """Nothing of it runs, and cancelling it again changes nothing."""
    launcher = stage.open_launcher()
    handle = _kept_by(stage.order(STAY), launcher)
    stage.until_said(handle, 0, "here")
    launcher.cancel(handle, grace_s=5.0)
    reports = stage.until(handle, are_over)
    launcher.cancel(handle, grace_s=5.0)

    assert {each.state for each in reports} == {State.CANCELLED}
    assert {each.state for each in launcher.poll(handle)} == {State.CANCELLED}


def one_island_is_cancelled(stage: LaunchStage) -> None:
    """The others go on; an engine that cannot says so."""
    launcher = stage.open_launcher()
    handle = _kept_by(stage.order(STAY), launcher)
    try:
        stage.until_said(handle, 1, "here")
        if not launcher.traits.can_cancel_some:
            with raises(UsageError):
                launcher.cancel(handle, indexes=[0])
            return
        launcher.cancel(handle, indexes=[0], grace_s=5.0)
        reports = stage.until(handle, lambda all_: all_[0].state.is_over)

        assert [each.state for each in reports] == [State.CANCELLED, State.RUNNING]
    finally:
        launcher.cancel(handle, grace_s=1.0)
        stage.until(handle, are_over)


def a_handle_finds_its_launch_again(stage: LaunchStage) -> None:
    """What was written down is enough for another process, and holds no secret."""
    order = stage.order(
        HEAR,
        num_islands=1,
        secrets={"HIDDEN": "env:HIDDEN"},
        values={"HIDDEN": Secret(HIDDEN)},
    )
    written = _kept_by(order, stage.open_launcher()).to_json()
    handle = Handle.from_json(written)
    (report,) = stage.until(handle, are_over)

    assert report.state is State.FINISHED
    assert HIDDEN not in written
    told = f"heard {len(HIDDEN)} {HIDDEN[::-1]}"
    assert told in stage.until_said(handle, 0, "heard")


def a_log_goes_on_where_it_was_read(stage: LaunchStage) -> None:
    """The lines that are known are left out."""
    handle = _kept_by(stage.order(TELL, num_islands=1), stage.open_launcher())
    stage.until(handle, are_over)
    said = stage.until_said(handle, 0, "ISLAND_INDEX 0")
    launcher = stage.open_launcher()

    assert launcher.logs(handle, 0, after=2) == said[2:]
    assert launcher.logs(handle, 0, after=len(said)) == []


def what_was_kept_first_can_be_cancelled(stage: LaunchStage) -> None:
    """Whoever dies in the middle of a launch leaves a handle that ends it."""
    kept: list[Handle] = []
    launcher = stage.open_launcher()
    launcher.launch(stage.order(STAY), keep=kept.append)

    assert kept, "nothing was kept"
    launcher.cancel(kept[0], grace_s=1.0)
    reports = stage.until(kept[-1], are_over)
    assert {each.state for each in reports} <= {State.CANCELLED, State.LOST}


def an_id_is_launched_once(stage: LaunchStage) -> None:
    """A second launch of one id is refused, and the first goes on."""
    launcher = stage.open_launcher()
    order = stage.order(STAY, num_islands=1)
    handle = _kept_by(order, launcher)
    try:
        stage.until_said(handle, 0, "here")
        with raises(UsageError):
            launcher.launch(order, keep=lambda _: None)

        assert launcher.poll(handle)[0].state is State.RUNNING
    finally:
        launcher.cancel(handle, grace_s=1.0)
        stage.until(handle, are_over)


def what_the_engine_forgot_is_lost(stage: LaunchStage) -> None:
    """An island that nobody knows is reported so, and is no error."""
    launcher = stage.open_launcher()
    handle = _kept_by(stage.order(TELL), launcher)
    stage.until(handle, are_over)
    absent = stage.forgotten(handle)
    launcher.cancel(absent)

    assert [each.state for each in launcher.poll(absent)] == [State.LOST] * 2
    assert launcher.logs(absent, 0) == []


def _kept_by(order: LaunchOrder, launcher: Launcher) -> Handle:
    """Launch, and return the handle, which is the last one that was kept."""
    kept: list[Handle] = []
    handle = launcher.launch(order, keep=kept.append)
    assert kept, "nothing was kept before it was submitted"
    assert kept[-1] == handle
    return handle


PLAN_CLAIMS: tuple[Claim, ...] = (a_plan_is_data, a_plan_shows_no_secret)

LAUNCHER_CLAIMS: tuple[Claim, ...] = (
    *PLAN_CLAIMS,
    islands_run_under_their_names,
    indexes_begin_where_they_are_told,
    a_failure_is_told_with_its_last_words,
    a_failed_island_is_started_again,
    a_cancelled_launch_is_over,
    one_island_is_cancelled,
    a_handle_finds_its_launch_again,
    a_log_goes_on_where_it_was_read,
    what_was_kept_first_can_be_cancelled,
    an_id_is_launched_once,
    what_the_engine_forgot_is_lost,
)
