"""A coordinator among its islands: nobody outside of the engine reaches it.

Real coordinators and real islands, in the processes of loopback clouds that resolve
their names for nobody else.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.runs import ISLAND, RUN_FILE, as_user, run, started
from tests.e2e.stage import PATIENT_S
from tests.launch.hf_hub import online, served
from tests.launch.kubernetes_pods import Pod
from tests.launch.kubernetes_server import KubernetesServer, until

pytestmark = pytest.mark.timeout(600)

STAY = "import time; print('here', flush=True); time.sleep(600)"
WAITING = ISLAND.replace(
    "noise =",
    "import pathlib, time\n"
    "print('here', flush=True)\n"
    "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.05)\n"
    "noise =",
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This user's configuration, beside a run file."""
    as_user(monkeypatch, tmp_path / "home")
    online(monkeypatch)
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RUN_FILE)
    return tmp_path / "home"


Say = Callable[..., str]
"""Says a command here, which must not fail, and returns what it says."""


@pytest.fixture
def say(home: Path, capsys: pytest.CaptureFixture[str]) -> Say:
    def said(*words: str) -> str:
        code, out, err = run(capsys, *words)
        assert code == 0, err
        return out

    return said


@pytest.fixture
def cluster(home: Path, tmp_path: Path) -> Iterator[KubernetesServer]:
    (tmp_path / "cluster").mkdir()
    with KubernetesServer(tmp_path / "cluster").serving() as server:
        yield server


@pytest.fixture
def hub(home: Path, tmp_path: Path) -> Iterator[list[str]]:
    """What launches at a Hub."""
    with served(tmp_path / "hub") as hub:
        yield _words("hf_jobs", endpoint=hub.url, network_group="reef")


def on_cluster(server: KubernetesServer, **more: object) -> list[str]:
    config = server.kubeconfig()
    return _words("kubernetes", kubeconfig=config, python=sys.executable, **more)


def _words(engine: str, **options: object) -> list[str]:
    """Return what follows `atoll`, but for the run and the command."""
    # Where every container has its own ports, there is always one that is free.
    with socket.socket() as held:
        held.bind(("", 0))
        options["port"] = held.getsockname()[1]
    words = ["launch", "--on", engine, "--coordinator", "island0", "-n", "2"]
    words += ["--name", "reef", "--image", "reef/atoll:1"]
    return [*words, *(it for key in options for it in _option(key, options[key]))]


def _option(key: str, value: object) -> tuple[str, str]:
    return "--option", f"{key}={value}"


def test_a_run_is_trained_in_a_cluster(cluster: KubernetesServer, home: Path) -> None:
    """Islands find their coordinator by its Service, and its Job says how it ended."""
    code, out, err = _launch(*on_cluster(cluster), command=ISLAND)

    assert code == 0, out + err
    _assert_trained(out)
    (service,) = cluster.services.values()
    (owner,) = service["metadata"]["ownerReferences"]
    assert owner["uid"] == cluster.jobs[owner["name"]].form["metadata"]["uid"]


def test_a_run_is_trained_by_jobs_of_a_group(hub: list[str], home: Path) -> None:
    """Islands find their coordinator by its alias, with what begins it in a job."""
    code, out, err = _launch(*hub, command=ISLAND)

    assert code == 0, out + err
    _assert_trained(out)


def test_islands_that_die_leave_no_coordinator(hub: list[str], say: Say) -> None:
    """The exit code says that the run has not ended."""
    code, out, err = _launch(*hub, command="raise SystemExit(7)")

    assert code == 1, out + err
    assert _states(say("ps", "--json", "--all")) == {
        "reef-0": "failed",
        "reef-1": "failed",
        "coordinator-0": "cancelled",
    }


def test_all_are_found_and_ended_by_the_name_of_their_run(
    cluster: KubernetesServer, say: Say
) -> None:
    """Coordinator and islands are in `ps` and `logs`, and go with one word."""
    code, _, err = _launch(*on_cluster(cluster), "--detach", command=STAY)
    assert code == 0, err
    states = _states(say("ps", "--json", "lagoon"))
    assert states.keys() == {"reef-0", "reef-1", "coordinator-0"}
    said = say("logs", "lagoon", "coordinator-0")
    assert '"name": "lagoon"' in said
    assert "atoll_" not in said
    say("scale", "lagoon", "3")
    say("cancel", "lagoon", "--grace-s", "1")

    states = _states(say("ps", "--json", "lagoon"))
    assert len(states) == 4
    assert set(states.values()) == {"cancelled"}


def test_a_coordinator_on_a_volume_outlives_its_pod(
    cluster: KubernetesServer, home: Path, tmp_path: Path
) -> None:
    """Another pod serves the same run at the same name, and islands go on."""
    volume, go = tmp_path / "volume", tmp_path / "go"
    words = on_cluster(cluster, volumes=f"reef:{volume}")
    words += ["--dir", str(volume / "lagoon")]
    launching = _launching(*words, command=WAITING, argument=str(go))
    first = _coordinator(cluster)
    before = _facts(cluster, first)
    cluster.evict(first.name)
    until(cluster, lambda: first not in cluster.pods(), wait_s=PATIENT_S)
    after = _facts(cluster, _coordinator(cluster))
    go.touch()
    code, out, err = _ended(launching)

    assert code == 0, out + err
    _assert_trained(out)
    assert (after["run"], after["pin"]) == (before["run"], before["pin"])


def test_a_coordinator_that_is_lost_with_its_run_is_not_begun_anew(
    cluster: KubernetesServer, say: Say
) -> None:
    """Its islands are ended, and the command says why."""
    launching = _launching(*on_cluster(cluster), command=STAY)
    cluster.evict(_coordinator(cluster).name)
    code, out, err = _ended(launching)

    assert code == 1, out + err
    assert "the run's coordinator is gone" in out
    assert "coordinator-0 failed: Job has failed" in err
    assert set(_states(say("ps", "--json", "--all")).values()) == {
        "failed",
        "cancelled",
    }


def _launch(*words: str, command: str) -> tuple[int, str, str]:
    return _ended(_launching(*words, command=command))


def _launching(*words: str, command: str, argument: str = "") -> subprocess.Popen[str]:
    told = (*words, "run.toml", "--", "python", "-c", command, argument)
    return started(*told, home=Path("home").absolute())


def _ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=4 * PATIENT_S)
    return process.returncode, out, err


def _coordinator(cluster: KubernetesServer) -> Pod:
    """Return the coordinator's pod, once its islands are there, too."""

    def has_all() -> bool:
        said = [(each.log() or b"") for each in cluster.pods()]
        return sum(b"here" in each for each in said) >= 2

    until(cluster, has_all, wait_s=PATIENT_S)
    until(cluster, lambda: _pods(cluster, "coordinator"), wait_s=PATIENT_S)
    return _pods(cluster, "coordinator")[-1]


def _pods(cluster: KubernetesServer, name: str) -> list[Pod]:
    return [each for each in cluster.pods() if name in each.name]


def _facts(cluster: KubernetesServer, pod: Pod) -> dict[str, str]:
    """Return what a coordinator said of itself, once it did."""

    def said() -> list[bytes]:
        return [it for it in (pod.log() or b"").splitlines() if it.startswith(b"{")]

    until(cluster, said, wait_s=PATIENT_S)
    facts: dict[str, str] = json.loads(said()[0])
    return facts


def _assert_trained(said: str) -> None:
    """Assert that all have finished, and that islands ended on one model."""
    rows = [line.split() for line in said.splitlines()]
    head = max(i for i, row in enumerate(rows) if row[:2] == ["island", "state"])
    states = {row[0]: row[1] for row in rows[head + 1 :] if len(row) > 1}
    assert states == dict.fromkeys(("reef-0", "reef-1", "coordinator-0"), "finished")
    told = [line.split() for line in said.splitlines() if " | reef-" in line]
    assert len(told) == 2
    assert len({line[-1] for line in told}) == 1


def _states(said: str) -> dict[str, str]:
    """Return what `atoll ps --json` says."""
    return {
        island["name"]: island["state"]
        for each in json.loads(said)
        for island in each["islands"]
    }
