"""Islands as sandboxes of Modal, one each.

Start reading at `ModalLauncher`, then `sandbox_calls`: the arguments of
`modal.Sandbox.create`, as data. The calls of the SDK come last, and turn its errors
into ours.

A sandbox is named by its launch, so one without a response can be ended too. Modal
starts a sandbox once: in each a leader restarts the command by the restart policy.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import modal
from modal import exception as faults
from modal.config import config

from atoll.errors import Refused, Unreachable, UsageError
from atoll.launch.base import (
    GRACE_S,
    Handle,
    Keep,
    Launcher,
    LaunchOrder,
    LaunchPlan,
    Report,
    State,
    Traits,
    read_options,
)
from atoll.launch.job_leader import EXIT_CANCELLED, leader_argv
from atoll.launch.spec import IslandSpec, Resources, in_engine
from atoll.security import Secret

KILLED = 137
"""The exit code of who was killed, as a container's engine counts."""

CLOCKS_DIFFER_S = 600.0
"""How long before a launch its log may begin, by another machine's clock."""


def open_launcher(options: Mapping[str, str]) -> Launcher:
    """Return the launcher of whoever is logged in at Modal."""
    read = read_options(ModalOptions, options, engine=ENGINE)
    require_login()
    return ModalLauncher(read, options)


class ModalLauncher:
    """Creates sandboxes; what it knows is at Modal and in handles."""

    def __init__(self, read: ModalOptions, options: Mapping[str, str]) -> None:
        self._read, self._options = read, dict(options)

    @property
    def traits(self) -> Traits:
        return Traits()

    def plan(self, order: LaunchOrder) -> LaunchPlan:
        data = sandbox_calls(order, self._read)
        return LaunchPlan(data, json.dumps(data, indent=2))

    def launch(self, order: LaunchOrder, *, keep: Keep) -> Handle:
        calls = sandbox_calls(order, self._read)
        reference: dict[str, Any] = {"app": self._read.app, "sandboxes": {}}
        handle = order.handle(
            ENGINE, reference, options=self._options, begun_at_s=time.time()
        )
        if _find(handle, order.first) is not None:
            raise UsageError(
                f"{order.id!r} was launched on Modal already. Launch under "
                "another name."
            )
        keep(handle)
        ids: dict[str, str] = {}
        for index, call in zip(order.indexes, calls, strict=True):
            ids[str(index)] = create_sandbox(call, order.values)
            handle = replace(handle, reference={**reference, "sandboxes": dict(ids)})
            keep(handle)
        return handle

    def poll(self, handle: Handle) -> tuple[Report, ...]:
        return tuple(_report(handle, index) for index in handle.indexes)

    def logs(self, handle: Handle, index: int, *, after: int = 0) -> list[str]:
        sandbox = _find(handle, index)
        if sandbox is None:
            return []
        since_s = max(0.0, handle.begun_at_s - CLOCKS_DIFFER_S)
        return log_lines(sandbox, since_s=since_s)[after:]

    def cancel(
        self,
        handle: Handle,
        *,
        indexes: Collection[int] | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        for index in handle.indexes if indexes is None else sorted(indexes):
            sandbox = _find(handle, index)
            if sandbox is not None and exit_code(sandbox) is None:
                end_sandbox(sandbox)


def _find(handle: Handle, index: int) -> Any:
    known = handle.reference["sandboxes"].get(str(index))
    name = sandbox_name(handle.id, index)
    return find_sandbox(known, app=handle.reference["app"], name=name)


def _report(handle: Handle, index: int) -> Report:
    name, sandbox = handle.island(index), _find(handle, index)
    if sandbox is None:
        return Report(index=index, name=name, state=State.LOST)
    code = exit_code(sandbox)
    state, why = _state(sandbox, code)
    return Report(
        index=index,
        name=name,
        state=state,
        exit_code=code,
        reason=why,
        host=str(sandbox.object_id),
    )


def _state(sandbox: Any, code: int | None) -> tuple[State, str]:
    if code is None:
        return State.RUNNING, ""  # Modal does not tell who still waits for a place
    if code == 0:
        return State.FINISHED, ""
    how = how_ended(sandbox)
    if how == TIMED_OUT:
        return State.FAILED, "its time limit was over"
    if (how or code == EXIT_CANCELLED) and was_cancelled(sandbox):
        return State.CANCELLED, ""
    if how == TERMINATED:
        why = "Modal ended it, and no `atoll cancel` had asked for that"
        return State.FAILED, why
    if code == EXIT_CANCELLED:
        return State.CANCELLED, "it was told to go, as before its time limit"
    if code == KILLED:
        return State.FAILED, f"it was killed (exit code {code}), as who lacks memory is"
    return State.FAILED, f"exit code {code}"


ENGINE = "modal"
MAX_LIMIT_S = 24 * 3600.0
"""Of a sandbox. What a caller does not say is 300 s, which ends a training early."""

MIB = 2**20


@dataclass(frozen=True)
class ModalOptions:
    """What `--option` takes."""

    app: str = "atoll"
    """The app of the sandboxes; it is made if it is not there."""

    region: str | None = None
    cloud: str | None = None
    python: str = "3.12"
    """Which one has `--requirement` installed, if there is no `--image`."""


def sandbox_name(launch: str, index: int) -> str:
    """Return the name of an island's sandbox, which is the only one of its app."""
    return f"{launch}-{index}"


def sandbox_calls(order: LaunchOrder, options: ModalOptions) -> list[dict[str, Any]]:
    """Return every island's words and arguments, with names where objects will be.

    Raises:
        UsageError: a sandbox cannot be what the spec asks for.
    """
    spec, resources = order.spec, order.spec.resources
    limit_s = _limit_s(resources)
    alike = {
        "app": options.app,
        "image": _image(spec, options),
        "env": dict(spec.environment),
        "secrets": _secrets(order),
        "timeout": int(limit_s),
        "gpu": _gpu(resources),
        "cpu": resources.cpus,
        "memory": _memory_mib(resources),
        "region": options.region,
        "cloud": options.cloud,
    }
    return [
        {
            "args": leader_argv(spec, index, limit_s=limit_s),
            "name": sandbox_name(order.id, index),
            "tags": {"atoll-launch": order.id, "atoll-index": str(index)},
            **alike,
        }
        for index in order.indexes
    ]


def _limit_s(resources: Resources) -> float:
    limit_s = resources.time_limit_s or MAX_LIMIT_S
    if limit_s > MAX_LIMIT_S:
        raise UsageError(
            f"time_limit_s={limit_s:g} is more than the {MAX_LIMIT_S:g} s that a "
            "sandbox of Modal has. Ask for less, and launch again when they are over."
        )
    return max(1.0, limit_s)


def _image(spec: IslandSpec, options: ModalOptions) -> dict[str, Any]:
    if spec.image is not None:
        return {"registry": spec.image}
    if spec.requirements:
        return {"python": options.python, "pip": list(spec.requirements)}
    raise UsageError(
        "Modal has nothing to run an island in. Give --image with Atoll in it, or say "
        "how pip gets it: --requirement atoll."
    )


def _secrets(order: LaunchOrder) -> dict[str, Any]:
    """Return which variables are given by value, and which secrets Modal keeps."""
    kept: dict[str, list[str]] = {}
    for variable, reference in in_engine(order.spec.secrets).items():
        named, _, key = reference.partition("/")
        if key not in ("", variable):
            raise UsageError(
                f"The secret {variable} is to be {key} of Modal's {named!r}, which "
                f"sets its variables under their own names. Give {key}=engine:{named}."
            )
        kept.setdefault(named, []).append(variable)
    return {"given": sorted(order.values), "kept": kept}


def _gpu(resources: Resources) -> str | None:
    if resources.accelerators == 0:
        return None
    if resources.accelerator is None:
        raise UsageError(
            f"accelerators={resources.accelerators} of which kind? Modal wants its "
            "name: --accelerator a100."
        )
    return f"{resources.accelerator}:{resources.accelerators}"


def _memory_mib(resources: Resources) -> int | None:
    asked = resources.memory_bytes
    return None if asked is None else math.ceil(asked / MIB)


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


def create_sandbox(call: Mapping[str, Any], values: Mapping[str, Secret]) -> str:
    """Start a sandbox, and return its id."""
    with sdk_errors(f"start {call['name']}"):
        given = {key: each for key, each in call.items() if key != "args"}
        given["app"] = modal.App.lookup(call["app"], create_if_missing=True)
        given["image"] = modal_image(call["image"])
        given["secrets"] = modal_secrets(call["secrets"], values)
        return str(modal.Sandbox.create(*call["args"], **given).object_id)


def modal_image(said: Mapping[str, Any]) -> modal.Image:
    """Return the image that a call says."""
    if "registry" in said:
        return modal.Image.from_registry(said["registry"])
    slim = modal.Image.debian_slim(python_version=said["python"])
    return slim.pip_install(*said["pip"])


def modal_secrets(
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


def find_sandbox(known: str | None, *, app: str, name: str) -> Any:
    """Return a sandbox by its id, or else by its name; None if there is none."""
    with sdk_errors(f"find {name}", absent_is_fine=True):
        if known is not None:
            return modal.Sandbox.from_id(known)
        return modal.Sandbox.from_name(app, name, include_terminated=True)
    return None


def exit_code(sandbox: Any) -> int | None:
    """Return how a sandbox ended; None while it has not."""
    with sdk_errors("ask for a sandbox"):
        code = sandbox.poll()
        return None if code is None else int(code)
    return None


def was_cancelled(sandbox: Any) -> bool:
    """Return whether `end_sandbox` was called of it, here or elsewhere."""
    with sdk_errors("ask for a sandbox's tags", absent_is_fine=True):
        return CANCELLED in sandbox.get_tags()
    return False


def how_ended(sandbox: Any) -> str:
    """Return how Modal ended one that is over; "" if it ended by itself.

    Its code does not tell: a command may end with the same number.
    """
    with sdk_errors("ask for a sandbox"):
        try:
            sandbox.wait()
        except faults.SandboxTerminatedError:
            return TERMINATED
        except faults.SandboxTimeoutError:
            return TIMED_OUT
    return ""


def log_lines(sandbox: Any, *, since_s: float) -> list[str]:
    """Return the lines a sandbox has said, without one that is still being."""
    is_live = exit_code(sandbox) is None
    with sdk_errors("read a log", absent_is_fine=True):
        since = datetime.fromtimestamp(since_s, UTC)
        until = min(datetime.now(UTC), since + LOOKED_THROUGH)
        found = sandbox.logs.fetch(since=since, until=until)
        said = "".join(each.message for each in found).splitlines(keepends=True)
        if said and is_live and not said[-1].endswith("\n"):
            del said[-1]
        return [each.rstrip("\r\n") for each in said]
    return []


def end_sandbox(sandbox: Any) -> None:
    """End a sandbox, and leave word of it there; one that is over stays so."""
    with sdk_errors("end a sandbox", absent_is_fine=True):
        # Before it ends: whoever looks then must not take it for one that was killed.
        sandbox.set_tags({**sandbox.get_tags(), CANCELLED: "1"})
        sandbox.terminate()


@contextmanager
def sdk_errors(what: str, *, absent_is_fine: bool = False) -> Iterator[None]:
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
