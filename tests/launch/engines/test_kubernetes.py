"""Islands on Kubernetes: the official client, the official schemas, and real processes.

The API server is ours (`kubernetes_server`): no real one can be had without a machine's
root and its images.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from atoll.errors import Refused, Unreachable, UsageError
from atoll.launch.base import Handle, Launcher, LaunchOrder, State
from atoll.launch.engines.kubernetes import cluster as pods
from atoll.launch.registry import open_launcher
from atoll.launch.spec import IslandSpec, Resources, Restarts
from atoll.security import Secret
from atoll.testing import LAUNCHER_CLAIMS, LaunchStage
from atoll.testing.launcher_contract import FAIL, HIDDEN, STAY, are, are_over
from tests.launch.kubernetes_server import KubernetesServer, until
from tests.launch.planned import SECRETS, both

NOTHING: Callable[[Handle], None] = lambda handle: None  # noqa: E731
LEAVE = (
    "import signal, sys, time\n"
    "def leave(*_):\n"
    "    print('leaving', flush=True)\n"
    "    sys.exit(0)\n"
    "signal.signal(signal.SIGTERM, leave)\n"
    "print('here', flush=True)\n"
    "time.sleep(600)\n"
)
SAY_MORE = (
    "import pathlib, sys, time\n"
    "print('one\\ntwo', flush=True)\n"
    "while not pathlib.Path(sys.argv[1]).exists():\n"
    "    time.sleep(0.02)\n"
    "print('three', flush=True)\n"
    "time.sleep(600)\n"
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[KubernetesServer]:
    place = tmp_path / "cluster"
    place.mkdir()
    with KubernetesServer(place).serving() as server:
        yield server


@pytest.fixture
def stage(server: KubernetesServer, tmp_path: Path) -> LaunchStage:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    options = {"kubeconfig": str(server.kubeconfig()), "python": sys.executable}
    return LaunchStage(
        open_launcher=lambda: open_launcher("kubernetes", options),
        scratch=scratch,
        spec={"image": "reef/atoll:1"},
    )


@pytest.mark.parametrize("claim", LAUNCHER_CLAIMS, ids=lambda claim: claim.__name__)
def test_it_is_a_launcher(
    claim: Callable[[LaunchStage], None], stage: LaunchStage
) -> None:
    """A cluster keeps the contract."""
    claim(stage)


def test_an_evicted_island_goes_on_elsewhere(
    server: KubernetesServer, stage: LaunchStage
) -> None:
    """It leaves its run cleanly, and the Job gives it another pod, at no cost."""
    launcher = stage.open_launcher()
    order = stage.order(LEAVE, num_islands=1)
    handle = launcher.launch(order, keep=NOTHING)
    try:
        stage.until_said(handle, 0, "here")
        (before,) = server.pods()
        server.evict(before.name)
        until(server, lambda: before not in server.pods() and server.pods())
        stage.until_said(handle, 0, "here")
        (report,) = stage.until(handle, are(State.RUNNING))

        assert b"leaving" in (before.log() or b"")
        assert before.exit_code == 143
        assert report.name == "claim-0"
    finally:
        launcher.cancel(handle, grace_s=1.0)
        stage.until(handle, are_over)


@pytest.mark.parametrize("has_proxy", [False, True], ids=["alone", "with a proxy"])
def test_a_killed_pod_is_replaced(
    has_proxy: bool, server: KubernetesServer, stage: LaunchStage
) -> None:
    """A life that a machine took is counted, and its log is not lost."""
    server.adds_proxies = has_proxy
    launcher = stage.open_launcher()
    order = stage.order(STAY, num_islands=1, restarts=Restarts(max_restarts=1))
    handle = launcher.launch(order, keep=NOTHING)
    try:
        stage.until_said(handle, 0, "here")
        (first,) = server.pods()
        first.kill()
        (report,) = stage.until(
            handle, lambda all_: all_[0].restarts == 1 and are(State.RUNNING)(all_)
        )
        stage.until_said(handle, 0, "here\nhere")

        assert (report.host, report.exit_code) == ("node-1", 137)
    finally:
        launcher.cancel(handle, grace_s=1.0)
        stage.until(handle, are_over)


def test_a_log_that_its_node_rotates_is_followed(
    server: KubernetesServer, stage: LaunchStage, tmp_path: Path
) -> None:
    """A cluster has the newest part of a long log, and lines are counted on."""
    launcher = stage.open_launcher()
    order = stage.order(SAY_MORE, str(tmp_path / "more"), num_islands=1)
    handle = launcher.launch(order, keep=NOTHING)
    try:
        stage.until_said(handle, 0, "two")
        told = launcher.logs(handle, 0)
        (pod,) = server.pods()
        pod.has_rotated = True
        (tmp_path / "more").touch()
        stage.until_said(handle, 0, "three")

        assert told == ["one", "two"]
        assert launcher.logs(handle, 0, after=len(told)) == ["three"]
    finally:
        launcher.cancel(handle, grace_s=1.0)
        stage.until(handle, are_over)


def test_a_container_beside_an_island_does_not_speak_for_it(
    server: KubernetesServer, stage: LaunchStage
) -> None:
    """Clusters put proxies into pods, whose names may come first."""
    server.adds_proxies = True
    launcher = stage.open_launcher()
    handle = launcher.launch(stage.order(FAIL, num_islands=1), keep=NOTHING)
    (report,) = stage.until(handle, are_over)

    assert (report.state, report.exit_code) == (State.FAILED, 3)
    assert launcher.logs(handle, 0) == ["before the end"]


def test_an_island_that_dies_at_once_is_left_dead(
    server: KubernetesServer, stage: LaunchStage
) -> None:
    """Its leader has tried three times, and the Job does not try on."""
    restarts = Restarts(first_pause_s=0.05, longest_pause_s=0.1)
    launcher = stage.open_launcher()
    order = stage.order(FAIL, num_islands=1, restarts=restarts)
    handle = launcher.launch(order, keep=NOTHING)
    (report,) = stage.until(handle, are_over)

    assert (report.state, report.restarts, report.exit_code) == (State.FAILED, 2, 3)
    assert report.reason == "crashed 3 times in a row: exit code 3"
    assert launcher.logs(handle, 0).count("before the end") == 3
    assert len(server.pods()) == 1


def test_a_cancelled_island_leaves_cleanly_and_stays_away(
    server: KubernetesServer, stage: LaunchStage
) -> None:
    """Exit code 0 after a request to go is no end of the work, and no new pod comes."""
    launcher = stage.open_launcher()
    handle = launcher.launch(stage.order(LEAVE), keep=NOTHING)
    try:
        for index in (0, 1):
            stage.until_said(handle, index, "here")
        doomed = next(each for each in server.pods() if "-0-" in each.name)
        launcher.cancel(handle, indexes=[0])
        reports = stage.until(handle, lambda all_: all_[0].state.is_over)
        until(server, lambda: "failedIndexes" in server.jobs[handle.id].form["status"])

        assert [each.state for each in reports] == [State.CANCELLED, State.RUNNING]
        assert b"leaving" in (doomed.log() or b"")
        assert server.jobs[handle.id].form["status"]["failedIndexes"] == "0"
    finally:
        launcher.cancel(handle, grace_s=5.0)
        stage.until(handle, are_over)


def test_an_island_that_waits_is_cancelled_and_never_starts(
    server: KubernetesServer, stage: LaunchStage, tmp_path: Path
) -> None:
    """A pod that comes for it all the same ends before its command."""
    launcher = stage.open_launcher()
    # It waits for a Secret that somebody else is to make.
    order = stage.order(STAY, num_islands=1, secrets={"A": "engine:later/key"})
    handle = launcher.launch(order, keep=NOTHING)
    (report,) = stage.until(handle, lambda all_: "later" in all_[0].reason)
    launcher.cancel(handle, indexes=[0])
    stage.until(handle, are_over)
    with server.lock:
        server.secrets["later"] = {"stringData": {"key": "x"}}
    until(server, lambda: server.jobs[handle.id].is_over)

    assert report.state is State.PENDING
    assert [each.state for each in launcher.poll(handle)] == [State.CANCELLED]
    assert "here" not in launcher.logs(handle, 0)


def test_an_island_that_is_not_admitted_waits_and_is_cancelled(
    server: KubernetesServer, stage: LaunchStage
) -> None:
    """A suspended Job has no clock, so that no deadline would end it."""
    options = {"kubeconfig": str(server.kubeconfig()), "queue": "reef-queue"}
    launcher = open_launcher("kubernetes", options)
    handle = launcher.launch(stage.order(STAY), keep=NOTHING)
    until(server, lambda: "conditions" in server.jobs[handle.id].form["status"])
    waiting = launcher.poll(handle)
    launcher.cancel(handle, indexes=[0])
    one_left = launcher.poll(handle)
    launcher.cancel(handle)
    launcher.cancel(handle)

    assert [each.state for each in waiting] == [State.PENDING] * 2
    assert waiting[0].reason == "JobSuspended: Job suspended"
    assert [each.state for each in one_left] == [State.CANCELLED, State.PENDING]
    assert server.jobs == {}
    assert [each.state for each in launcher.poll(handle)] == [State.LOST] * 2


def test_a_job_that_is_suspended_later_comes_back(
    server: KubernetesServer, stage: LaunchStage
) -> None:
    """Kueue takes the place of a running one: its islands leave and have not failed."""
    launcher = stage.open_launcher()
    handle = launcher.launch(stage.order(LEAVE, num_islands=1), keep=NOTHING)
    try:
        stage.until_said(handle, 0, "here")
        (pod,) = server.pods()
        with server.lock:
            server.jobs[handle.id].form["spec"]["suspend"] = True
        # As it is before the cluster has taken the pod away.
        until(server, lambda: pod.is_terminal)
        job, gone = server.jobs[handle.id].form, pod.form
        assert pods.report(handle, 0, job, [gone]).state is State.RESTARTING
        stage.until(handle, are(State.PENDING))
        with server.lock:
            job["spec"]["suspend"] = False
            job["status"]["conditions"] = []
        stage.until(handle, are(State.RUNNING))
    finally:
        launcher.cancel(handle, grace_s=1.0)
        stage.until(handle, are_over)


def test_secrets_are_in_a_secret_alone(
    server: KubernetesServer, stage: LaunchStage
) -> None:
    """The Secret belongs to its Job; the Job, its pods and words have no value."""
    values = {"HIDDEN": Secret(HIDDEN)}
    order = stage.order("", secrets={"HIDDEN": "env:HIDDEN"}, values=values)
    launcher = stage.open_launcher()
    handle = launcher.launch(order, keep=NOTHING)
    stage.until(handle, are_over)
    secret = server.secrets[order.id]
    owner = secret["metadata"]["ownerReferences"][0]

    assert secret["stringData"]["HIDDEN"] == HIDDEN
    assert owner["uid"] == server.jobs[order.id].form["metadata"]["uid"]
    assert HIDDEN not in repr(server.jobs[order.id].form)
    assert HIDDEN not in repr([each.form for each in server.pods()])


def test_a_plan_is_what_is_submitted(
    server: KubernetesServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference of every secret is in it, and so is that of the pass."""
    options = {"kubeconfig": str(server.kubeconfig()), "python": sys.executable}
    each = both(
        "kubernetes", tmp_path, monkeypatch, options=options, image="reef/atoll:1"
    )
    form = each.as_planned(server.submitted[0])
    env = form["spec"]["template"]["spec"]["containers"][0]["env"]
    named = [it["name"] for it in env if "secretKeyRef" in it.get("valueFrom", {})]

    assert form == each.plan.data
    assert named == [*SECRETS, "ATOLL_CANCELLED"]


def test_a_spec_becomes_a_manifest(server: KubernetesServer) -> None:
    """All that is asked for is there, and the official schema takes it strictly."""
    more = {
        "namespace": "atolls",
        "volumes": "data:/data",
        "node_selector": "pool=spot",
        "service_account": "islander",
        "pull_secret": "registry",
        "priority_class": "low",
    }
    order = _order(
        resources=Resources(
            cpus=1.5,
            memory_bytes=2**30,
            accelerators=2,
            accelerator="A100",
            time_limit_s=3600.0,
        ),
        environment={"MODE": "$(HOME)"},
        secrets={"HF_TOKEN": "engine:hub/token", "KEY": "engine:KEYS"},
    )
    plan = _launcher(server, more).plan(order)
    pod = plan.data["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    told = {each["name"]: each for each in container["env"]}

    assert yaml.safe_load(plan.text) == plan.data
    kubernetes_validate.validate(plan.data, "1.37", strict=True)
    assert plan.data["metadata"]["namespace"] == "atolls"
    assert pod["nodeSelector"] == {"pool": "spot", "nvidia.com/gpu.product": "A100"}
    assert pod["activeDeadlineSeconds"] == 3600
    assert container["resources"] == {
        "requests": {"cpu": "1500m", "memory": "1073741824"},
        "limits": {"memory": "1073741824", "nvidia.com/gpu": "2"},
    }
    assert told["MODE"]["value"] == "$$(HOME)"
    assert _place(told["HF_TOKEN"]) == ("hub", "token")
    assert _place(told["KEY"]) == ("KEYS", "KEY")
    assert {"name": "claim-0", "mountPath": "/data"} in container["volumeMounts"]


def test_the_schema_would_refuse_a_misspelt_field(server: KubernetesServer) -> None:
    """The check of manifests can fail."""
    data = _launcher(server, {}).plan(_order()).data
    data["spec"]["backofLimit"] = 1
    with pytest.raises(kubernetes_validate.ValidationError, match="backofLimit"):
        kubernetes_validate.validate(data, "1.37", strict=True)


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ({"image": None}, {}, "none is given. Give --image"),
        ({"image": None, "requirements": ("a",)}, {}, "requirements="),
        ({}, {"volumes": "data"}, "'data' is not in the form .*CLAIM:/PATH"),
        ({}, {"node_selector": "=a"}, "node_selector=LABEL=VALUE"),
    ],
)
def test_what_a_cluster_cannot_is_refused(
    given: dict[str, Any],
    options: dict[str, str],
    message: str,
    server: KubernetesServer,
) -> None:
    """Before anything is submitted."""
    launcher = _launcher(server, options)
    with pytest.raises(UsageError, match=message):
        launcher.launch(_order(**given), keep=NOTHING)

    assert server.requests == []


def test_missing_credentials_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is logged in nowhere is told so, and so is one with another context."""
    for name in ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION",
        str(tmp_path / "none"),
    )
    launcher, order = open_launcher("kubernetes"), _order()
    with pytest.raises(UsageError, match="There are no credentials of a cluster"):
        launcher.launch(order, keep=NOTHING)
    elsewhere = open_launcher("kubernetes", {"kubeconfig": str(tmp_path / "none")})
    with pytest.raises(UsageError, match="does not lead to a cluster"):
        elsewhere.plan(order)

    assert launcher.plan(order).data["metadata"]["namespace"] == "default"


def test_a_damaged_kubeconfig_is_told(tmp_path: Path) -> None:
    """It is a file of people's, and may hold anything."""
    (tmp_path / "config").write_text("a: [")
    with pytest.raises(UsageError, match="does not lead to a cluster"):
        open_launcher("kubernetes", {"kubeconfig": str(tmp_path / "config")}).plan(
            _order()
        )


def test_an_unknown_context_is_told(server: KubernetesServer) -> None:
    """Its kubeconfig has others."""
    options = {"kubeconfig": str(server.kubeconfig()), "context": "nowhere"}
    with pytest.raises(UsageError, match=r"does not lead to a cluster.*nowhere"):
        open_launcher("kubernetes", options).plan(_order())


def test_who_may_not_is_refused(server: KubernetesServer) -> None:
    """A wrong token, and a namespace of others."""
    for options in (
        {"kubeconfig": str(server.kubeconfig(token="another"))},
        {"kubeconfig": str(server.kubeconfig()), "namespace": "others"},
    ):
        with pytest.raises(Refused, match="refuses this user"):
            open_launcher("kubernetes", options).launch(_order(), keep=NOTHING)


def test_a_cluster_that_fails_may_be_asked_again(
    server: KubernetesServer, tmp_path: Path
) -> None:
    """One that is overloaded, and one that is not there."""
    options = {"kubeconfig": str(server.kubeconfig())}
    handle = _order().handle("kubernetes", {})
    server.failing = 503
    with pytest.raises(Unreachable, match="failed with 503: it was told to"):
        open_launcher("kubernetes", options).poll(handle)

    gone = tmp_path / "gone"
    text = Path(options["kubeconfig"]).read_text()
    gone.write_text(text.replace(text.split("http://")[1].split()[0], "127.0.0.1:9"))
    with pytest.raises(Unreachable, match="does not answer"):
        open_launcher("kubernetes", {"kubeconfig": str(gone)}).poll(handle)


def test_a_handle_names_its_cluster(
    server: KubernetesServer, stage: LaunchStage
) -> None:
    """Whatever is the current context later, it is found where it was launched."""
    handle = stage.open_launcher().launch(stage.order(""), keep=NOTHING)
    stage.until(handle, are_over)

    assert handle.options["context"] == "here"
    assert handle.options["namespace"] == "reef"


def _launcher(server: KubernetesServer, more: dict[str, str]) -> Launcher:
    return open_launcher("kubernetes", {"kubeconfig": str(server.kubeconfig()), **more})


def _order(**more: Any) -> LaunchOrder:
    fields = {"image": "reef/atoll:1", **more}
    spec = IslandSpec(command=("train.py",), run="s3://reef/a", name="a", **fields)
    return LaunchOrder(id="a-1", spec=spec, num_islands=2)


def _place(variable: dict[str, Any]) -> tuple[str, str]:
    found = variable["valueFrom"]["secretKeyRef"]
    return found["name"], found["key"]
