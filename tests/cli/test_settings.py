"""`atoll status RUN --settings` prints every value, and the changes of a run."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from atoll.run_client import Action, Command, open_run
from tests.cli.runs import run
from tests.run_client.conftest import served, user

__all__ = ["user"]


def test_settings_of_a_run_are_printed(
    tmp_path: Path, user: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values that differ come first, and an epoch has its number, time and values."""
    with served(tmp_path / "run") as url:
        with closing(open_run(url)) as client:
            client.control(Command(Action.SET, {"outer.lr": 0.5}))
        _, text, _ = run(capsys, "status", url, "--settings")
        _, reply, _ = run(capsys, "status", url, "--settings", "--json")
        document, text_after = json.loads(reply), text.splitlines()

    assert document["settings"]["outer.lr"] == 0.5
    assert document["defaults"]["outer.lr"] == 0.7
    assert document["settings"]["run.end_tokens"] is None
    assert document["settings"]["wire.up"] == "bf16"
    assert "275 GB" in text
    assert "outer.lr" in document["not_default"]
    assert "wire.up" not in document["not_default"]
    assert document["changes"]["outer.lr"] == "from each fragment's next round"
    assert text_after[0].split() == ["setting", "value", "default", "changes"]
    lines = [line.split()[:3] for line in text_after]
    assert ["outer.lr", "0.5", "0.7"] in lines
    assert [line for line in text_after if line.startswith("epoch 1 at ")]
    (epoch,) = document["epochs"]
    assert (epoch["epoch"], epoch["values"]) == (1, {"outer.lr": 0.5})
