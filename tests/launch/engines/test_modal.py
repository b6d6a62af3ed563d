"""Islands as sandboxes of Modal: every call bound to the signature of the real SDK."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from grpclib.exceptions import StreamTerminatedError
from modal import Image
from modal import exception as faults

from atoll.errors import Refused, Unreachable, UsageError
from atoll.launch.base import Handle, LaunchOrder, State
from atoll.launch.engines.modal import modal_image
from atoll.launch.registry import open_launcher
from atoll.launch.spec import IslandSpec, Resources
from atoll.security import Secret
from atoll.testing import LAUNCHER_CLAIMS, LaunchStage
from atoll.testing.launcher_contract import (
    HEAR,
    HIDDEN,
    STAY,
    TELL,
    are_over,
)
from tests.launch.modal_cloud import Cloud
from tests.launch.planned import SECRETS, both

NOTHING: Callable[[Handle], None] = lambda handle: None  # noqa: E731


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    cloud = Cloud(tmp_path / "cloud")
    cloud.stand_in(monkeypatch)
    yield cloud
    for each in cloud.sandboxes.values():
        each.container.kill()


@pytest.fixture
def stage(cloud: Cloud, tmp_path: Path) -> LaunchStage:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return LaunchStage(
        open_launcher=lambda: open_launcher("modal"),
        scratch=scratch,
        spec={"image": "reef/atoll:1"},
        forgotten=lambda handle: replace(
            handle,
            id="claim-unknown",
            reference={"app": "atoll", "sandboxes": {"0": "sb-unknown"}},
        ),
        counts_lives=False,
    )


@pytest.mark.parametrize("claim", LAUNCHER_CLAIMS, ids=lambda claim: claim.__name__)
def test_it_is_a_launcher(
    claim: Callable[[LaunchStage], None], stage: LaunchStage
) -> None:
    """Sandboxes keep the contract."""
    claim(stage)


def test_modal_is_told_what_was_asked_for(stage: LaunchStage, cloud: Cloud) -> None:
    """Hardware in its own words, a name, tags, and a secret that it keeps."""
    cloud.kept["reef"] = {"HIDDEN": HIDDEN}
    order = stage.order(
        HEAR,
        num_islands=1,
        environment={"A": "b"},
        secrets={"HIDDEN": "engine:reef", "OTHER": "env:OTHER"},
        values={"OTHER": Secret("hush-other")},
        resources=Resources(
            cpus=4.0,
            memory_bytes=2**30 + 1,
            accelerators=2,
            accelerator="a100",
            time_limit_s=7200.0,
        ),
    )
    launcher = open_launcher("modal", {"app": "reef", "region": "eu"})
    plan = launcher.plan(order)
    handle = launcher.launch(order, keep=NOTHING)
    stage.until(handle, are_over)
    (sandbox,) = cloud.sandboxes.values()
    said = sandbox.said

    assert (said["gpu"], said["cpu"], said["memory"]) == ("a100:2", 4.0, 1025)
    assert (said["timeout"], said["app"], said["region"]) == (7200, "reef", "eu")
    assert said["tags"] == {"atoll-launch": order.id, "atoll-index": "0"}
    assert said["secrets"] == [{"OTHER": "hush-other"}, {"HIDDEN": HIDDEN}]
    assert plan.data[0]["secrets"] == {"given": ["OTHER"], "kept": {"reef": ["HIDDEN"]}}
    assert f"heard {len(HIDDEN)} {HIDDEN[::-1]}" in launcher.logs(handle, 0)
    assert "hush" not in json.dumps([said["args"], said["env"], said["tags"]])


def test_a_plan_is_what_is_submitted(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modal hears what was printed, with objects where the plan has names."""
    each = both("modal", tmp_path, monkeypatch, image="reef/atoll:1")
    heard = [dict(it.said) for it in cloud.sandboxes.values()]
    for said in heard:
        assert isinstance(said.pop("image"), Image)
        (given,) = said.pop("secrets")
        assert sorted(given) == sorted(SECRETS)

    for call in each.plan.data:
        assert call.pop("image") == {"registry": "reef/atoll:1"}
        assert call.pop("secrets") == {"given": sorted(SECRETS), "kept": {}}
    assert each.as_planned(heard) == each.plan.data


def test_a_sandbox_has_a_day_unless_it_is_told_otherwise() -> None:
    """Modal's 300 s would end a training early."""
    assert _plan()[0]["timeout"] == 24 * 3600


def test_requirements_become_an_image() -> None:
    """Modal builds it, by its own methods."""
    said = _plan(image=None, requirements=("atoll", "torch>=2"))[0]["image"]

    assert said == {"python": "3.12", "pip": ["atoll", "torch>=2"]}
    assert "Image" in type(modal_image(said)).__name__


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"image": None}, "nothing to run an island in. Give --image"),
        ({"resources": Resources(time_limit_s=90000.0)}, "time_limit_s=90000 is more"),
        ({"resources": Resources(accelerators=1)}, "accelerators=1 of which kind"),
        ({"secrets": {"A": "engine:reef/B"}}, "Give B=engine:reef"),
    ],
)
def test_what_a_sandbox_cannot_is_refused(given: dict[str, Any], message: str) -> None:
    """By name, and before Modal is asked."""
    with pytest.raises(UsageError, match=message):
        _plan(**given)


def test_nobody_logged_in_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is launched, and with what to do."""
    for name in ("MODAL_TOKEN_ID", "MODAL_OAUTH_REFRESH_TOKEN"):
        monkeypatch.setenv(name, "")  # it is heard before a file of the user's
    with pytest.raises(UsageError, match=r"No user is logged in at Modal. Run `modal"):
        open_launcher("modal").launch(_order(), keep=NOTHING)

    assert len(_plan()) == 1


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (faults.AuthError("who are you"), Refused),
        (faults.InvalidError("no GPU of that kind"), UsageError),
        (faults.ResourceExhaustedError("too many"), UsageError),
        (faults.ImageBuildError("no such package", "im-1"), UsageError),
        (faults.VersionError("a newer client is wanted"), UsageError),
        (faults.ConnectionError("nobody is there"), Unreachable),
        (StreamTerminatedError("the line broke"), Unreachable),
        (OSError("no such host"), Unreachable),
    ],
)
def test_faults_of_modal_are_ours(
    fault: Exception, kind: type[Exception], cloud: Cloud, stage: LaunchStage
) -> None:
    """Who may not, what is not to be had, and when asking again may help."""
    cloud.fault = fault
    with pytest.raises(kind, match=f"start claim-.*-0: .*{fault}"):
        stage.open_launcher().launch(stage.order(TELL), keep=NOTHING)


def test_a_missing_secret_is_told(stage: LaunchStage, cloud: Cloud) -> None:
    """What Modal does not keep starts nothing."""
    order = stage.order(TELL, secrets={"A": "engine:none"})
    with pytest.raises(UsageError, match="Secret none has no"):
        stage.open_launcher().launch(order, keep=NOTHING)

    assert cloud.sandboxes == {}


def test_a_sandbox_that_modal_lost_is_lost_alone(
    stage: LaunchStage, cloud: Cloud
) -> None:
    """The other islands of its launch are still known."""
    launcher = stage.open_launcher()
    handle = launcher.launch(stage.order(TELL), keep=NOTHING)
    stage.until(handle, are_over)
    del cloud.sandboxes[handle.reference["sandboxes"]["1"]]

    states = [each.state for each in launcher.poll(handle)]
    assert states == [State.FINISHED, State.LOST]


def test_a_sandbox_that_was_killed_has_failed(stage: LaunchStage, cloud: Cloud) -> None:
    """Its code is that of one that was cancelled, and it was not: 137 is SIGKILL."""
    launcher = stage.open_launcher()
    handle = launcher.launch(stage.order(STAY), keep=NOTHING)
    stage.until_said(handle, 0, "here")
    killed, ended = cloud.sandboxes.values()
    killed.container.kill()
    ended.terminate()  # by somebody who is not Atoll
    reports = stage.until(handle, are_over)

    assert [each.state for each in reports] == [State.FAILED] * 2
    assert [each.exit_code for each in reports] == [137, 137]
    assert reports[0].reason == "it was killed (exit code 137), as without memory"
    assert reports[1].reason == "Modal ended it, without a request of `atoll cancel`"


@pytest.mark.parametrize(
    ("code", "state", "why"),
    [
        (124, State.FAILED, "exit code 124"),
        (143, State.CANCELLED, "it received SIGTERM, as before its time limit"),
    ],
)
def test_a_code_is_not_taken_for_what_modal_did(
    code: int, state: State, why: str, stage: LaunchStage, cloud: Cloud
) -> None:
    """124 is what Modal's SDK says when time is over, and what `timeout` ends with."""
    launcher = stage.open_launcher()
    handle = launcher.launch(stage.order(TELL, num_islands=1), keep=NOTHING)
    stage.until(handle, are_over)
    (sandbox,) = cloud.sandboxes.values()
    sandbox.ended_with = code
    (report,) = launcher.poll(handle)

    assert (report.state, report.exit_code, report.reason) == (state, code, why)


def test_a_sandbox_whose_time_is_over_is_told(stage: LaunchStage, cloud: Cloud) -> None:
    """It has failed: nobody has ended it."""
    launcher = stage.open_launcher()
    handle = launcher.launch(stage.order(STAY, num_islands=1), keep=NOTHING)
    stage.until_said(handle, 0, "here")
    (sandbox,) = cloud.sandboxes.values()
    sandbox.time_out()
    (report,) = stage.until(handle, are_over)

    assert (report.state, report.reason) == (State.FAILED, "its time limit was over")


def test_a_cancel_is_written_on_its_sandbox(stage: LaunchStage, cloud: Cloud) -> None:
    """So another terminal knows it too; what the sandbox is found by stays there."""
    launcher = stage.open_launcher()
    handle = launcher.launch(stage.order(STAY), keep=NOTHING)
    stage.until_said(handle, 0, "here")
    launcher.cancel(handle, indexes=[0])
    cancelled, other = cloud.sandboxes.values()

    assert launcher.poll(handle)[0].state is State.CANCELLED
    assert cancelled.tags == {**other.tags, "atoll-index": "0", "atoll-cancelled": "1"}


def test_half_a_line_is_not_told_while_it_may_go_on(
    stage: LaunchStage, cloud: Cloud
) -> None:
    """Whoever follows a log counts lines, and would never see the other half."""
    launcher = stage.open_launcher()
    handle = launcher.launch(stage.order(STAY, num_islands=1), keep=NOTHING)
    stage.until_said(handle, 0, "here")
    (sandbox,) = cloud.sandboxes.values()
    sandbox.has_half_a_line = True

    assert launcher.logs(handle, 0) == []
    launcher.cancel(handle)
    assert launcher.logs(handle, 0) == ["he"]


def test_a_log_is_read_long_after_its_launch(stage: LaunchStage, cloud: Cloud) -> None:
    """Modal looks through 35 days at most, and a sandbox has lived in the first."""
    launcher = stage.open_launcher()
    handle = launcher.launch(stage.order(TELL, num_islands=1), keep=NOTHING)
    stage.until(handle, are_over)
    before = replace(handle, begun_at_s=handle.begun_at_s - 40 * 24 * 3600.0)

    assert "ISLAND claim-0" in launcher.logs(before, 0)


def _plan(**given: Any) -> Any:
    return open_launcher("modal").plan(_order(**given)).data


def _order(**given: Any) -> LaunchOrder:
    fields: dict[str, Any] = {"image": "reef/atoll:1"} | given
    spec = IslandSpec(command=("train.py",), run="s3://reef/a", name="a", **fields)
    return LaunchOrder(id="a-1", spec=spec, num_islands=1)
