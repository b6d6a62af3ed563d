"""A run that an operator stops before any update has ended, and says so."""

from __future__ import annotations

from pathlib import Path

from atoll.coordinator.app import Coordinator
from atoll.protocol.events import StopRequested
from atoll.testing.fixtures import plain_settings
from tests.coordinator.serving import serving


def said(coordinator: Coordinator) -> tuple[str, str]:
    status = coordinator.status()
    return status["state"], status["why"]


def test_a_run_that_was_stopped_before_any_update_says_so(tmp_path: Path) -> None:
    """Also after a restart; nobody is waited for."""
    ended = ("ended", "Stopped by an operator before any update.")
    with serving(tmp_path / "run", plain_settings(end_rounds=3)) as coordinator:
        assert said(coordinator)[0] == "founding"
        coordinator._threaded_service.change(StopRequested())
        assert said(coordinator) == ended
    with serving(tmp_path / "run", None) as coordinator:
        assert said(coordinator) == ended
