"""What a coordinator begins with where no file of the user's is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from atoll.coordinator.app import Coordinator
from atoll.errors import CorruptError, UsageError
from atoll.launch.bootstrap import bootstrap_argv
from atoll.launch.credentials import (
    MAX_CHARTER_BYTES,
    CoordinatorFiles,
    make_coordinator_files,
)
from atoll.launch.spec import CHARTER, IslandSpec
from atoll.security import run_tokens
from atoll.settings import RunSettings

RUN_FILE = '[run]\nname = "reef"\n'
TELL = """
import os, pathlib
for name in ("cmdline", "environ"):
    print(pathlib.Path(f"/proc/self/{name}").read_bytes())
print(sorted(path.name for path in pathlib.Path().iterdir()))
print(os.environ["ATOLL_RUN"])
"""


def test_a_coordinator_finds_what_it_would_have_made(tmp_path: Path) -> None:
    """It shows the certificate that islands were told to pin, and takes their token."""
    charter = make_coordinator_files("reef", RUN_FILE)
    directory = charter.lay_down(tmp_path / "reef")
    settings = RunSettings.from_toml(directory / "run.toml")
    coordinator = Coordinator(directory, settings)
    try:
        assert coordinator.pin == charter.pin
        assert run_tokens(directory) == charter.tokens
    finally:
        coordinator.close()


def test_a_later_life_lays_down_the_same(tmp_path: Path) -> None:
    """What travelled is what was made, in place of whatever was there."""
    charter = make_coordinator_files("reef", RUN_FILE)
    read = CoordinatorFiles.from_json(charter.to_secret().reveal())
    directory = make_coordinator_files("reef", "").lay_down(tmp_path / "reef")
    read.lay_down(directory)

    assert read == charter
    assert run_tokens(directory) == charter.tokens
    assert (directory / "run.toml").read_text() == RUN_FILE
    assert {path.stat().st_mode & 0o077 for path in directory.iterdir()} == {0}


def test_each_run_has_a_directory_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where none is chosen, two coordinators of one run file do not meet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    one, two = (make_coordinator_files("reef", RUN_FILE).lay_down() for _ in range(2))

    assert one.parent == two.parent == tmp_path / "atoll" / "served"
    assert one != two


def _without(key: str) -> str:
    form = json.loads(make_coordinator_files("reef", RUN_FILE).to_secret().reveal())
    del form[key]
    return json.dumps(form)


def _with(**changes: object) -> str:
    form = json.loads(make_coordinator_files("reef", RUN_FILE).to_secret().reveal())
    return json.dumps(form | changes)


@pytest.mark.parametrize(
    "said",
    [
        "",
        "[]",
        "[" * 100_000,
        _without("tokens"),
        _with(version=2),
        _with(id="../reef"),
        _with(key=None),
        _with(tokens={"island": "hush", "operator": "hush"}),
        _with(run_file="hush" * MAX_CHARTER_BYTES),
    ],
)
def test_what_is_no_charter_is_refused(said: str) -> None:
    """Without a word of it."""
    with pytest.raises(CorruptError, match="no valid charter of a coordinator") as told:
        CoordinatorFiles.from_json(said)

    assert "hush" not in str(told.value)


def test_a_run_file_that_cannot_travel_is_refused() -> None:
    """Before anything is submitted."""
    charter = make_coordinator_files("reef", "#" * MAX_CHARTER_BYTES)

    with pytest.raises(UsageError, match="Shorten it"):
        charter.to_secret()


def test_it_is_shown_to_nobody() -> None:
    """Neither by itself, nor by its parts."""
    charter = make_coordinator_files("reef", RUN_FILE)

    assert "atoll_" not in repr(charter)
    assert "PRIVATE" not in repr(charter)


def test_who_serves_has_it_in_files_alone(tmp_path: Path) -> None:
    """The command starts in the run's directory, and its environment has no secret."""
    charter = make_coordinator_files("reef", RUN_FILE)
    place = tmp_path / "served"
    command = ("python", "-c", TELL)
    spec = IslandSpec(
        command=command, run="reef", name="coordinator", directory=str(place)
    )
    out = _started(spec, tmp_path, {CHARTER: charter.to_secret().reveal()})

    assert re.search(r"'certificate.pem', .*'run.toml'", out)
    for secret in (charter.key, *charter.tokens.values()):
        assert secret.reveal() not in out
    assert CHARTER not in out


def test_what_begins_a_name_in_its_place_is_put_before_it(tmp_path: Path) -> None:
    """A run is known to its islands by the URL that leads there from them."""
    spec = IslandSpec(command=("python", "-c", TELL), run="https://reef:4711", name="a")
    told = _started(spec, tmp_path, {"PREFIX": "net-1-"}, prefix_from="PREFIX")
    refused = _started(spec, tmp_path, {}, prefix_from="PREFIX")

    assert "https://net-1-reef:4711\n" in told
    assert "PREFIX is not set" in refused


def _started(
    spec: IslandSpec,
    home: Path,
    around: Mapping[str, str],
    *,
    prefix_from: str | None = None,
) -> str:
    """Return what a bootstrap and its command say."""
    words = bootstrap_argv(
        spec, index=0, python=sys.executable, prefix_from=prefix_from
    )
    done = subprocess.run(
        words,
        env={**os.environ, "XDG_CONFIG_HOME": str(home), **around},
        capture_output=True,
        text=True,
        timeout=60.0,
    )
    return f"{done.stdout}{done.stderr}"
