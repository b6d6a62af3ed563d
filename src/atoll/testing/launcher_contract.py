"""Contract of every `Launcher`, as claims that any engine's tests can run.

A claim takes a `LaunchStage`. Run each one separately:

    @pytest.mark.parametrize("claim", LAUNCHER_CLAIMS, ids=lambda claim: claim.__name__)
    def test_it_is_a_launcher(claim, stage):
        claim(stage)

`PLAN_CLAIMS` are those that start no island.
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
"""The value of a secret, which only the environment of an island may contain."""

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
    """An engine, and the values that its islands need to run there."""

    open_launcher: Callable[[], Launcher]
    """Returns a new launcher each time, as in another process."""

    scratch: Path
    """A directory that all incarnations of an island can read and write."""

    run: str = "http://127.0.0.1:9"
    """The run URI of the islands, which is never contacted."""

    spec: Mapping[str, Any] = field(default_factory=dict)
    """More fields of every `IslandSpec`: an image, a directory."""

    forgotten: Callable[[Handle], Handle] = lambda handle: replace(
        handle, id="claim-unknown"
    )
    """Return a handle of a launch that the engine does not know: another id, and
    another reference if the engine has one."""

    counts_lives: bool = True
    """Whether the engine reports the number of restarts of an island."""

    wait_s: float = 100.0
    """Timeout of `until` and `until_said`."""

    def order(
        self, code: str, *arguments: str, num_islands: int = 2, **spec_fields: Any
    ) -> LaunchOrder:
        """Return an order of islands that run `code` in Python."""
        values = spec_fields.pop("values", {})
        fields = {"restarts": Restarts(max_restarts=0), **self.spec, **spec_fields}
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
        """Return the reports of islands once `is_so` is true of them."""
        launcher = launcher or self.open_launcher()
        end_s = time.monotonic() + self.wait_s
        while not is_so(reports := launcher.poll(handle)):
            assert time.monotonic() < end_s, f"timeout: {reports}"
            time.sleep(LOOK_S)
        return reports

    def until_said(self, handle: Handle, index: int, text: str) -> list[str]:
        """Return the log lines of an island once they contain `text`."""
        launcher = self.open_launcher()
        end_s = time.monotonic() + self.wait_s
        while text not in "\n".join(lines := launcher.logs(handle, index)):
            assert time.monotonic() < end_s, f"{text!r} is not in the log: {lines}"
            time.sleep(LOOK_S)
        return lines


Claim = Callable[[LaunchStage], None]


def are(*states: State) -> Callable[[Sequence[Report]], bool]:
    """Return a predicate: every island is in one of these states."""
    return lambda reports: all(report.state in states for report in reports)


def are_over(reports: Sequence[Report]) -> bool:
    """Return whether every island has ended."""
    return all(report.state.is_over for report in reports)


def a_plan_is_data(stage: LaunchStage) -> None:
    """It is valid JSON, contains the run, and is equal for equal orders."""
    order = stage.order(TELL)
    plan, again = (stage.open_launcher().plan(order) for _ in range(2))

    assert json.dumps(plan.data) == json.dumps(again.data)
    assert plan.text == again.text
    assert stage.run in plan.text


def a_plan_shows_no_secret(stage: LaunchStage) -> None:
    """A plan does not contain the value of a secret."""
    order = stage.order(
        TELL, secrets={"HIDDEN": "env:HIDDEN"}, values={"HIDDEN": Secret(HIDDEN)}
    )
    plan = stage.open_launcher().plan(order)

    assert HIDDEN not in plan.text + json.dumps(plan.data)


def islands_run_under_their_names(stage: LaunchStage) -> None:
    """Each gets its run, its name and its index, and finishes with its command."""
    handle = _launch(stage.order(TELL), stage.open_launcher())
    reports = stage.until(handle, are_over)

    assert [report.state for report in reports] == [State.FINISHED] * 2
    assert [(report.index, report.name) for report in reports] == [
        (0, "claim-0"),
        (1, "claim-1"),
    ]
    for index in handle.indexes:
        lines = stage.until_said(handle, index, f"ISLAND_INDEX {index}")
        assert f"RUN {stage.run}" in lines
        assert f"ISLAND claim-{index}" in lines


def indexes_begin_where_they_are_told(stage: LaunchStage) -> None:
    """Islands that are added to a launch continue its numbers."""
    order = stage.order(TELL, num_islands=1)
    later = LaunchOrder(id=order.id, spec=order.spec, num_islands=1, first=4)
    handle = _launch(later, stage.open_launcher())
    (report,) = stage.until(handle, are_over)

    assert (report.index, report.name) == (4, "claim-4")
    assert report.state is State.FINISHED
    assert "ISLAND claim-4" in stage.until_said(handle, 4, "ISLAND_INDEX 4")


def a_failure_is_told_with_its_last_words(stage: LaunchStage) -> None:
    """The log and the exit code of an island are available after its failure."""
    handle = _launch(stage.order(FAIL, num_islands=1), stage.open_launcher())
    (report,) = stage.until(handle, are_over)

    assert report.state is State.FAILED
    assert report.exit_code in (3, None)
    assert "before the end" in stage.until_said(handle, 0, "before the end")


def a_failed_island_is_started_again(stage: LaunchStage) -> None:
    """It restarts under its name, and all its output is in one log."""
    spec_fields = {"restarts": Restarts(max_restarts=3, first_pause_s=0.1)}
    order = stage.order(ONCE, str(stage.scratch), num_islands=1, **spec_fields)
    handle = _launch(order, stage.open_launcher())
    (report,) = stage.until(handle, are_over)

    assert report.state is State.FINISHED
    assert report.restarts == (1 if stage.counts_lives else 0)
    assert "again" in stage.until_said(handle, 0, "again")


def a_cancelled_launch_is_over(stage: LaunchStage) -> None:
    """None of its islands runs, and cancelling it again changes nothing."""
    launcher = stage.open_launcher()
    handle = _launch(stage.order(STAY), launcher)
    stage.until_said(handle, 0, "here")
    launcher.cancel(handle, grace_s=5.0)
    reports = stage.until(handle, are_over)
    launcher.cancel(handle, grace_s=5.0)

    assert {report.state for report in reports} == {State.CANCELLED}
    assert {report.state for report in launcher.poll(handle)} == {State.CANCELLED}


def one_island_is_cancelled(stage: LaunchStage) -> None:
    """The others continue; an engine without this raises `UsageError`."""
    launcher = stage.open_launcher()
    handle = _launch(stage.order(STAY), launcher)
    try:
        stage.until_said(handle, 1, "here")
        if not launcher.traits.can_cancel_some:
            with raises(UsageError):
                launcher.cancel(handle, indexes=[0])
            return
        launcher.cancel(handle, indexes=[0], grace_s=5.0)
        reports = stage.until(handle, lambda all_: all_[0].state.is_over)

        assert [report.state for report in reports] == [State.CANCELLED, State.RUNNING]
    finally:
        launcher.cancel(handle, grace_s=1.0)
        stage.until(handle, are_over)


def a_handle_finds_its_launch_again(stage: LaunchStage) -> None:
    """A handle's JSON suffices for another process, and contains no secret."""
    order = stage.order(
        HEAR,
        num_islands=1,
        secrets={"HIDDEN": "env:HIDDEN"},
        values={"HIDDEN": Secret(HIDDEN)},
    )
    written = _launch(order, stage.open_launcher()).to_json()
    handle = Handle.from_json(written)
    (report,) = stage.until(handle, are_over)

    assert report.state is State.FINISHED
    assert HIDDEN not in written
    expected = f"heard {len(HIDDEN)} {HIDDEN[::-1]}"
    assert expected in stage.until_said(handle, 0, "heard")


def a_log_goes_on_where_it_was_read(stage: LaunchStage) -> None:
    """`after` skips the lines that were read before."""
    handle = _launch(stage.order(TELL, num_islands=1), stage.open_launcher())
    stage.until(handle, are_over)
    lines = stage.until_said(handle, 0, "ISLAND_INDEX 0")
    launcher = stage.open_launcher()

    assert launcher.logs(handle, 0, after=2) == lines[2:]
    assert launcher.logs(handle, 0, after=len(lines)) == []


def what_was_kept_first_can_be_cancelled(stage: LaunchStage) -> None:
    """The first handle that was kept can cancel a launch that was interrupted."""
    handles: list[Handle] = []
    launcher = stage.open_launcher()
    launcher.launch(stage.order(STAY), keep=handles.append)

    assert handles, "no handle was kept"
    launcher.cancel(handles[0], grace_s=1.0)
    reports = stage.until(handles[-1], are_over)
    assert {report.state for report in reports} <= {State.CANCELLED, State.LOST}


def an_id_is_launched_once(stage: LaunchStage) -> None:
    """A second launch with an id is refused, and the first continues."""
    launcher = stage.open_launcher()
    order = stage.order(STAY, num_islands=1)
    handle = _launch(order, launcher)
    try:
        stage.until_said(handle, 0, "here")
        with raises(UsageError):
            launcher.launch(order, keep=lambda _: None)

        assert launcher.poll(handle)[0].state is State.RUNNING
    finally:
        launcher.cancel(handle, grace_s=1.0)
        stage.until(handle, are_over)


def what_the_engine_forgot_is_lost(stage: LaunchStage) -> None:
    """An island that the engine does not know is LOST, which is no error."""
    launcher = stage.open_launcher()
    handle = _launch(stage.order(TELL), launcher)
    stage.until(handle, are_over)
    absent = stage.forgotten(handle)
    launcher.cancel(absent)

    assert [report.state for report in launcher.poll(absent)] == [State.LOST] * 2
    assert launcher.logs(absent, 0) == []


def _launch(order: LaunchOrder, launcher: Launcher) -> Handle:
    """Launch, and return the handle, which must be the last one that was kept."""
    handles: list[Handle] = []
    handle = launcher.launch(order, keep=handles.append)
    assert handles, "no handle was kept before the launch was submitted"
    assert handles[-1] == handle
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
