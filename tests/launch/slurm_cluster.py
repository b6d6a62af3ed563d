"""A Slurm of several nodes on this machine, with files and a key of its own."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.engines import free_ports, running

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
NODES = ("n1", "n2", "n3")
STARTS_S = 60.0
_CONF = """\
ClusterName=atoll
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool-%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd-%n.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd-%n.log
SlurmdParameters=config_overrides
SlurmdTimeout=10
KillWait=10
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass
class Cluster:
    """Where it is, and the daemons of its nodes."""

    home: Path
    nodes: dict[str, ExitStack] = field(default_factory=dict)

    @property
    def conf(self) -> Path:
        return self.home / "slurm.conf"

    def tell(self, *words: str) -> str:
        """Return what a program of Slurm answers."""
        around = {**os.environ, "SLURM_CONF": str(self.conf)}
        done = subprocess.run(
            words, env=around, capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout

    def kill_node(self, node: str) -> None:
        """Kill a node's daemon and all that runs on it, as a power cut does."""
        for pid in _of_node(self.home, node):
            with_children = [pid, *_descendants(pid)]
            for each in with_children:
                try:
                    os.kill(each, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        self.nodes.pop(node).close()

    def start_node(self, node: str) -> None:
        """Start a node's daemon."""
        stack = self.nodes[node] = ExitStack()
        words = ["slurmd", "-D", "-N", node, "-f", self.conf]
        stack.enter_context(
            running(words, home=self.home / node, is_ready=lambda: True)
        )

    def states(self) -> dict[str, str]:
        """Return each node's state, in Slurm's word."""
        said = self.tell("sinfo", "--noheader", "--Node", "--format=%N %T")
        return dict(line.split() for line in said.splitlines())


@contextmanager
def slurm_cluster(home: Path) -> Iterator[Cluster]:
    """Run a controller and three nodes while the block lasts."""
    _require_programs()
    ports = free_ports(1 + len(NODES))
    _write(home, ports)
    cluster = Cluster(home)
    with ExitStack() as daemons:
        key, socket_ = home / "munge.key", home / "munge.socket"
        munged = ["munged", "--foreground", "--force", f"--key-file={key}"]
        munged += [f"--{name}-file={home}/munge.{name}" for name in ("pid", "seed")]
        munged += [f"--socket={socket_}", f"--log-file={home}/munge.log"]
        daemons.enter_context(
            running(munged, home=home / "munge", is_ready=socket_.exists)
        )
        controller = ["slurmctld", "-D", "-i", "-f", cluster.conf]
        daemons.enter_context(
            running(
                controller, home=home / "controller", is_ready=lambda: _is_up(cluster)
            )
        )
        for node in NODES:
            cluster.start_node(node)
        _until_idle(cluster)
        try:
            yield cluster
        finally:
            # Steps of jobs have sessions of their own, and would outlive their node.
            for node in [*cluster.nodes]:
                cluster.kill_node(node)


def _require_programs() -> None:
    absent = [each for each in PROGRAMS if shutil.which(each) is None]
    if not absent and os.geteuid() == 0:
        return
    if absent:
        said = f"{absent[0]} is not installed. Try: make engines"
    else:
        said = "Slurm's daemons here need root. Try: sudo make test"
    if os.environ.get("CI") == "true":
        pytest.fail(said)
    pytest.skip(said)


def _write(home: Path, ports: Sequence[int]) -> None:
    # Munge refuses a directory that others may write, or not look into.
    home.mkdir(mode=0o755, parents=True)
    (home / "state").mkdir()
    (home / "munge.key").write_bytes(secrets.token_bytes(1024))
    (home / "munge.key").chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    conf = _CONF.format(home=home, host=host, port=ports[0])
    for node, port in zip(NODES, ports[1:], strict=True):
        (home / f"spool-{node}").mkdir()
        conf += f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
        conf += "CPUs=4 State=UNKNOWN\n"
    (home / "slurm.conf").write_text(conf)


def _is_up(cluster: Cluster) -> bool:
    try:
        return "UP" in cluster.tell("scontrol", "ping")
    except subprocess.CalledProcessError:
        return False


def _until_idle(cluster: Cluster) -> None:
    until_s = time.monotonic() + STARTS_S
    while set(cluster.states().values()) != {"idle"}:
        assert time.monotonic() < until_s, cluster.states()
        time.sleep(0.1)


def _of_node(home: Path, node: str) -> list[int]:
    """Return the daemon of a node and those of its steps: all write its log."""
    log = str(home / f"slurmd-{node}.log")
    found = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return [pid for pid in found if _has_open(pid, log)]


def _has_open(pid: int, file: str) -> bool:
    try:
        return any(
            os.readlink(each) == file for each in Path(f"/proc/{pid}/fd").iterdir()
        )
    except OSError:
        return False


def _descendants(pid: int) -> list[int]:
    children = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/stat")
        if _parent(path) == pid
    ]
    return [each for child in children for each in (child, *_descendants(child))]


def _parent(stat: Path) -> int:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1
