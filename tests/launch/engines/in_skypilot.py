"""Islands as managed jobs of SkyPilot, in an interpreter that has SkyPilot.

`test_skypilot.py` runs this file there; no other interpreter of ours can.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sky
import yaml
from sky import exceptions as faults

from atoll.errors import Refused, Unreachable, UsageError
from atoll.launch.base import Handle, LaunchOrder, State
from atoll.launch.engines.skypilot import STATES
from atoll.launch.registry import open_launcher
from atoll.launch.spec import IslandSpec, Resources
from atoll.security import Secret
from atoll.testing import LAUNCHER_CLAIMS, LaunchStage
from atoll.testing.launcher_contract import STAY, TELL, are_over
from tests.launch.planned import SECRETS, both
from tests.launch.skypilot_cloud import Cloud

NOTHING: Callable[[Handle], None] = lambda handle: None  # noqa: E731


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    cloud = Cloud(tmp_path / "cloud")
    cloud.stand_in(monkeypatch)
    yield cloud
    for each in cloud.jobs:
        each.container.kill()


@pytest.fixture
def stage(cloud: Cloud, tmp_path: Path) -> LaunchStage:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return LaunchStage(
        open_launcher=lambda: open_launcher("skypilot"),
        scratch=scratch,
        spec={"image": "reef/atoll:1"},
        counts_lives=False,
    )


@pytest.mark.parametrize("claim", LAUNCHER_CLAIMS, ids=lambda claim: claim.__name__)
def test_it_is_a_launcher(
    claim: Callable[[LaunchStage], None], stage: LaunchStage
) -> None:
    """Managed jobs keep the contract."""
    claim(stage)


def test_skypilot_parses_a_plan_as_it_was_meant() -> None:
    """Hardware, image, variables and recovery, by SkyPilot's own words."""
    plan = _plan(
        {"infra": "aws/us-east-1", "use_spot": "true"},
        environment={"A": "b"},
        secrets={"TOKEN": "engine:TOKEN", "HIDDEN": "env:HIDDEN"},
        resources=Resources(
            cpus=4.0, memory_bytes=2**30 + 1, accelerators=2, accelerator="A100"
        ),
    )
    (written,) = yaml.safe_load_all(plan.text)
    task = _parsed(written, secrets_overrides=[("HIDDEN", "hush")])
    (resources,) = task.resources

    assert written == plan.data[0]
    assert (task.name, task.envs) == ("a-1-0", {"A": "b"})
    assert (resources.cpus, resources.memory) == ("4+", "1.01+")
    assert resources.accelerators == {"A100": 2}
    assert (str(resources.cloud), resources.region) == ("AWS", "us-east-1")
    assert resources.use_spot
    assert resources.extract_docker_image() == "reef/atoll:1"
    assert resources.job_recovery["max_restarts_on_errors"] == 0
    assert resources.job_recovery["recover_on_exit_codes"] == [143]
    assert task.secrets["HIDDEN"].get_secret_value() == "hush"
    assert [each.name for each in task.managed_secret_refs] == ["TOKEN"]


def test_a_plan_is_what_is_submitted(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SkyPilot hears the tasks that were printed, with a value where null was."""
    each = both("skypilot", tmp_path, monkeypatch, image="reef/atoll:1")
    bodies = [list(yaml.safe_load_all(body.task))[-1] for body in cloud.bodies]
    for written, heard in zip(each.plan.data, each.as_planned(bodies), strict=True):
        given, asked = written.pop("secrets"), written.pop("resources")
        took = heard["resources"]

        assert given == dict.fromkeys(sorted(SECRETS))
        assert sorted(heard["secrets"]) == sorted(SECRETS)
        assert written == {key: heard[key] for key in written}
        assert list(took["image_id"].values()) == [asked["image_id"]]
        assert asked["job_recovery"].items() <= took["job_recovery"].items()


def test_requirements_are_installed_first() -> None:
    """By what SkyPilot runs once on a new machine."""
    wanted = ("atoll", "torch>=2")
    (written,) = _plan(image=None, requirements=wanted).data
    task = _parsed(written)

    assert task.setup == "python -m pip install --quiet atoll 'torch>=2'"


def test_skypilot_refuses_what_it_does_not_know() -> None:
    """So that a plan that it parses says something."""
    (written,) = _plan().data
    with pytest.raises(ValueError, match="did you mean 'run'"):
        _parsed({**written, "runs": "a"})


def test_a_secret_is_in_secrets_alone(stage: LaunchStage, cloud: Cloud) -> None:
    """What goes to SkyPilot's server has its value in no variable and no command."""
    values = {"HIDDEN": Secret("hush-1")}
    order = stage.order(TELL, secrets={"HIDDEN": "env:HIDDEN"}, values=values)
    handle = stage.open_launcher().launch(order, keep=NOTHING)
    stage.until(handle, are_over)
    for body in cloud.bodies:
        sent = list(yaml.safe_load_all(body.task))[-1]

        assert sent.pop("secrets") == {"HIDDEN": "hush-1"}
        assert "hush" not in repr(sent)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"image": None}, "nothing to run an island in. Give --image"),
        ({"resources": Resources(time_limit_s=9.0)}, "time_limit_s=9 is given"),
        ({"resources": Resources(accelerators=1)}, "accelerators=1 of which kind"),
        ({"secrets": {"A": "engine:B"}}, "Give A=engine:A"),
    ],
)
def test_what_a_managed_job_cannot_is_refused(
    given: dict[str, Any], message: str
) -> None:
    """By name, and before SkyPilot is asked."""
    with pytest.raises(UsageError, match=message):
        _plan(**given)


def test_every_status_of_skypilot_is_a_state() -> None:
    """Those of the SDK that is here, no fewer and no more, and they end alike."""
    known = {each.value: each.is_terminal() for each in sky.ManagedJobStatus}

    assert {name: state.is_over for name, state in STATES.items()} == known


@pytest.mark.parametrize(
    ("says", "state", "why"),
    [
        ({"status": "STARTING"}, State.PENDING, ""),
        ({"status": "RECOVERING"}, State.RESTARTING, "RECOVERING"),
        (
            {"status": "FAILED_NO_RESOURCE", "failure_reason": "no A100"},
            State.FAILED,
            "FAILED_NO_RESOURCE: no A100",
        ),
    ],
)
def test_what_skypilot_says_is_told(
    says: dict[str, Any], state: State, why: str, stage: LaunchStage, cloud: Cloud
) -> None:
    """With how often a machine was replaced, and where the island is."""
    launcher = stage.open_launcher()
    handle = launcher.launch(stage.order(TELL, num_islands=1), keep=NOTHING)
    cloud.jobs[0].says = {**says, "recovery_count": 2, "infra": "AWS (us-east-1)"}
    (report,) = launcher.poll(handle)

    assert (report.state, report.reason) == (state, why)
    assert (report.restarts, report.host) == (2, "AWS (us-east-1)")


def test_an_unknown_status_is_named(stage: LaunchStage, cloud: Cloud) -> None:
    """A word that a newer server says is no state that we guess."""
    launcher = stage.open_launcher()
    handle = launcher.launch(stage.order(TELL, num_islands=1), keep=NOTHING)
    cloud.jobs[0].says = {"status": "WARPED"}
    with pytest.raises(UsageError, match="'WARPED'"):
        launcher.poll(handle)


def test_a_job_that_skypilot_lost_is_lost_alone(
    stage: LaunchStage, cloud: Cloud
) -> None:
    """The other islands of its launch are still known."""
    launcher = stage.open_launcher()
    handle = launcher.launch(stage.order(TELL), keep=NOTHING)
    stage.until(handle, are_over)
    del cloud.jobs[1]

    states = [each.state for each in launcher.poll(handle)]
    assert states == [State.FINISHED, State.LOST]


def test_a_cancel_gives_its_grace(stage: LaunchStage, cloud: Cloud) -> None:
    """In whole seconds, and to those that are not over."""
    launcher = stage.open_launcher()
    handle = launcher.launch(stage.order(STAY, num_islands=1), keep=NOTHING)
    stage.until_said(handle, 0, "here")
    launcher.cancel(handle, grace_s=7.5)
    stage.until(handle, are_over)
    launcher.cancel(handle)

    (body,) = cloud.bodies[1:]
    assert (body.graceful, body.graceful_timeout) == (True, 8)


@pytest.mark.parametrize("is_answered", [False, True], ids=["asked", "answered"])
def test_a_launch_that_is_interrupted_leaves_nothing(
    is_answered: bool, stage: LaunchStage, cloud: Cloud
) -> None:
    """A request goes on when nobody waits: what was kept withdraws it, or its job."""
    launcher, order, kept = stage.open_launcher(), stage.order(STAY), list[Handle]()
    cloud.interrupts = f"{order.id}-1"
    with pytest.raises(KeyboardInterrupt):
        launcher.launch(order, keep=kept.append)
    if is_answered:
        cloud.go_on()
    cloud.interrupts = None
    launcher.cancel(Handle.from_json(kept[-1].to_json()), grace_s=1.0)
    cloud.go_on()
    reports = stage.until(kept[-1], are_over)

    last = State.CANCELLED if is_answered else State.LOST
    assert [each.state for each in reports] == [State.CANCELLED, last]
    assert len(cloud.jobs) == (2 if is_answered else 1)


def test_half_a_line_is_not_told_while_it_may_go_on(
    stage: LaunchStage, cloud: Cloud
) -> None:
    """Whoever follows a log counts lines, and would never see the other half."""
    launcher = stage.open_launcher()
    handle = launcher.launch(stage.order(STAY, num_islands=1), keep=NOTHING)
    stage.until_said(handle, 0, "here")
    cloud.jobs[0].has_half_a_line = True

    assert launcher.logs(handle, 0) == []
    launcher.cancel(handle, grace_s=1.0)
    stage.until(handle, are_over)
    assert launcher.logs(handle, 0) == ["he"]


def test_a_launch_that_was_answered_has_nothing_to_withdraw(
    stage: LaunchStage, cloud: Cloud
) -> None:
    """Its handle names no request: SkyPilot forgets them, and the queue has it all."""
    handle = stage.open_launcher().launch(stage.order(TELL), keep=NOTHING)
    stage.until(handle, are_over)

    assert handle.reference == {}


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (faults.PermissionDeniedError("who are you"), Refused),
        (faults.ResourcesUnavailableError("no such machine"), UsageError),
        (ValueError("no such thing"), UsageError),
        (faults.ApiServerConnectionError("http://127.0.0.1:9"), Unreachable),
        (RuntimeError("ssh failed"), Unreachable),
    ],
)
def test_faults_of_skypilot_are_ours(
    fault: Exception, kind: type[Exception], cloud: Cloud, stage: LaunchStage
) -> None:
    """Who may not, what is not to be had, and when asking again may help."""
    cloud.fault = fault
    with pytest.raises(kind, match=r"start claim-.*-0: "):
        stage.open_launcher().launch(stage.order(TELL), keep=NOTHING)


def _parsed(written: Any, **given: Any) -> Any:
    return sky.Task.from_yaml_config(copy.deepcopy(written), **given)


def _plan(options: dict[str, str] | None = None, **given: Any) -> Any:
    fields: dict[str, Any] = {"image": "reef/atoll:1"} | given
    spec = IslandSpec(command=("train.py",), run="s3://reef/a", name="a", **fields)
    order = LaunchOrder(id="a-1", spec=spec, num_islands=1)
    return open_launcher("skypilot", options).plan(order)
