"""From an invitation to the first round with the README's commands, across a link."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from atoll.testing import Link, Namespace, linked_namespaces, namespaces_unavailable
from tests.cli.runs import CODE, environment
from tests.e2e.stage import ROOT, until

README = (ROOT / "README.md").read_text()
SERVE, JOIN, STATUS, *_ = re.findall(r"^    atoll (.*)$", README, re.MULTILINE)
LISTEN, INVITE = "--listen 0.0.0.0", "invite demo-run"
SCRIPT = JOIN.partition(" -- ")[2]
RATE_BYTES_PER_S, DELAY_S = 100e6 / 8, 0.04
PATIENT_S = 240.0
"""Two programs import torch and compile kernels; the machine may be busy."""

pytestmark = [pytest.mark.torch, pytest.mark.timeout(2 * PATIENT_S)]


class Machine:
    """Where somebody types: a folder with the examples, and a user of its own."""

    def __init__(self, folder: Path, within: Namespace | None = None) -> None:
        self._folder, self._within = folder, within
        shutil.copytree(ROOT / "examples", folder / "examples")

    def started(self, line: str) -> subprocess.Popen[str]:
        """Start what somebody types after `atoll`."""
        words = [sys.executable, "-c", CODE, *shlex.split(line)]
        options: dict[str, Any] = {
            "cwd": self._folder,
            "env": environment(self._folder / "home"),
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
        }
        if self._within is not None:
            return self._within.popen(words, **options)
        return subprocess.Popen(words, **options)

    def say(self, line: str) -> str:
        """Run what somebody types after `atoll`, and return what it prints."""
        return said(self.started(line))

    def has_round(self) -> bool:
        """Return whether the run that is served here has come to its first round."""
        events = self._folder / "demo-run.atoll" / "events.jsonl"
        return '"round_committed"' in events.read_text()

    @contextmanager
    def running(self, line: str) -> Iterator[subprocess.Popen[str]]:
        """Run a command while the block lasts, if it does not end before."""
        process = self.started(line)
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    """Return what a process printed, once it has ended well."""
    out, err = process.communicate(timeout=PATIENT_S)
    assert process.returncode == 0, err
    return out


@contextmanager
def serving(here: Machine, line: str) -> Iterator[int]:
    """Serve the run while the block lasts; yield the port."""
    with here.running(line) as coordinator:
        assert coordinator.stdout is not None
        for told in coordinator.stdout:
            if told.startswith("url "):
                port = int(told.rpartition(":")[2])
            if told.startswith("invite "):
                break
        yield port
        coordinator.terminate()
        said(coordinator)


def train(here: Machine, there: Machine, invite: str) -> None:
    """Invite the other machine, and train on both to the end of the run."""
    begun_s = time.monotonic()
    paste = here.say(invite).removeprefix("atoll ").replace("COMMAND", SCRIPT)
    with ExitStack() as stack:
        islands = [
            stack.enter_context(machine.running(line))
            for machine, line in ((here, JOIN), (there, paste))
        ]
        until("the first round", here.has_round, within_s=PATIENT_S)
        took_s = time.monotonic() - begun_s
        ends = [said(island).split(": ")[1] for island in islands]
    sys.stdout.write(f"invite to the first round: {took_s:.1f} s\n")

    assert ends[0] == ends[1]
    assert ends[0].startswith("round 40, digest ")
    assert "ended" in here.say(STATUS)


def test_the_readme_is_what_this_page_reads() -> None:
    """Its commands are these three; what another machine needs is said below them."""
    assert SERVE == "serve examples/run.toml"
    assert (JOIN, STATUS) == ("join demo-run -- examples/island.py", "status demo-run")
    assert f"`atoll {INVITE}`" in README
    assert f"`{LISTEN}`" in README


@pytest.mark.network
@pytest.mark.skipif(
    namespaces_unavailable() is not None and os.environ.get("CI") != "true",
    reason=str(namespaces_unavailable()),
)
def test_another_machine_joins_by_the_readme_alone(tmp_path: Path) -> None:
    """Two namespaces and 100 Mbit/s of the kernel's TCP; nothing but those commands."""
    with linked_namespaces(rate_mbit=100) as (left, right):
        here, there = (
            Machine(tmp_path / "here", left),
            Machine(tmp_path / "there", right),
        )
        with serving(here, f"{SERVE} {LISTEN}"):
            train(here, there, INVITE)


def test_an_invitation_leads_across_a_slow_link(tmp_path: Path) -> None:
    """100 Mbit/s and 40 ms, without root: the invitation has the link's address."""
    here, there = Machine(tmp_path / "here"), Machine(tmp_path / "there")
    with (
        serving(here, SERVE) as port,
        Link(
            ("127.0.0.1", port), rate_bytes_per_s=RATE_BYTES_PER_S, delay_s=DELAY_S
        ) as link,
    ):
        train(here, there, f"{INVITE} --address 127.0.0.1:{link.address[1]}")
        assert link.bytes_up > 0
