"""Islands across links that are slow and far, that are cut, and that come back."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import pytest

from atoll.testing import Link, linked_namespaces, namespaces_unavailable
from tests.e2e.rounds_again import ended_well
from tests.e2e.stage import Stage, settings_for, until

RATE_BYTES_PER_S, DELAY_S = 100e6 / 8, 0.04
PORT = 7443


def test_a_partition_longer_than_the_lease_ends_well(stage: Stage) -> None:
    """At 100 Mbit/s and 40 ms: a goes on alone, and b's work counts when it is back."""
    stage.settings, stage.has_tls = settings_for(2, 1000), True
    stage.serve()
    target = ("127.0.0.1", stage.port)
    link_to = partial(Link, rate_bytes_per_s=RATE_BYTES_PER_S, delay_s=DELAY_S)
    with link_to(target) as near, link_to(target) as far:
        for name, link in {"a": near, "b": far}.items():
            url = stage.url_at(link.address)
            stage.island(name, url=url, elements=10_000, step_s=0.1)
        stage.until_committed(2)
        far.cut()
        cut_s = time.monotonic()
        stage.until_event("island_silent", island="b")
        last = stage.committed()
        until("a commits alone", lambda: stage.committed() > last)
        silent_s = time.monotonic() - cut_s
        far.mend()
        stage.until_event("island_returned", island="b")
        stage.until_committed(stage.committed() + 2)
        stage.ask("POST", "/control/stop", {})
        ended_well(stage)

    stage.tell(f"cut to the other's next commit: {silent_s:.1f} s")
    assert stage.events("round_committed", counted=1)
    assert stage.events("island_joined", incarnation=2) == []


@pytest.mark.network
@pytest.mark.skipif(
    namespaces_unavailable() is not None and os.environ.get("CI") != "true",
    reason=str(namespaces_unavailable()),
)
def test_a_run_across_two_namespaces(tmp_path: Path) -> None:
    """The coordinator has TLS, an address of its own and 100 Mbit/s of kernel TCP.

    An update is 2 MB, so that one takes 160 ms at that rate.
    """
    with linked_namespaces(rate_mbit=100) as (left, right):
        stage = Stage(
            tmp_path,
            settings_for(2, 5),
            host=left.address,
            has_tls=True,
            within=left,
            port=PORT,
        )
        try:
            stage.serve()
            for name in "ab":
                stage.island(name, within=right, elements=500_000, step_s=0.02)
            ended_well(stage)
        finally:
            stage.close()

    assert len(stage.events("round_committed", counted=2)) == 10
