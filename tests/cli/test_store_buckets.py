"""A run by its commands only, in a real S3, and in one that puts over what is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.cli.runs import ISLAND, RUN_FILE, atoll, ended, started
from tests.cli.stores import SHAPES
from tests.store.buckets import BUCKET, Settings, as_without


def come(patch: pytest.MonkeyPatch, where: Settings) -> None:
    """Set what people set in their environment to reach a bucket."""
    patch.setenv("AWS_ENDPOINT_URL", where["endpoint"])
    patch.setenv("AWS_ACCESS_KEY_ID", where["access_key_id"])
    patch.setenv("AWS_SECRET_ACCESS_KEY", where["secret_access_key"])
    patch.setenv("AWS_REGION", where["region"])


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(RUN_FILE)
    (tmp_path / "train.py").write_text(ISLAND)
    return tmp_path


def test_a_run_in_a_bucket_by_its_commands_only(
    s3: Settings, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Init, join twice, look, export: the same digests, and no coordinator."""
    url, home = f"s3://{BUCKET}/lagoon", place / "home"
    come(monkeypatch, s3)
    code, out, err = atoll("init", url, place / "run.toml", home=home)
    assert (code, err) == (0, "")
    assert f"join  atoll join {url} -- COMMAND" in out
    script = place / "train.py"
    islands = [
        started("join", url, "--island", name, "--", script, home=home)
        for name in ("far", "near")
    ]
    said = {}
    for code, out, err in map(ended, islands):
        assert code == 0, err
        said.update(dict([out.split()]))
    assert said.keys() == {"near", "far"}
    assert len(set(said.values())) == 1

    code, page, err = atoll("status", "lagoon", home=home)
    assert (code, err) == (0, "")
    assert page.startswith("lagoon  ended  round 4 of 4")
    out_file = place / "w.safetensors"
    assert atoll("export", url, out_file, home=home)[0] == 0
    assert {name: each.shape for name, each in load_file(out_file).items()} == SHAPES
    assert atoll("doctor", url, home=home)[0] == 0


@pytest.mark.parametrize(
    ("permission", "step"),
    [
        ("ListBucket", "list"),
        ("PutObject", "write"),
        ("GetObject", "read"),
        ("DeleteObject", "delete"),
    ],
)
def test_a_doctor_names_the_permission_that_is_missing(
    permission: str,
    step: str,
    s3: Settings,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step that fails is the one that needs it, with exit code 4."""
    come(monkeypatch, s3 | as_without(permission))
    url = f"s3://{BUCKET}/without-{permission.lower()}"
    code, out, _ = atoll("doctor", url, "--json", home=place / "home")
    *_, last = json.loads(out)

    assert (code, last["step"], last["ok"]) == (4, step, False)


def test_who_may_only_read_can_look(
    s3: Settings, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status asks for no permission to write; control and joining do."""
    url, home = f"s3://{BUCKET}/looked-at", place / "home"
    come(monkeypatch, s3)
    assert atoll("init", url, place / "run.toml", home=home)[0] == 0
    come(monkeypatch, s3 | as_without("PutObject"))
    code, out, err = atoll("status", url, "--json", home=home)
    assert (code, err, json.loads(out)["state"]) == (0, "", "founding")

    for words in (("control", url, "pause"), ("join", url, "--", "true")):
        code, _, err = atoll(*words, home=home)
        assert code == 4
        assert "put" in err


def test_a_bucket_that_puts_over_wants_a_decider(
    weak: Settings, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused without, with the option to type; the doctor says why."""
    url, home = f"s3://{BUCKET}/weak", place / "home"
    come(monkeypatch, weak)
    code, _, err = atoll("init", url, place / "run.toml", home=home)
    assert code == 2
    assert "--set store.decider=NAME" in err

    decider = ("--set", 'store.decider="near"')
    code, _, err = atoll("init", url, place / "run.toml", *decider, home=home)
    assert (code, err) == (0, "")
    code, out, _ = atoll("doctor", url, home=home)
    assert code == 0
    assert "a second object replaces the first" in out
