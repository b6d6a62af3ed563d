"""A coordinator that is to run among its islands: what is submitted, and what is not.

That it works is in `tests/e2e/test_launch_inside.py` and, on Ray, beside it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from huggingface_hub import HfApi

from atoll.launch.base import LaunchOrder
from atoll.launch.launches import COORDINATOR, LaunchRecords, Record
from atoll.launch.spec import IslandSpec
from tests.cli.runs import RUN_FILE, as_user, run
from tests.launch.kubernetes_server import KubernetesServer

INSIDE = ("launch", "--coordinator", "island0", "-n", "3")
IMAGE = ("--image", "reef/atoll:1")
COMMAND = ("run.toml", "--", "train.py")
GROUP = ("--option", "network_group=reef")

Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Say:
    """The command line, beside a run file that says nothing of how many begin."""
    as_user(monkeypatch, tmp_path / "home")
    monkeypatch.setenv("HF_TOKEN", "hf_hush")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "run.toml").write_text(RUN_FILE.replace("start_islands = 2", ""))
    return partial(run, capsys)


@pytest.fixture
def cluster(tmp_path: Path) -> tuple[str, ...]:
    """What leads to a cluster that nobody serves: plans ask nothing."""
    server = KubernetesServer(tmp_path)
    server.close()
    config = f"kubeconfig={server.kubeconfig()}"
    return ("--on", "kubernetes", *IMAGE, "--option", config)


def _dry(say: Say, *words: str) -> str:
    code, out, err = say(*INSIDE, "--dry-run", *words, *COMMAND)
    assert code == 0, err
    assert LaunchRecords().records() == []
    return out


def _documents(said: str) -> list[Any]:
    """Return documents of JSON that follow one another."""
    found, at = [], 0
    while rest := said[at:].strip():
        form, end = json.JSONDecoder().raw_decode(rest)
        found.append(form)
        at = len(said) - len(rest) + end
    return found


def test_a_cluster_is_shown_a_job_a_service_and_the_islands(
    say: Say, cluster: tuple[str, ...]
) -> None:
    """Each is what the official schemas take, strictly, and they lead to each other."""
    said = _dry(say, *cluster, "--option", "port=4712")
    server, service, islands = yaml.safe_load_all(said)
    for form in (server, service, islands):
        kubernetes_validate.validate(form, "1.37", strict=True)
    name = service["metadata"]["name"]
    (port,) = service["spec"]["ports"]
    labels = server["spec"]["template"]["metadata"]["labels"]
    words = islands["spec"]["template"]["spec"]["containers"][0]["command"]

    assert service["spec"]["selector"].items() <= labels.items()
    assert port["targetPort"] == 4712
    assert f"https://{name}.reef.svc:4712" in words
    container = server["spec"]["template"]["spec"]["containers"][0]
    assert "run.start_islands=3" in container["command"]
    assert {"ATOLL_CHARTER"} <= {each["name"] for each in container["env"]}


@pytest.mark.parametrize(
    ("words", "is_replaced"),
    [
        ((), False),
        (("--dir", "/elsewhere"), False),
        (("--dir", "/data/reef"), True),
    ],
)
def test_a_pod_is_replaced_where_its_successor_finds_the_run(
    words: tuple[str, ...], is_replaced: bool, say: Say, cluster: tuple[str, ...]
) -> None:
    """Else another would begin it anew, in silence."""
    volume = ("--option", "volumes=reef:/data")
    said = _dry(say, *cluster, *volume, *words)
    server, _, islands = yaml.safe_load_all(said)
    (evicted, _) = server["spec"]["podFailurePolicy"]["rules"]

    assert (server["spec"]["backoffLimitPerIndex"] > 0) is is_replaced
    assert (evicted["action"] == "Ignore") is is_replaced
    assert islands["spec"]["backoffLimitPerIndex"] > 0


def test_islands_of_several_pods_are_served_by_one(
    say: Say, cluster: tuple[str, ...]
) -> None:
    """A coordinator is a Job, also where every island is a JobSet."""
    options = ("--option", "jobset=true", "--option", "hosts=2")
    said = _dry(say, *cluster, *options)

    kinds = [each["kind"] for each in yaml.safe_load_all(said) if each]
    assert kinds == ["Job", "Service", "JobSet", "JobSet", "JobSet"]


def test_a_hub_is_shown_calls_that_its_sdk_takes(say: Say) -> None:
    """A coordinator has an alias of its own, cheap hardware and one attempt."""
    options = ("--option", "flavor=a100x8", "--option", "attempts=3")
    said = _dry(say, "--on", "hf_jobs", *IMAGE, *GROUP, *options)
    ((server,), islands) = _documents(said)
    calls = [each["run_job"] for each in (server, *islands)]
    for call in calls:
        inspect.signature(HfApi.run_job).bind(None, **call)
    coordinator, island = calls[:2]
    (alias,) = coordinator["network_aliases"]

    assert len(calls) == 4
    assert coordinator["secrets"] == ["ATOLL_CHARTER"]
    assert (coordinator["flavor"], coordinator["attempts"]) == ("cpu-basic", None)
    assert (island["flavor"], island["attempts"]) == ("a100x8", 3)
    assert f"https://{alias}:4711" in island["command"]
    assert "HF_NETWORK_GROUP_PREFIX" in island["command"]
    assert {each["network_group"] for each in calls} == {"reef"}


def test_ray_is_shown_an_actor_more(say: Say) -> None:
    """It listens at the address of its place, and is not made again at another."""
    (server,), islands = _documents(_dry(say, "--on", "ray"))
    words = server["words"]

    assert words[words.index("--listen") + 1] == "{address of this place}"
    assert server["max_restarts"] == 0
    assert len(islands) == 3
    assert all(each["max_restarts"] > 0 for each in islands)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--on", "modal", *IMAGE), "modal gives them no address"),
        (("--on", "hf_jobs", *IMAGE), "Give --option network_group=NAME"),
        (
            ("--on", "hf_jobs", *GROUP, "--requirement", "atoll"),
            "Code is kept with its run, whose coordinator on hf_jobs is not reached",
        ),
        (("--on", "ray", "--listen", "0.0.0.0"), "--listen 0.0.0.0 is for a run that"),
        (("--on", "ray", "--dir", "lagoon"), "Give an absolute path"),
        (("--on", "ray", "--set", "run.nmae=1"), "run.nmae"),
    ],
)
def test_what_cannot_be_served_inside_is_refused(
    words: tuple[str, ...],
    message: str,
    say: Say,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With 2, and nothing submitted."""
    monkeypatch.setenv("MODAL_TOKEN_ID", "ak-reef")
    monkeypatch.setenv("MODAL_TOKEN_SECRET", "as-reef")
    code, _, err = say(*INSIDE, *words, *COMMAND)

    assert code == 2, err
    assert message in err
    assert LaunchRecords().records() == []


@pytest.mark.parametrize("engine", ["modal", "hf_jobs"])
def test_a_run_that_is_there_needs_no_coordinator_among_its_islands(
    engine: str, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So nothing that only such a one needs is asked for, and code can be shipped."""
    monkeypatch.setenv("MODAL_TOKEN_ID", "ak-reef")
    monkeypatch.setenv("MODAL_TOKEN_SECRET", "as-reef")
    there = ("--dry-run", "--ship", "s3://reef/lagoon", "--", "train.py")
    code, out, err = say(*INSIDE, "--on", engine, *IMAGE, *there)

    assert code == 0, err
    assert "--code" in out


def test_a_run_out_of_sight_has_more_islands_by_scaling(say: Say) -> None:
    """Whoever would follow it from here could not, and is told what can be done."""
    url = "https://atoll-coordinator-0123abcd:4711"
    spec = IslandSpec(command=("true",), run="lagoon", name=COORDINATOR)
    order = LaunchOrder(id="atoll-coordinator-0123abcd", spec=spec, num_islands=1)
    options = {"network_group": "reef"}
    LaunchRecords().keep(
        Record(order.handle("hf_jobs", {}, options=options, run=url), spec)
    )
    words = ("--on", "hf_jobs", *IMAGE, *GROUP)
    code, _, err = say("launch", *words, url, "--", "train.py")

    assert code == 2, err
    assert f"more islands: atoll scale {url} N" in err
