"""Sandboxes of Modal: every call of its SDK is here, and its errors become ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import modal
from modal import exception as faults
from modal.config import config

from atoll.errors import Refused, Unreachable, UsageError
from atoll.security import Secret

CANCELLED = "atoll-cancelled"
"""The tag of a sandbox that was to end."""

LOOKED_THROUGH = timedelta(days=34)
"""Modal's SDK looks for a log in 35 days at most; a sandbox lives in the first two."""

TERMINATED, TIMED_OUT = "terminated", "timed out"
_LOGINS = ("token_id", "oauth_refresh_token")
_MAY_NOT = (faults.AuthError, faults.PermissionDeniedError)
_WRONG = (
    faults.AlreadyExistsError,
    faults.InvalidError,
    faults.NotFoundError,
    faults.RemoteError,
    faults.RequestSizeError,
    faults.ResourceExhaustedError,
    faults.VersionError,
)


def require_login() -> None:
    """Return if somebody is logged in.

    Raises:
        UsageError: nobody is.
    """
    if not any(config.get(each) for each in _LOGINS):
        raise UsageError(
            "Nobody is logged in at Modal. Run `modal setup`, or set MODAL_TOKEN_ID "
            "and MODAL_TOKEN_SECRET."
        )


def create(call: Mapping[str, Any], values: Mapping[str, Secret]) -> str:
    """Start a sandbox, and return its id."""
    with told(f"start {call['name']}"):
        given = {key: each for key, each in call.items() if key != "args"}
        given["app"] = modal.App.lookup(call["app"], create_if_missing=True)
        given["image"] = image(call["image"])
        given["secrets"] = secrets(call["secrets"], values)
        return str(modal.Sandbox.create(*call["args"], **given).object_id)


def image(said: Mapping[str, Any]) -> modal.Image:
    """Return the image that a call says."""
    if "registry" in said:
        return modal.Image.from_registry(said["registry"])
    slim = modal.Image.debian_slim(python_version=said["python"])
    return slim.pip_install(*said["pip"])


def secrets(
    said: Mapping[str, Any], values: Mapping[str, Secret]
) -> list[modal.Secret]:
    """Return Modal's secrets: one of what is given, and those that it keeps."""
    given: dict[str, str | None] = {
        name: each.reveal() for name, each in values.items()
    }
    kept = [
        modal.Secret.from_name(named, required_keys=list(variables))
        for named, variables in said["kept"].items()
    ]
    return [modal.Secret.from_dict(given), *kept] if given else kept


def find(known: str | None, *, app: str, name: str) -> Any:
    """Return a sandbox by its id, or else by its name; None if there is none."""
    with told(f"find {name}", absent_is_fine=True):
        if known is not None:
            return modal.Sandbox.from_id(known)
        return modal.Sandbox.from_name(app, name, include_terminated=True)
    return None


def exit_code(sandbox: Any) -> int | None:
    """Return how a sandbox ended; None while it has not."""
    with told("ask for a sandbox"):
        code = sandbox.poll()
        return None if code is None else int(code)
    return None


def was_cancelled(sandbox: Any) -> bool:
    """Return whether `end` was called of it, here or elsewhere."""
    with told("ask for a sandbox's tags", absent_is_fine=True):
        return CANCELLED in sandbox.get_tags()
    return False


def how(sandbox: Any) -> str:
    """Return how Modal ended one that is over; "" if it ended by itself.

    Its code does not tell: a command may end with the same number.
    """
    with told("ask for a sandbox"):
        try:
            sandbox.wait()
        except faults.SandboxTerminatedError:
            return TERMINATED
        except faults.SandboxTimeoutError:
            return TIMED_OUT
    return ""


def lines(sandbox: Any, *, since_s: float) -> list[str]:
    """Return the lines a sandbox has said, without one that is still being."""
    is_live = exit_code(sandbox) is None
    with told("read a log", absent_is_fine=True):
        since = datetime.fromtimestamp(since_s, UTC)
        until = min(datetime.now(UTC), since + LOOKED_THROUGH)
        found = sandbox.logs.fetch(since=since, until=until)
        said = "".join(each.message for each in found).splitlines(keepends=True)
        if said and is_live and not said[-1].endswith("\n"):
            del said[-1]
        return [each.rstrip("\r\n") for each in said]
    return []


def end(sandbox: Any) -> None:
    """End a sandbox, and leave word of it there; one that is over stays so."""
    with told("end a sandbox", absent_is_fine=True):
        # Before it ends: whoever looks then must not take it for one that was killed.
        sandbox.set_tags({**sandbox.get_tags(), CANCELLED: "1"})
        sandbox.terminate()


@contextmanager
def told(what: str, *, absent_is_fine: bool = False) -> Iterator[None]:
    """Let errors of the SDK become ours."""
    try:
        yield
    except faults.NotFoundError as exc:
        if not absent_is_fine:
            raise UsageError(f"Modal cannot {what}: {exc}.") from exc
    except _MAY_NOT as exc:
        raise Refused(
            f"Modal does not let you {what}: {exc}. Run `modal setup`, or ask for that "
            "right in its workspace."
        ) from exc
    except _WRONG as exc:
        raise UsageError(f"Modal cannot {what}: {exc}.") from exc
    except Exception as exc:
        if not (isinstance(exc, faults.Error | OSError) or _is_of_grpc(exc)):
            raise
        raise Unreachable(f"Modal did not answer to {what}: {exc}.") from exc


def _is_of_grpc(exc: Exception) -> bool:
    """Return whether the SDK lets an error of a library of its own through."""
    return type(exc).__module__.startswith("grpclib")
