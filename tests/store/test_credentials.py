"""Credentials come from the sources of each cloud's own tools."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from atoll.errors import StoreDenied, UsageError
from atoll.store import open_store, probe
from atoll.store.obstore import credentials_of, explained
from tests.store.buckets import ACCOUNT, ACCOUNT_KEY, BUCKET, KEY, SECRET, Settings


@pytest.fixture
def aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user who has nothing of AWS but what a test writes to this directory."""
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "PROFILE"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    for name in ("REGION", "DEFAULT_REGION", "ENDPOINT", "ENDPOINT_URL"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "settings"))
    return tmp_path


def test_the_environment_serves(
    s3: Settings, aws: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and endpoint in the variables that every tool of AWS reads."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3["endpoint"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    assert probe(open_store(f"s3://{BUCKET}/by-environment")).has_put_new


@pytest.mark.parametrize("name", ["default", "reef"])
def test_a_profile_serves(
    s3: Settings, aws: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its keys from one file, its endpoint from the other, with boto3 and without."""
    (aws / "credentials").write_text(
        f"[{name}]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
    )
    section = name if name == "default" else f"profile {name}"
    (aws / "settings").write_text(
        f"[{section}]\nendpoint_url = {s3['endpoint']}\nregion = us-east-1\n"
    )
    if name != "default":
        monkeypatch.setenv("AWS_PROFILE", name)
    assert probe(open_store(f"s3://{BUCKET}/by-profile-{name}")).has_put_new


def test_a_profile_that_takes_a_role_is_left_to_boto3(aws: Path) -> None:
    """Its endpoint is taken all the same."""
    pytest.importorskip("boto3")
    (aws / "credentials").write_text(
        f"[base]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
    )
    (aws / "settings").write_text(
        "[default]\nrole_arn = arn:aws:iam::123456789012:role/reef\n"
        "source_profile = base\nendpoint_url = http://127.0.0.1:9\n"
    )
    said = credentials_of("s3://bucket")

    assert type(said["credential_provider"]).__name__ == "Boto3CredentialProvider"
    assert said["endpoint"] == "http://127.0.0.1:9"


def test_a_profile_is_read_again(aws: Path) -> None:
    """Whoever renews a token while a run lasts renews it for the run."""
    keys = "[default]\naws_access_key_id = {}\naws_secret_access_key = s\n"
    (aws / "credentials").write_text(keys.format("first"))
    provider = credentials_of("s3://bucket")["credential_provider"]
    assert provider()["access_key_id"] == "first"
    (aws / "credentials").write_text(keys.format("second"))
    assert provider()["access_key_id"] == "second"


@pytest.mark.parametrize(
    ("text", "profile", "said"),
    [
        ("[default]\n", "absent", r"AWS_PROFILE=absent is not in .*credentials"),
        ("[default]\nsso_session = x\n", None, r"default of AWS signs in.*boto3"),
        ("no section\n", None, r"credentials cannot be read.* Correct it"),
    ],
)
def test_a_profile_that_cannot_serve_says_why(
    aws: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    profile: str | None,
    said: str,
) -> None:
    """Before anything is asked of anybody."""
    monkeypatch.setitem(sys.modules, "obstore.auth.boto3", None)
    (aws / "credentials").write_text(text)
    if profile:
        monkeypatch.setenv("AWS_PROFILE", profile)
    with pytest.raises(UsageError, match=said):
        open_store("s3://bucket/run")


def test_azure_is_found_in_the_environment(
    azure: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The account, its key and the endpoint."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", ACCOUNT_KEY)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", azure["endpoint"])
    assert probe(open_store(f"az://{BUCKET}/by-environment")).has_put_new


def test_a_clock_that_is_off_is_named() -> None:
    """S3 refuses requests that are signed a quarter of an hour ago."""
    answer = OSError("<Code>RequestTimeTooSkewed</Code><Message>Too far.</Message>")
    told = explained(answer, "put", "key", store="s3://bucket/run")
    assert isinstance(told, StoreDenied)
    assert "clock of this machine is too far off. Set it" in str(told)


def test_who_has_no_credentials_at_all_is_told() -> None:
    """The library asks the machine itself, which is somebody's laptop."""
    answer = OSError("Error performing PUT http://169.254.169.254/latest/api/token")
    told = explained(answer, "put", "key", store="s3://bucket/run")
    assert "No credentials were found" in str(told)
