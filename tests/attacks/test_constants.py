"""A constant whose file changed on the disk of a coordinator is not handed out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.runs import as_user, run
from tests.cli.test_constants import served, train
from tests.exchange.constant_samples import Held


def test_a_damaged_constant_is_not_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The export fails with the name of the file, and the status has it, too."""
    as_user(monkeypatch, tmp_path / "home")
    with served(tmp_path / "run") as coordinator:
        train(coordinator.url, held=Held())
    file = sorted((tmp_path / "run" / "journal" / "constants").iterdir())[0]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)

    with served(tmp_path / "run", None) as coordinator:
        out = tmp_path / "out.safetensors"
        code, _, complaints = run(capsys, "export", coordinator.url, out)
        status = coordinator.status()

    place = f"constants/{file.name} is damaged"
    assert (code, place in complaints) == (5, True), complaints
    assert not out.exists()
    assert [place in line for line in status["damage"]] == [True]
