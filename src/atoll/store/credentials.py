"""Credentials from where each cloud's own tools look for them.

`obstore` reads the environment, the files that it names, Google's application default
credentials, and asks the machine itself where the cloud runs it. What is left is here:
profiles of AWS, and whoever signs in with the cloud's own library or command.

This is the store's one file that reads the environment.
"""

from __future__ import annotations

import configparser
import os
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from atoll.errors import UsageError

READ_AGAIN = timedelta(minutes=10)
"""A file of profiles may be renewed while a run lasts, and is read so often."""

_IN_S3 = ("AWS_ACCESS_KEY_ID",)
_IN_AZURE = (
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_ACCESS_KEY",
    "AZURE_STORAGE_MASTER_KEY",
    "AZURE_STORAGE_SAS_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_STORAGE_TOKEN",
    "AZURE_STORAGE_CLIENT_ID",
    "AZURE_CLIENT_ID",
)
_IN_GOOGLE = ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_KEY")
_KEY, _ROLE = "aws_access_key_id", "role_arn"
_SIGNED_IN = ("sso_session", "sso_start_url", _ROLE, "credential_process")


def credentials_of(url: str) -> dict[str, Any]:
    """Return what `obstore` must be told to reach `url`, beyond what it finds itself.

    Raises:
        UsageError: a profile is named that is not there, or that needs another package.
    """
    scheme = url.partition("://")[0].lower()
    if scheme in ("s3", "s3a"):
        return _of_aws()
    if scheme == "gs":
        return {} if _has(_IN_GOOGLE) else _provided(_google)
    if _has(_IN_AZURE):
        return {}
    return _provided(_azure) or ({"use_azure_cli": True} if shutil.which("az") else {})


def _of_aws() -> dict[str, Any]:
    """Return what a profile says; boto3 serves those that have no keys of their own."""
    if _has(_IN_S3):
        return {}
    name = os.environ.get("AWS_PROFILE")
    found = _profile(name or "default")
    if name and not found:
        raise UsageError(
            f"AWS_PROFILE={name} is not in {' or '.join(map(str, _files()))}. "
            "Add it, or unset AWS_PROFILE."
        )
    said = _place_of(found)
    if _KEY in found and _ROLE not in found:
        return said | {"credential_provider": _ProfileFile(name or "default")}
    provided = _provided(_boto3)
    if not provided and any(word in found for word in _SIGNED_IN):
        raise UsageError(
            f"The profile {name or 'default'} of AWS signs in, which needs boto3. "
            "Try: pip install boto3"
        )
    return said | provided


def _place_of(found: dict[str, str]) -> dict[str, Any]:
    """Return where a profile's buckets are, unless the environment says so."""
    said: dict[str, Any] = {}
    if "region" in found and not _has(("AWS_REGION", "AWS_DEFAULT_REGION")):
        said["region"] = found["region"]
    if "endpoint_url" in found and not _has(("AWS_ENDPOINT_URL", "AWS_ENDPOINT")):
        said["endpoint"] = found["endpoint_url"]
    return said


class _ProfileFile:
    """Gives the credentials of a profile, as its file has them now."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self) -> dict[str, Any]:
        found = _profile(self._name)
        return {
            "access_key_id": found.get(_KEY, ""),
            "secret_access_key": found.get("aws_secret_access_key", ""),
            "token": found.get("aws_session_token"),
            "expires_at": datetime.now(UTC) + READ_AGAIN,
        }


def _profile(name: str) -> dict[str, str]:
    """Return all that the two files say of a profile; the credentials have the word."""
    shared, settings = _files()
    said: dict[str, str] = {}
    for file, section in (
        (settings, f"profile {name}"),
        (settings, name),
        (shared, name),
    ):
        read = configparser.RawConfigParser()
        try:
            read.read(file)
        except (configparser.Error, UnicodeDecodeError, OSError) as exc:
            # Not what it says: that has the line in it, which may be a secret.
            what = type(exc).__name__
            raise UsageError(f"{file} cannot be read: {what}. Mend it.") from None
        if read.has_section(section):
            said.update(read.items(section))
    return said


def _files() -> tuple[Path, Path]:
    home = Path("~/.aws").expanduser()
    return (
        Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", home / "credentials")),
        Path(os.environ.get("AWS_CONFIG_FILE", home / "config")),
    )


def _has(names: tuple[str, ...]) -> bool:
    return any(os.environ.get(name) for name in names)


def _provided(provider: Callable[[], Any]) -> dict[str, Any]:
    """Return a provider of the cloud's own library, if it is there and has any."""
    try:
        return {"credential_provider": provider()}
    except Exception:  # not installed, or nothing that it could use; others may serve
        return {}


def _boto3() -> Any:
    from obstore.auth.boto3 import Boto3CredentialProvider

    return Boto3CredentialProvider()


def _google() -> Any:
    from obstore.auth.google import GoogleCredentialProvider

    return GoogleCredentialProvider()


def _azure() -> Any:
    from obstore.auth.azure import AzureCredentialProvider

    return AzureCredentialProvider()
