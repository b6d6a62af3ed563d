"""Objects in S3, Google Cloud Storage or Azure, by `obstore`.

Retries are in `client`: a conditional put must not be repeated without its knowledge.

`obstore` has one exception for a forbidden list and for a failed one, and one for an
object that is absent and for a bucket that is gone. The status and the code of the
response distinguish the cases: each cloud has its own codes.

Credentials come from the sources of each cloud's own tools. `obstore` reads the
environment, the files that it names, Google's application default credentials, and the
metadata service of a cloud machine. This module adds profiles of AWS, and users who
sign in with the cloud's library or command. No other file of the package reads the
environment.
"""

from __future__ import annotations

import configparser
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from html import unescape
from pathlib import Path
from typing import Any, Literal

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from atoll.errors import AtollError, NoSuchObject, StoreDenied, Unreachable, UsageError
from atoll.store import base

RETRIES: Any = {"max_retries": 0, "retry_timeout": timedelta(seconds=60)}
CONNECTIONS: Any = {
    "timeout": "300s",
    "connect_timeout": "10s",
    "allow_http": True,  # only an endpoint that a user configured with http
}
PUTS: Any = CONNECTIONS | {"timeout": "3600s"}
"""A put is one request for any size: 400 MB over 1 MB/s take seven minutes."""

DELETE_KEYS = 1000
"""The number of keys that one request deletes."""


class ObstoreStore:
    """Keeps objects in a bucket, with `obstore`. Implements `Store`."""

    traits = base.StoreTraits()

    def __init__(self, store: Any, *, name: str, puts: Any = None) -> None:
        self._store, self._name = store, name
        self._puts = store if puts is None else puts

    @classmethod
    def of_url(cls, url: str) -> ObstoreStore:
        """Return the store of a URL such as `s3://bucket/path`."""
        options = credentials_of(url) | {"retry_config": RETRIES}
        try:
            store, puts = (
                obstore.store.from_url(url, client_options=client, **options)
                for client in (CONNECTIONS, PUTS)
            )
        except (BaseError, ValueError) as exc:
            raise UsageError(f"{url} cannot be opened: {short(exc)}") from exc
        return cls(store, name=url, puts=puts)

    def put_new(self, key: str, parts: Sequence[base.Data]) -> bool:
        try:
            self._put(key, parts, "create")
        except (AlreadyExistsError, PreconditionError):
            return False
        return True

    def put(self, key: str, parts: Sequence[base.Data]) -> None:
        self._put(key, parts, "overwrite")

    def get(self, key: str, first: int = 0, size: int | None = None) -> memoryview:
        base.check_key(key)
        base.window(0, first, size)
        if size == 0:
            # A range cannot be empty, and a missing object must be an error.
            return self.get(key, first, 1)[:0]
        try:
            with self._errors_translated("get", key):
                response = obstore.get(self._store, key, options=_range(first, size))
                return memoryview(response.bytes())
        except Unreachable as exc:
            # A range beyond the end is an error, in some stores also without object.
            if is_beyond_the_end(_cause(exc)) and first >= self._size(key):
                return memoryview(b"")
            raise

    def items(self, prefix: str) -> list[base.Item]:
        base.check_prefix(prefix)
        with self._errors_translated("list", prefix):
            pages = obstore.list(self._store, prefix=prefix or None)
            return sorted(
                base.Item(entry["path"], entry["size"])
                for page in pages
                for entry in page
                if entry["path"].startswith(prefix) and base.is_key(entry["path"])
            )

    def remove(self, keys: Iterable[str]) -> None:
        all_keys = [base.check_key(key) for key in keys]
        for start in range(0, len(all_keys), DELETE_KEYS):
            page = all_keys[start : start + DELETE_KEYS]
            self._remove(page[0] if len(page) == 1 else page)

    def _remove(self, keys: str | list[str]) -> None:
        with self._errors_translated(
            "delete", keys if isinstance(keys, str) else keys[0]
        ):
            try:
                obstore.delete(self._store, keys)
            except FileNotFoundError as exc:
                if is_gone(exc):
                    raise
                if not isinstance(keys, str):
                    for key in keys:
                        self._remove(key)

    def _size(self, key: str) -> int:
        with self._errors_translated("get", key):
            return int(obstore.head(self._store, key)["size"])

    def _put(
        self, key: str, parts: Sequence[base.Data], mode: Literal["create", "overwrite"]
    ) -> None:
        base.check_key(key)
        base.size_of(parts)
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        with self._errors_translated("put", key):
            obstore.put(self._puts, key, views or b"", mode=mode, use_multipart=False)

    @contextmanager
    def _errors_translated(self, action: str, key: str) -> Iterator[None]:
        """Translate errors of the library into those of `atoll.errors`."""
        try:
            yield
        except (AlreadyExistsError, PreconditionError):
            raise
        except (BaseError, OSError) as exc:
            raise explained(exc, action, key, store=self._name) from exc


def _cause(exc: BaseException) -> Exception:
    assert isinstance(exc.__cause__, Exception)
    return exc.__cause__


def _range(first: int, size: int | None) -> Any:
    """Return the options of a ranged read; none for a complete object."""
    if size is not None:
        return {"range": (first, first + size)}
    return {"range": {"offset": first}} if first else {}


_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>|\(code: (\w{1,64})\)")
_MESSAGE = re.compile(r"<Message>([^<\n]{1,200})")

_BUCKET_MISSING = {"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted"}
_SKEWED = {"RequestTimeTooSkewed", "RequestExpired"}
_FORBIDDEN = {"AccessDenied", "AuthorizationPermissionMismatch"}
_UNKNOWN = {
    "AuthenticationFailed",
    "AuthorizationFailure",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
}
_METADATA_HOSTS = ("169.254.169.254", "metadata.google.internal")
"""Metadata services of cloud machines: the last source of credentials."""

_PERMISSIONS = {
    "s3": {
        "get": "s3:GetObject, and s3:ListBucket, without which S3 gives this error for "
        "every missing object",
        "put": "s3:PutObject",
        "list": "s3:ListBucket",
        "delete": "s3:DeleteObject",
    },
    "gs": {
        "get": "storage.objects.get",
        "put": "storage.objects.create, and storage.objects.delete to overwrite",
        "list": "storage.objects.list",
        "delete": "storage.objects.delete",
    },
}
_AZURE = "the role Storage Blob Data Contributor, or {} in its shared access signature"
_SIGNED = {"get": "r", "put": "c and w", "list": "l", "delete": "d"}


def explained(exc: Exception, action: str, key: str, *, store: str) -> AtollError:
    """Return our error for an error of the library: fact, values, remedy."""
    if code_of(exc) in _SKEWED:
        return StoreDenied(
            f"{store} refuses to {action} {key!r}: the clock of this machine is too "
            f"far off. Set it. ({short(exc)})"
        )
    if code_of(exc) in _UNKNOWN:
        return StoreDenied(
            f"{store} does not know this machine's credentials, or they have expired "
            f"({short(exc)}). Renew them with the cloud's own tools."
        )
    if is_gone(exc):
        return Unreachable(
            f"{store} does not exist: cannot {action} {key!r}. Create the bucket, or "
            f"correct the URL. ({short(exc)})"
        )
    if _is_forbidden(exc):
        return StoreDenied(
            f"{store} does not let this machine {action} objects ({key!r}). Give its "
            f"credentials {_permission(store, action)}. ({short(exc)})"
        )
    if isinstance(exc, FileNotFoundError) and action == "get":
        return NoSuchObject(f"There is no object {key!r}.", key=key)
    return Unreachable(f"{store} failed to {action} {key!r}: {short(exc)}{_hint(exc)}")


def is_gone(exc: Exception) -> bool:
    """Return whether the bucket is missing, not only an object in it."""
    return code_of(exc) in _BUCKET_MISSING


def is_beyond_the_end(exc: Exception) -> bool:
    """Return whether a requested range begins at or after the end of an object."""
    return _status_of(exc) == 416 or "Wanted range starting at" in str(exc)


def code_of(exc: Exception) -> str:
    """Return the error code of the cloud's response, or an empty string."""
    match = _CODE.search(str(exc))
    return (match[1] or match[2]) if match else ""


def short(exc: Exception) -> str:
    """Return the cloud's code and message, or the first line of the library's."""
    code, message = code_of(exc), _MESSAGE.search(str(exc))
    if code:
        return f"{code}: {unescape(message[1]).strip()}" if message else code
    lines = str(exc).strip().splitlines()
    return lines[0][:300] if lines else type(exc).__name__


def _is_forbidden(exc: Exception) -> bool:
    return (
        isinstance(exc, PermissionDeniedError | UnauthenticatedError)
        or _status_of(exc) in (401, 403)
        or code_of(exc) in _FORBIDDEN
    )


def _status_of(exc: Exception) -> int:
    if match := _STATUS.search(str(exc)):
        return int(match[1])
    # Azure has a status for each object of a batch, and the library calls it a code.
    code = code_of(exc)
    return int(code) if code.isdecimal() else 0


def _permission(store: str, action: str) -> str:
    scheme = store.partition("://")[0]
    permissions = _PERMISSIONS.get("s3" if scheme == "s3a" else scheme)
    if permissions:
        return permissions[action]
    return _AZURE.format(_SIGNED[action])


def _hint(exc: Exception) -> str:
    if not any(host in str(exc) for host in _METADATA_HOSTS):
        return ""
    return (
        ". No credentials were found, and the metadata service of a cloud machine "
        "did not answer. Set them up with the cloud's own tools."
    )


REREAD_AFTER = timedelta(minutes=10)
"""A file of profiles may be renewed during a run, and is read again after this."""

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
    """Return the options for `url` that `obstore` does not find itself.

    Raises:
        UsageError: the named profile does not exist, or needs another package.
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
    """Return the options of a profile; boto3 serves profiles without keys."""
    if _has(_IN_S3):
        return {}
    name = os.environ.get("AWS_PROFILE")
    profile = _profile(name or "default")
    if name and not profile:
        raise UsageError(
            f"AWS_PROFILE={name} is not in {' or '.join(map(str, _files()))}. "
            "Add it, or unset AWS_PROFILE."
        )
    options = _endpoint_of(profile)
    if _KEY in profile and _ROLE not in profile:
        return options | {"credential_provider": _ProfileFile(name or "default")}
    provided = _provided(_boto3)
    if not provided and any(key in profile for key in _SIGNED_IN):
        raise UsageError(
            f"The profile {name or 'default'} of AWS signs in, which needs boto3. "
            "Try: pip install boto3"
        )
    return options | provided


def _endpoint_of(profile: dict[str, str]) -> dict[str, Any]:
    """Return region and endpoint of a profile, unless the environment has them."""
    options: dict[str, Any] = {}
    if "region" in profile and not _has(("AWS_REGION", "AWS_DEFAULT_REGION")):
        options["region"] = profile["region"]
    if "endpoint_url" in profile and not _has(("AWS_ENDPOINT_URL", "AWS_ENDPOINT")):
        options["endpoint"] = profile["endpoint_url"]
    return options


class _ProfileFile:
    """Returns the present credentials of a profile from its file."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self) -> dict[str, Any]:
        profile = _profile(self._name)
        return {
            "access_key_id": profile.get(_KEY, ""),
            "secret_access_key": profile.get("aws_secret_access_key", ""),
            "token": profile.get("aws_session_token"),
            "expires_at": datetime.now(UTC) + REREAD_AFTER,
        }


def _profile(name: str) -> dict[str, str]:
    """Return a profile from both files; the credentials file takes precedence."""
    shared, settings = _files()
    profile: dict[str, str] = {}
    for file, section in (
        (settings, f"profile {name}"),
        (settings, name),
        (shared, name),
    ):
        parser = configparser.RawConfigParser()
        try:
            parser.read(file)
        except (configparser.Error, UnicodeDecodeError, OSError) as exc:
            # Not the parser's message: it has the line, which may be a secret.
            error = type(exc).__name__
            raise UsageError(f"{file} cannot be read: {error}. Correct it.") from None
        if parser.has_section(section):
            profile.update(parser.items(section))
    return profile


def _files() -> tuple[Path, Path]:
    home = Path("~/.aws").expanduser()
    return (
        Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", home / "credentials")),
        Path(os.environ.get("AWS_CONFIG_FILE", home / "config")),
    )


def _has(names: tuple[str, ...]) -> bool:
    return any(os.environ.get(name) for name in names)


def _provided(provider: Callable[[], Any]) -> dict[str, Any]:
    """Return the credential provider of a cloud's library, if it can be created."""
    try:
        return {"credential_provider": provider()}
    except Exception:  # not installed, or without credentials; others may have some
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
