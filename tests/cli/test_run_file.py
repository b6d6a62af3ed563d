"""What a run file must not say, though each of its values is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.cli.run_file import settings_of
from atoll.errors import SettingsError


def test_a_decay_after_the_end_is_refused(tmp_path: Path) -> None:
    """No step would decay; one that begins with the last round may be."""
    file = tmp_path / "run.toml"
    file.write_text("[run]\nend_rounds = 300\ndecay_round = 301\n")
    with pytest.raises(
        SettingsError, match=r"=301 is beyond run\.end_rounds=300, .* 300"
    ):
        settings_of(file, None)

    assert settings_of(file, ["run.decay_round=300"]).run.decay_round == 300
