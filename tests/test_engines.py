"""A test that needs somebody else's program says how to get it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import engines
from tests.engines import engine


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that has nothing installed."""
    monkeypatch.setattr(engines, "PLACES", (tmp_path,))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CI", raising=False)
    return tmp_path


def _program(place: Path) -> Path:
    place.write_text("#!/bin/sh\n")
    place.chmod(0o755)
    return place


@pytest.mark.usefixtures("bare")
def test_a_test_without_its_program_is_skipped_by_name() -> None:
    """The command that installs it is in the reason."""
    with pytest.raises(pytest.skip.Exception, match=r"weed is not .* make engines"):
        engine("weed")


@pytest.mark.usefixtures("bare")
def test_what_the_machine_lacks_is_named_before_the_command() -> None:
    """Without node and npm, `make engines` cannot help."""
    with pytest.raises(pytest.skip.Exception, match="node and npm, then: make engines"):
        engine("azurite-blob", needs=["node", "npm"])


def test_a_program_that_cannot_run_counts_as_absent(bare: Path) -> None:
    """It may have been installed before node was removed."""
    _program(bare / "azurite-blob")
    with pytest.raises(pytest.skip.Exception, match="install node, then"):
        engine("azurite-blob", needs=["node"])


@pytest.mark.usefixtures("bare")
def test_nothing_is_skipped_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where everything must run, an absent program is a failure."""
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="make engines"):
        engine("rclone")


def test_a_program_that_is_there_is_found(bare: Path) -> None:
    """With all that it needs."""
    weed, _ = _program(bare / "weed"), _program(bare / "node")
    assert engine("weed", needs=["node"]) == weed
