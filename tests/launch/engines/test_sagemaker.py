"""Islands as training jobs of SageMaker: the real boto3, against AWS on loopback."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import Refused, Unreachable, UsageError
from atoll.launch.api import plan_spec
from atoll.launch.base import Handle, Launcher, LaunchOrder, State
from atoll.launch.engines.sagemaker.entrypoint import folded, unfolded
from atoll.launch.registry import open_launcher
from atoll.launch.spec import IslandSpec, Resources
from atoll.security import Secret
from atoll.testing import LAUNCHER_CLAIMS, LaunchStage
from atoll.testing.launcher_contract import HEAR, HIDDEN, TELL, are_over
from tests.launch.aws_cloud import CREDENTIALS, MODEL, Cloud, Fault, faults, served
from tests.launch.planned import SECRETS, both

NOTHING: Callable[[Handle], None] = lambda handle: None  # noqa: E731
USUAL = {
    "role": "arn:aws:iam::000000000000:role/reef",
    "output": "s3://reef/out",
    "endpoint_url": "http://127.0.0.1:1",
}
HANDLE = Handle(
    id="a-1", engine="sagemaker", run="/a", name="a", num_islands=1, reference={}
)
IMAGE = "000000000000.dkr.ecr.eu-reef-1.amazonaws.com/atoll:1"


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    with served(tmp_path / "cloud") as cloud:
        yield cloud


@pytest.fixture
def stage(cloud: Cloud, tmp_path: Path) -> LaunchStage:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return LaunchStage(
        open_launcher=lambda: _launcher(cloud),
        scratch=scratch,
        spec={"image": IMAGE},
        counts_lives=False,
    )


@pytest.mark.parametrize("claim", LAUNCHER_CLAIMS, ids=lambda claim: claim.__name__)
def test_it_is_a_launcher(
    claim: Callable[[LaunchStage], None], stage: LaunchStage
) -> None:
    """Training jobs keep the contract."""
    claim(stage)


def test_a_plan_is_what_aws_takes() -> None:
    """Every field, length and pattern is as the published model has it."""
    more = {"spot": "true", "volume_gb": "80"}
    requests = _plan(more, environment={"A": "b"}, resources=_gpus("a10g", 4))

    assert requests[0]["ResourceConfig"]["InstanceType"] == "ml.g5.12xlarge"
    assert requests[0]["StoppingCondition"]["MaxRuntimeInSeconds"] == 5 * 24 * 3600
    for each in requests:
        assert faults(each, MODEL.operation_model("CreateTrainingJob")) == []


def test_a_plan_names_the_secrets_that_will_be_given() -> None:
    """What is printed fetches the launch's own, of which the pass is always one."""
    spec = IslandSpec(
        command=("train.py",),
        run="s3://reef/a",
        name="a",
        image=IMAGE,
    )
    plan = plan_spec("sagemaker", 1, spec, options=USUAL)
    words = plan.data[0]["AlgorithmSpecification"]["ContainerArguments"]

    assert words[words.index("--secrets") + 1] == "atoll/atoll-a-00000000"
    assert "to be read" not in plan.text


def test_a_plan_is_what_is_submitted(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWS hears what was printed; every island fetches its pass, if nothing else."""
    options = {**USUAL, "endpoint_url": cloud.url}
    each = both("sagemaker", tmp_path, monkeypatch, options=options, image=IMAGE)
    heard = each.as_planned(list(cloud.jobs.values()))
    for job in heard:
        del job["CreationTime"]

    assert heard == each.plan.data
    (kept,) = cloud.secrets.values()
    assert list(json.loads(kept)) == list(SECRETS)


def test_words_of_any_kind_arrive() -> None:
    """Long ones are cut, and lines and letters of elsewhere are escaped."""
    words = ["python", "", "a\nb\t\"'", "é" * 300, "=", "+x", "x" * 255, "x" * 256]
    sent = folded(words)

    assert unfolded(sent) == words
    assert all(len(each) <= 256 and each.isprintable() for each in sent)


def test_secrets_are_in_secrets_manager_alone(stage: LaunchStage, cloud: Cloud) -> None:
    """Whoever describes the job sees names; when it is over its own are deleted."""
    cloud.secrets["reef/token"] = HIDDEN
    launcher = stage.open_launcher()
    order = stage.order(
        HEAR,
        num_islands=1,
        secrets={"HIDDEN": "engine:reef/token", "OTHER": "env:OTHER"},
        values={"OTHER": Secret("hush-other")},
    )
    handle = launcher.launch(order, keep=NOTHING)
    assert json.loads(cloud.secrets[f"atoll/{order.id}"]) == {"OTHER": "hush-other"}
    stage.until(handle, are_over)

    told = f"heard {len(HIDDEN)} {HIDDEN[::-1]}"
    assert told in stage.until_said(handle, 0, "heard")
    assert HIDDEN not in json.dumps(cloud.jobs)
    assert "hush-other" not in json.dumps(cloud.jobs)
    assert list(cloud.secrets) == ["reef/token"]


def test_a_look_before_the_first_job_leaves_the_secrets(
    stage: LaunchStage, cloud: Cloud
) -> None:
    """Another terminal may look at a launch that is being submitted."""
    launcher = stage.open_launcher()
    order = stage.order(TELL, num_islands=1, values={"OTHER": Secret("hush-other")})
    handle = launcher.launch(order, keep=NOTHING)
    stage.until(handle, are_over)
    cloud.secrets[f"atoll/{order.id}"], job = "{}", cloud.jobs.popitem()
    launcher.poll(handle)
    assert list(cloud.secrets) == [f"atoll/{order.id}"]
    cloud.jobs.update([job])
    launcher.poll(handle)

    assert list(cloud.secrets) == []


def test_a_secret_that_is_not_there_is_told(stage: LaunchStage) -> None:
    """The island does not start without it, and its log says why."""
    order = stage.order(TELL, num_islands=1, secrets={"A": "engine:none"})
    handle = stage.open_launcher().launch(order, keep=NOTHING)
    (report,) = stage.until(handle, are_over)

    assert report.state is State.FAILED
    said = stage.until_said(handle, 0, "cannot start")
    assert "no such secret" in said[-1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"image": None}, "runs an island in an image"),
        ({"image": None, "requirements": ("torch",)}, "cannot take its place"),
        ({"resources": Resources(cpus=4.0)}, "cpus=4 cannot be requested of sagemaker"),
        ({"resources": Resources(accelerators=3)}, "No instance is known with"),
        ({"environment": {"A": "x" * 513}}, "A has 513 characters"),
        ({"command": ("a",) * 90}, r"is \d+ arguments for SageMaker, which takes 100"),
    ],
)
def test_what_a_job_cannot_is_refused(given: dict[str, Any], message: str) -> None:
    """By name, and before AWS is asked."""
    with pytest.raises(UsageError, match=message):
        _plan(**given)


def test_a_role_is_asked_for() -> None:
    """What SageMaker cannot do without is named, with the options that give it."""
    with pytest.raises(UsageError, match=r"role=ARN and --option output=s3://"):
        _plan({"role": ""})


def test_an_unknown_instance_is_told_by_aws(stage: LaunchStage, cloud: Cloud) -> None:
    """New hardware needs no new Atoll, and a misspelt one starts nothing."""
    launcher = _launcher(cloud, instance_type="ml.g5.small")
    with pytest.raises(UsageError, match=r"cannot create claim-.*has no 'ml.g5.small'"):
        launcher.launch(stage.order(TELL), keep=NOTHING)

    assert cloud.jobs == {}


def test_missing_credentials_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is launched: a key, a region, a profile."""
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    with pytest.raises(UsageError, match=r"No region .* --option region=NAME"):
        open_launcher("sagemaker")
    with pytest.raises(UsageError, match=r"profile \(reef\) could not be found"):
        open_launcher("sagemaker", {"profile": "reef"})
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(UsageError, match=r"no credentials for AWS .*aws configure"):
        open_launcher("sagemaker", {"region": "eu-reef-1"}).poll(HANDLE)

    assert len(_plan({"region": "eu-reef-1"})) == 2


def test_credentials_that_cannot_be_fetched_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A login that is over is no line that is down: asking again does not help."""
    (tmp_path / "config").write_text("[profile reef]\ncredential_process = false\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(Refused, match=r"AWS does not know you.*aws sso login"):
        open_launcher("sagemaker", {"profile": "reef"}).poll(HANDLE)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault("AccessDeniedException", "not you"), Refused),
        (Fault("ResourceLimitExceeded", "0 instances of that type"), UsageError),
        (Fault("InternalFailure", "again", 500), Unreachable),
        (Fault("TooManyRequestsException", "slowly"), Unreachable),
    ],
)
def test_faults_of_aws_are_ours(
    fault: Fault, kind: type[Exception], cloud: Cloud, stage: LaunchStage
) -> None:
    """Who may not, what is not to be had, and when asking again may help."""
    cloud.fault = fault
    with pytest.raises(kind, match=f"list training jobs .*{fault.code}.*: {fault}"):
        stage.open_launcher().launch(stage.order(TELL), keep=NOTHING)


def test_who_does_not_answer_is_unreachable() -> None:
    """Nothing is said of islands when nobody was asked."""
    with pytest.raises(Unreachable, match="did not answer to list training jobs"):
        open_launcher("sagemaker", USUAL).poll(HANDLE)


@pytest.mark.parametrize(
    ("status", "state", "why"),
    [
        (("InProgress", "Downloading"), State.PENDING, ""),
        (("InProgress", "Interrupted"), State.RESTARTING, ""),
        (("Stopped", "MaxRuntimeExceeded"), State.CANCELLED, "MaxRuntimeExceeded"),
        (("Thinking", ""), State.PENDING, "its status is 'Thinking', which is unknown"),
    ],
)
def test_every_status_has_its_state(
    status: tuple[str, str], state: State, why: str, cloud: Cloud, stage: LaunchStage
) -> None:
    """A spot instance that is taken comes back; a new status is no end."""
    launcher = stage.open_launcher()
    handle = launcher.launch(stage.order(TELL, num_islands=1), keep=NOTHING)
    cloud.statuses[f"{handle.id}-0"] = status
    (report,) = launcher.poll(handle)

    assert report.state is state
    assert report.reason.startswith(why)


def test_a_job_that_aws_lost_is_lost_alone(stage: LaunchStage, cloud: Cloud) -> None:
    """The other islands of its launch are still known, over several pages."""
    launcher = stage.open_launcher()
    handle = launcher.launch(stage.order(TELL, num_islands=4), keep=NOTHING)
    del cloud.jobs[f"{handle.id}-1"]
    reports = stage.until(handle, are_over)

    lost = [each.index for each in reports if each.state is State.LOST]
    assert lost == [1]
    assert launcher.poll(replace(handle, num_islands=1))[0].state is State.FINISHED


def _launcher(cloud: Cloud, **options: str) -> Launcher:
    return open_launcher("sagemaker", {**USUAL, "endpoint_url": cloud.url, **options})


def _gpus(kind: str, num: int) -> Resources:
    return Resources(accelerator=kind, accelerators=num)


def _plan(options: dict[str, str] | None = None, **given: Any) -> Any:
    fields: dict[str, Any] = {"image": IMAGE, "command": ("train.py",)} | given
    spec = IslandSpec(run="s3://reef/a", name="a", **fields)
    launcher = open_launcher("sagemaker", {**USUAL, **(options or {})})
    return launcher.plan(LaunchOrder(id="a-1", spec=spec, num_islands=2)).data
