"""Findings of a real run: what goes wrong is found while it does."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from atoll.cli.serve import serve_run
from atoll.coordinator.app import ListenOptions
from atoll.errors import LeaseLost, Refused
from atoll.island import join_run
from atoll.run_client import Action, Command, RunClient, open_run
from atoll.telemetry import Counters, Event, render
from atoll.testing import VectorView
from tests.cli import stores

PATIENT_S = 90.0
SLOW_STEP_S = 0.05


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """Give the URL of a run that needs two islands."""
    settings = stores.settings(end_rounds=5000, quorum=2)
    run = serve_run(
        directory, settings, ListenOptions(), init=None, has_tensorboard=False
    )
    with run as serving:
        yield serving.url


class Trained:
    """Two islands: b is slow, so that a waits for it, and diverges when it is told."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.diverges = threading.Event()
        self._threads = [
            threading.Thread(target=self._train, args=(name,)) for name in "ab"
        ]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Return when both have left."""
        for thread in self._threads:
            thread.join(PATIENT_S)
            assert not thread.is_alive()

    def _train(self, name: str) -> None:
        view, is_slow = VectorView(), name == "b"
        host = join_run(self._url, view, stores.MODEL, island=name)
        with suppress(Refused, LeaseLost):  # refused too often, or evicted
            while not host.has_ended:
                is_bad = is_slow and self.diverges.is_set()
                time.sleep(SLOW_STEP_S if is_slow else 0.0)
                for local in view.local:
                    local -= np.float32(math.nan if is_bad else 1e-3)
                loss = math.nan if is_bad else 1.5
                host.counters.note_report(7, loss, {}, count="a number")
                host.count_tokens(7)
                host.stepped()
            host.leave()


def until_found(client: RunClient, *kinds: str) -> dict[str, str]:
    """Return the sentences of findings by kind, once these were all found."""
    found: dict[str, str] = {}
    gives_up_s = time.monotonic() + PATIENT_S
    while not set(kinds) <= found.keys():
        assert time.monotonic() < gives_up_s, (kinds, found)
        document = client.status().document
        found |= {row["kind"]: row["message"] for row in document["findings"]}
        time.sleep(0.05)
    return found


def until_reported(client: RunClient, kind: str) -> Event:
    """Return the event of a finding, once there is one."""
    gives_up_s = time.monotonic() + PATIENT_S
    while time.monotonic() < gives_up_s:
        for event in client.older_events(kind="finding_began").events:
            if event.fields["kind"] == kind:
                return event
        time.sleep(0.1)
    raise AssertionError(kind)


@pytest.mark.filterwarnings("ignore::atoll.errors.AtollWarning")  # of the refusal
def test_what_goes_wrong_in_a_run_is_found(tmp_path: Path, user: None) -> None:
    """Dear waiting, a diverged island, its refusal, the lost quorum and a restart."""
    with served(tmp_path / "run") as url, closing(open_run(url)) as client:
        islands = Trained(url)
        until_found(client, "waiting_dear")
        islands.diverges.set()
        diverged = until_found(client, "loss_not_finite", "refused")
        client.control(Command(Action.EVICT, island="b"))
        lost = until_found(client, "quorum_lost")
        page = render(client.status().document, Counters({}, {}))
        began = until_reported(client, "quorum_lost")
        client.control(Command(Action.SET, {"run.quorum": 1}))
        client.control(Command(Action.STOP))
        islands.wait()
    with served(tmp_path / "run") as url, closing(open_run(url)) as client:
        restarted = until_found(client, "restarted")

    assert diverged["loss_not_finite"] == "The loss of b is not a number."
    assert diverged["refused"].startswith("b was refused:")
    assert lost["quorum_lost"].startswith("1 islands are live, below quorum=2.")
    assert began.fields["message"] == lost["quorum_lost"]
    assert "set run.quorum=1" in str(began.fields["command"])
    assert 'atoll_findings{severity="bad"}' in page
    assert restarted["restarted"].startswith("The coordinator started")
