"""What a cloud answers when it does not do what was asked, in our words.

Its library has one exception for a list that is forbidden and for one that failed, and
one for an object that is not there and for a bucket that is gone. The status and the
code of the answer tell them apart: each cloud has its own codes.
"""

from __future__ import annotations

import re
from html import unescape

from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

from atoll.errors import AtollError, NoSuchObject, StoreDenied, Unreachable

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
