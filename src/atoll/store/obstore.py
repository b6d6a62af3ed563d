"""Objects in S3, Google Cloud Storage or Azure, by `obstore`.

Retries are ours, in `client`: a conditional put must not be repeated unseen.

`obstore` has one exception for a forbidden list and for a failed one, and one for an
object that is absent and for a bucket that is gone. The status and the code of the
response tell them apart: each cloud has its own codes.

Credentials come from the places where each cloud's own tools look for them. `obstore`
reads the environment, the files that it names, Google's application default
credentials, and asks the machine itself where the cloud runs it. The rest is here:
profiles of AWS, and users who sign in with the cloud's own library or command. This is
the store's one file that reads the environment.
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
from atoll.store.base import (
    Data,
    Item,
    StoreTraits,
    check_key,
    check_prefix,
    is_key,
    size_of,
    window,
)

RETRIES: Any = {"max_retries": 0, "retry_timeout": timedelta(seconds=60)}
CONNECTIONS: Any = {
    "timeout": "300s",
    "connect_timeout": "10s",
    "allow_http": True,  # an endpoint of http is one that somebody has written so
}
PUTS: Any = CONNECTIONS | {"timeout": "3600s"}
"""A put is one request whatever its size: 400 MB over 1 MB/s take seven minutes."""

AT_ONCE = 1000
"""How many keys one request removes."""


class ObstoreStore:
    """Keeps objects where `obstore` can. Implements `Store`."""

    traits = StoreTraits()

    def __init__(self, store: Any, *, name: str, puts: Any = None) -> None:
        self._store, self._name = store, name
        self._puts = store if puts is None else puts

    @classmethod
    def of_url(cls, url: str) -> ObstoreStore:
        """Return the store of a URL such as `s3://bucket/path`."""
        said = credentials_of(url) | {"retry_config": RETRIES}
        try:
            store, puts = (
                obstore.store.from_url(url, client_options=each, **said)
                for each in (CONNECTIONS, PUTS)
            )
        except (BaseError, ValueError) as exc:
            raise UsageError(f"{url} cannot be opened: {short(exc)}") from exc
        return cls(store, name=url, puts=puts)

    def put_new(self, key: str, parts: Sequence[Data]) -> bool:
        try:
            self._put(key, parts, "create")
        except (AlreadyExistsError, PreconditionError):
            return False
        return True

    def put(self, key: str, parts: Sequence[Data]) -> None:
        self._put(key, parts, "overwrite")

    def get(self, key: str, first: int = 0, size: int | None = None) -> memoryview:
        check_key(key)
        window(0, first, size)
        if size == 0:
            # No range is empty, and whether the object is there must be known.
            return self.get(key, first, 1)[:0]
        try:
            with self._told("get", key):
                found = obstore.get(self._store, key, options=_asked(first, size))
                return memoryview(found.bytes())
        except Unreachable as exc:
            # No store has a range from there on; some say so of what is not there.
            if is_beyond_the_end(_cause(exc)) and first >= self._size(key):
                return memoryview(b"")
            raise

    def items(self, prefix: str) -> list[Item]:
        check_prefix(prefix)
        with self._told("list", prefix):
            pages = obstore.list(self._store, prefix=prefix or None)
            return sorted(
                Item(each["path"], each["size"])
                for page in pages
                for each in page
                if each["path"].startswith(prefix) and is_key(each["path"])
            )

    def remove(self, keys: Iterable[str]) -> None:
        left = [check_key(key) for key in keys]
        while left:
            now, left = left[:AT_ONCE], left[AT_ONCE:]
            self._remove(now[0] if len(now) == 1 else now)

    def _remove(self, keys: str | list[str]) -> None:
        with self._told("delete", keys if isinstance(keys, str) else keys[0]):
            try:
                obstore.delete(self._store, keys)
            except FileNotFoundError as exc:
                if is_gone(exc):
                    raise
                if not isinstance(keys, str):
                    for key in keys:
                        self._remove(key)

    def _size(self, key: str) -> int:
        with self._told("get", key):
            return int(obstore.head(self._store, key)["size"])

    def _put(
        self, key: str, parts: Sequence[Data], mode: Literal["create", "overwrite"]
    ) -> None:
        check_key(key)
        size_of(parts)
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        with self._told("put", key):
            obstore.put(self._puts, key, views or b"", mode=mode, use_multipart=False)

    @contextmanager
    def _told(self, what: str, key: str) -> Iterator[None]:
        """Say in our words what went wrong, and whether asking again may help."""
        try:
            yield
        except (AlreadyExistsError, PreconditionError):
            raise
        except (BaseError, OSError) as exc:
            raise explained(exc, what, key, store=self._name) from exc


def _cause(exc: BaseException) -> Exception:
    assert isinstance(exc.__cause__, Exception)
    return exc.__cause__


def _asked(first: int, size: int | None) -> Any:
    """Return the range to ask for; a whole object is asked for without one."""
    if size is not None:
        return {"range": (first, first + size)}
    return {"range": {"offset": first}} if first else {}


_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>|\(code: (\w{1,64})\)")
_MESSAGE = re.compile(r"<Message>([^<\n]{1,200})")

_GONE = {"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted"}
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
_OF_THIS_MACHINE = ("169.254.169.254", "metadata.google.internal")
"""Where clouds tell a machine of theirs its own credentials: the last place to look."""

_WORDS = {
    "s3": {
        "get": "s3:GetObject, and s3:ListBucket, without which S3 says this of every "
        "object that is not there",
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


def explained(exc: Exception, what: str, key: str, *, store: str) -> AtollError:
    """Return our error for one of the library's: the fact, the values, the way out."""
    if code_of(exc) in _SKEWED:
        return StoreDenied(
            f"{store} refuses to {what} {key!r}: the clock of this machine is too far "
            f"off. Set it. ({short(exc)})"
        )
    if code_of(exc) in _UNKNOWN:
        return StoreDenied(
            f"{store} does not know this machine's credentials, or they have expired "
            f"({short(exc)}). Renew them where the cloud's own tools look for them."
        )
    if is_gone(exc):
        return Unreachable(
            f"{store} is not there: cannot {what} {key!r}. Make the bucket, or mend "
            f"the URL. ({short(exc)})"
        )
    if _is_forbidden(exc):
        return StoreDenied(
            f"{store} does not let this machine {what} objects ({key!r}). Give its "
            f"credentials {_permission(store, what)}. ({short(exc)})"
        )
    if isinstance(exc, FileNotFoundError) and what == "get":
        return NoSuchObject(f"There is no object {key!r}.", key=key)
    return Unreachable(f"{store} failed to {what} {key!r}: {short(exc)}{_hint(exc)}")


def is_gone(exc: Exception) -> bool:
    """Return whether it is the bucket that is not there, not an object in it."""
    return code_of(exc) in _GONE


def is_beyond_the_end(exc: Exception) -> bool:
    """Return whether a range was asked for that begins where an object has ended."""
    return _status_of(exc) == 416 or "Wanted range starting at" in str(exc)


def code_of(exc: Exception) -> str:
    """Return the word by which a cloud names what went wrong; none is empty."""
    found = _CODE.search(str(exc))
    return (found[1] or found[2]) if found else ""


def short(exc: Exception) -> str:
    """Return what the cloud says, or the library, which may print its insides."""
    code, message = code_of(exc), _MESSAGE.search(str(exc))
    if code:
        return f"{code}: {unescape(message[1]).strip()}" if message else code
    said = str(exc).strip().splitlines()
    return said[0][:300] if said else type(exc).__name__


def _is_forbidden(exc: Exception) -> bool:
    return (
        isinstance(exc, PermissionDeniedError | UnauthenticatedError)
        or _status_of(exc) in (401, 403)
        or code_of(exc) in _FORBIDDEN
    )


def _status_of(exc: Exception) -> int:
    if found := _STATUS.search(str(exc)):
        return int(found[1])
    # Azure has a status for each object of a batch, and the library calls it a code.
    code = code_of(exc)
    return int(code) if code.isdecimal() else 0


def _permission(store: str, what: str) -> str:
    scheme = store.partition("://")[0]
    words = _WORDS.get("s3" if scheme == "s3a" else scheme)
    if words:
        return words[what]
    return _AZURE.format(_SIGNED[what])


def _hint(exc: Exception) -> str:
    if not any(place in str(exc) for place in _OF_THIS_MACHINE):
        return ""
    return (
        ". No credentials were found, so the cloud's own machine was asked for some. "
        "Put them where the cloud's own tools look."
    )


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
