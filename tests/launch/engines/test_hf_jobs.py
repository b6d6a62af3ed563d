"""Islands as jobs of Hugging Face: the real SDK, against a Hub on loopback."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, constants

from atoll.errors import Refused, Unreachable, UsageError
from atoll.launch.base import Handle, LaunchOrder, State
from atoll.launch.registry import open_launcher
from atoll.launch.spec import IslandSpec, Resources
from atoll.security import Secret
from atoll.testing import LAUNCHER_CLAIMS, LaunchStage
from atoll.testing.launcher_contract import HIDDEN, STAY, TELL, are_over
from tests.launch.hf_hub import USER, Hub, online, served
from tests.launch.planned import SECRETS, both

NOTHING: Callable[[Handle], None] = lambda handle: None  # noqa: E731


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    online(monkeypatch)
    with served(tmp_path / "hub") as hub:
        yield hub


@pytest.fixture
def stage(hub: Hub, tmp_path: Path) -> LaunchStage:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return LaunchStage(
        open_launcher=lambda: open_launcher("hf-jobs", {"endpoint": hub.url}),
        scratch=scratch,
        spec={"image": "reef/atoll:1"},
        forgotten=lambda handle: replace(
            handle,
            id="claim-unknown",
            reference={"namespace": USER, "jobs": {"0": "f" * 24}},
        ),
        counts_lives=False,
    )


@pytest.mark.parametrize("claim", LAUNCHER_CLAIMS, ids=lambda claim: claim.__name__)
def test_it_is_a_launcher(
    claim: Callable[[LaunchStage], None], stage: LaunchStage
) -> None:
    """Jobs keep the contract."""
    claim(stage)


def test_an_answer_that_is_none_of_the_hubs_is_told(
    stage: LaunchStage, hub: Hub
) -> None:
    """A proxy that says something else is no mistake of the user's: it may pass."""
    launcher = stage.open_launcher()
    handle = launcher.launch(stage.order(STAY, num_islands=1), keep=NOTHING)
    hub.answer = (200, "maintenance")
    with pytest.raises(Unreachable, match="The response of hf_jobs to 'poll'"):
        launcher.poll(handle)
    hub.answer = None
    launcher.cancel(handle, grace_s=0.0)


def test_who_is_not_to_ask_the_hub_is_told(
    stage: LaunchStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable that keeps the SDK from every call is named."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match="HF_HUB_OFFLINE is set"):
        stage.open_launcher().launch(stage.order(STAY), keep=NOTHING)


def test_a_plan_is_what_the_sdk_takes(stage: LaunchStage) -> None:
    """Every argument has a name that `run_job` knows."""
    plan = stage.open_launcher().plan(stage.order(TELL))
    for each in plan.data:
        inspect.signature(HfApi.run_job).bind(None, **each["run_job"])


def test_the_hub_is_told_what_was_asked_for(stage: LaunchStage, hub: Hub) -> None:
    """Hardware, time, labels and network; and the secret in its own field alone."""
    launcher = open_launcher(
        "hf_jobs", {"endpoint": hub.url, "network_group": "reef", "attempts": "3"}
    )
    order = stage.order(
        TELL,
        num_islands=1,
        environment={"A": "b"},
        resources=Resources(accelerators=4, accelerator="a100", time_limit_s=7200.0),
        secrets={"HIDDEN": "env:HIDDEN"},
        values={"HIDDEN": Secret(HIDDEN)},
    )
    launcher.launch(order, keep=NOTHING)
    (job,) = hub.jobs.values()

    assert (job["flavor"], job["timeoutSeconds"], job["attempts"]) == (
        "a100x4",
        7200,
        3,
    )
    assert job["labels"]["atoll-launch"] == order.id
    assert job["network"] == {"group": "reef", "aliases": ["claim-0"]}
    assert (job["environment"], job["secrets"]) == ({"A": "b"}, {"HIDDEN": "***"})
    assert HIDDEN not in json.dumps(job)


def test_a_plan_is_what_is_submitted(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Hub hears what was printed, and no more than the names of secrets differ."""
    each = both(
        "hf_jobs",
        tmp_path,
        monkeypatch,
        options={"endpoint": hub.url},
        image="reef/atoll:1",
    )
    calls = [it["run_job"] for it in each.plan.data]
    heard = each.as_planned(list(hub.jobs.values()))

    for call, job in zip(calls, heard, strict=True):
        assert sorted(job["secrets"]) == call["secrets"] == sorted(SECRETS)
        assert (job["command"], job["environment"]) == (call["command"], call["env"])
        assert (job["dockerImage"], job["flavor"]) == (call["image"], call["flavor"])
        assert call["labels"].items() <= job["labels"].items()
        assert job["timeoutSeconds"] == call["timeout"]


def test_a_job_has_days_unless_it_is_told_otherwise(stage: LaunchStage) -> None:
    """The Hub's half an hour would end a training early."""
    (call,) = stage.open_launcher().plan(stage.order(TELL, num_islands=1)).data

    assert call["run_job"]["timeout"] == 7 * 24 * 3600


def test_requirements_are_installed_first() -> None:
    """Where there is no image, pip brings Atoll, and nothing is read by a shell."""
    call = _plan(requirements=("atoll", "torch>=2; x"))[0]["run_job"]

    assert call["image"] == "python:3.12"
    assert call["command"][:2] == ["sh", "-c"]
    assert call["command"][2].startswith("python -m pip install --quiet atoll 'torch>=")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"image": None}, "nothing to run an island in. Give --image"),
        ({"resources": Resources(cpus=4.0)}, "cpus=4 cannot be requested of hf_jobs"),
        ({"resources": Resources(memory_bytes=2**30)}, "memory_bytes="),
        (
            {"resources": Resources(accelerators=3, accelerator="a100")},
            "no flavor with accelerator='a100', accelerators=3. There are .*a100x4",
        ),
        ({"resources": Resources(accelerators=1)}, "no flavor with accelerator=None"),
        ({"secrets": {"A": "engine:a"}}, "hf_jobs keeps none"),
    ],
)
def test_what_jobs_cannot_is_refused(given: dict[str, Any], message: str) -> None:
    """By name, and before the Hub is asked."""
    with pytest.raises(UsageError, match=message):
        _plan(**given)


def test_an_unknown_flavor_is_told_by_the_hub(stage: LaunchStage, hub: Hub) -> None:
    """New hardware needs no new Atoll, and a misspelt one starts nothing."""
    launcher = open_launcher("hf_jobs", {"endpoint": hub.url, "flavor": "l40"})
    with pytest.raises(UsageError, match=r"cannot start claim-0 \(400\).*flavor 'l40'"):
        launcher.launch(stage.order(TELL), keep=NOTHING)

    assert hub.jobs == {}


def test_a_job_that_is_in_no_list_yet_is_cancelled(
    stage: LaunchStage, hub: Hub
) -> None:
    """Whoever is interrupted after the first of two jobs has kept the id of that."""
    launcher, kept = stage.open_launcher(), list[Handle]()

    def keep(handle: Handle) -> None:
        kept.append(handle)
        if hub.jobs:
            raise KeyboardInterrupt

    hub.is_slow = True
    with pytest.raises(KeyboardInterrupt):
        launcher.launch(stage.order(STAY), keep=keep)
    launcher.cancel(kept[-1])

    assert [each.was_stopped for each in hub.containers.values()] == [True]


def test_a_page_that_is_no_answer_of_the_hub_is_told(
    stage: LaunchStage, hub: Hub
) -> None:
    """A portal says 200 to everything, and asking again later may help."""
    hub.answer = (200, "")
    with pytest.raises(Unreachable, match="did not answer to read your name"):
        stage.open_launcher().launch(stage.order(TELL), keep=NOTHING)


def test_nobody_logged_in_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before anything is launched, and with what to do."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(UsageError, match=r"No user is logged in .*`hf auth login`"):
        open_launcher("hf_jobs").launch(_order(), keep=NOTHING)

    assert len(_plan()) == 1


def test_who_may_not_is_refused(
    stage: LaunchStage, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another's token, and one that may not pay, are no errors of the network."""
    hub.answer = (402, "Payment required")
    with pytest.raises(Refused, match=r"\(402\): .*Payment required"):
        stage.open_launcher().launch(stage.order(TELL), keep=NOTHING)
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    with pytest.raises(Refused, match=r"does not let you .* \(401\)"):
        stage.open_launcher().launch(stage.order(TELL), keep=NOTHING)


def test_who_does_not_answer_is_unreachable(stage: LaunchStage, hub: Hub) -> None:
    """Asking again may help: for a Hub that is overloaded as for one that is gone."""
    handle = Handle(
        id="claim-1",
        engine="hf_jobs",
        run="/a",
        name="claim",
        num_islands=1,
        reference={"namespace": USER, "jobs": {}},
    )
    # The SDK itself repeats `list_jobs` for 23 s after a 500 or a lost connection, and
    # neither after a 501 nor in `whoami`, the first call of a launch.
    hub.answer = (501, "overloaded")
    with pytest.raises(Unreachable, match=r"could not list jobs \(501\)"):
        stage.open_launcher().poll(handle)
    hub.answer = (500, "overloaded")
    order = stage.order(TELL)
    with pytest.raises(Unreachable, match=r"could not read your name \(500\)"):
        stage.open_launcher().launch(order, keep=NOTHING)
    nobody = open_launcher("hf_jobs", {"endpoint": "http://127.0.0.1:1"})
    with pytest.raises(Unreachable, match="did not answer to read your name"):
        nobody.launch(order, keep=NOTHING)


def test_an_unknown_stage_is_no_end(stage: LaunchStage, hub: Hub) -> None:
    """What the Hub has invented since is shown as it is, and waited for."""
    launcher = stage.open_launcher()
    handle = launcher.launch(stage.order(TELL, num_islands=1), keep=NOTHING)
    hub.stages[handle.reference["jobs"]["0"]] = "UPDATING"
    (report,) = launcher.poll(handle)

    assert report.state is State.PENDING
    assert report.reason == "its stage is 'UPDATING', which is unknown here"


def test_a_job_that_the_hub_lost_is_lost_alone(stage: LaunchStage, hub: Hub) -> None:
    """The other islands of its launch are still known."""
    launcher = stage.open_launcher()
    handle = launcher.launch(stage.order(TELL), keep=NOTHING)
    stage.until(handle, are_over)
    del hub.jobs[handle.reference["jobs"]["1"]]

    states = [each.state for each in launcher.poll(handle)]
    assert states == [State.FINISHED, State.LOST]


def test_a_copy_of_a_job_is_no_island(stage: LaunchStage, hub: Hub) -> None:
    """Whoever duplicates a job on the Hub duplicates its labels."""
    launcher = stage.open_launcher()
    handle = launcher.launch(stage.order(TELL, num_islands=1), keep=NOTHING)
    stage.until(handle, are_over)
    (job,) = hub.jobs
    hub.jobs["copy"] = {**hub.jobs[job], "id": "copy"}
    hub.containers["copy"] = hub.containers[job]
    hub.jobs["other"] = {**hub.jobs["copy"], "labels": {"atoll-launch": handle.id}}
    hub.containers["other"] = hub.containers[job]
    (report,) = launcher.poll(handle)

    assert report.host == f"job {job}"


def test_an_island_leaves_before_its_time_is_over(stage: LaunchStage) -> None:
    """It is told to go, and that is no failure."""
    order = stage.order(STAY, num_islands=1, resources=Resources(time_limit_s=2.0))
    handle = stage.open_launcher().launch(order, keep=NOTHING)
    (report,) = stage.until(handle, are_over)

    assert (report.state, report.exit_code) == (State.CANCELLED, 143)


def _plan(**given: Any) -> Any:
    return open_launcher("hf_jobs").plan(_order(**given)).data


def _order(**given: Any) -> LaunchOrder:
    fields: dict[str, Any] = {"image": "reef/atoll:1"} | given
    if "requirements" in given:
        fields["image"] = None
    spec = IslandSpec(command=("train.py",), run="s3://reef/a", name="a", **fields)
    return LaunchOrder(id="a-1", spec=spec, num_islands=1)
