"""Islands as sandboxes of Modal, one each.

Start reading at `Sandboxes`, then `sandbox_calls`: the arguments of
`modal.Sandbox.create`, as data. The calls of the SDK come last, and turn its errors
into ours.

A sandbox is named by its launch, so one without a response can be ended too. Modal
starts a sandbox once: in each a leader restarts the command by the restart policy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import modal
from modal import exception as faults
from modal.config import config

from atoll.errors import Refused, Unreachable, UsageError
from atoll.launch import base
from atoll.launch.job_launcher import FoundJob, JobLauncher, JobsToEnd
from atoll.launch.leader import EXIT_CANCELLED, leader_argv
from atoll.launch.spec import IslandSpec, Resources, in_engine
from atoll.security import Secret

KILLED = 137
"""The exit code of a killed process, as container engines report it."""

CLOCKS_DIFFER_S = 600.0
"""How much earlier than the launch its log may begin, by another machine's clock."""


def open_launcher(options: Mapping[str, str]) -> base.Launcher:
    """Return the launcher of the user who is logged in at Modal, if one is."""
    read = base.read_options(ModalOptions, options, engine=ENGINE)
    return JobLauncher(Sandboxes(read), engine=ENGINE, options=options)


class Sandboxes:
    """The sandboxes of one user."""

    def __init__(self, read: ModalOptions) -> None:
        self._read = read

    def plan(self, order: base.LaunchOrder) -> base.LaunchPlan:
        data = sandbox_calls(order, self._read)
        return base.LaunchPlan(data, json.dumps(data, indent=2))

    def begin(self, order: base.LaunchOrder) -> dict[str, Any]:
        return {"app": self._read.app, "sandboxes": {}}

    def submit(
        self, order: base.LaunchOrder, plan: base.LaunchPlan, handle: base.Handle
    ) -> Iterator[base.Handle]:
        ids: dict[str, str] = {}
        for index, call in zip(order.indexes, plan.data, strict=True):
            ids[str(index)] = create_sandbox(call, order.values)
            reference = {**handle.reference, "sandboxes": dict(ids)}
            yield replace(handle, reference=reference)

    def find(
        self, handle: base.Handle, indexes: Collection[int]
    ) -> dict[int, FoundJob]:
        jobs = {}
        for index in indexes:
            sandbox = find_sandbox(
                handle.reference["sandboxes"].get(str(index)),
                app=handle.reference["app"],
                name=sandbox_name(handle.id, index),
            )
            if sandbox is not None:
                jobs[index] = FoundJob(_report(handle, index, sandbox), sandbox)
        return jobs

    def lines(self, handle: base.Handle, index: int, job: Any) -> list[str]:
        since_s = max(0.0, handle.begun_at_s - CLOCKS_DIFFER_S)
        return log_lines(job, since_s=since_s)

    def end(self, handle: base.Handle, request: JobsToEnd) -> None:
        for sandbox in request.jobs.values():
            end_sandbox(sandbox)


def _report(handle: base.Handle, index: int, sandbox: Any) -> base.Report:
    code = exit_code(sandbox)
    state, reason = _state(sandbox, code)
    return base.Report(
        index=index,
        name=handle.island(index),
        state=state,
        exit_code=code,
        reason=reason,
        host=str(sandbox.object_id),
    )


def _state(sandbox: Any, code: int | None) -> tuple[base.State, str]:
    if code is None:
        return base.State.RUNNING, ""  # Modal does not report pending sandboxes
    if code == 0:
        return base.State.FINISHED, ""
    ending = how_ended(sandbox)
    if ending == TIMED_OUT:
        return base.State.FAILED, "its time limit was over"
    if (ending or code == EXIT_CANCELLED) and was_cancelled(sandbox):
        return base.State.CANCELLED, ""
    if ending == TERMINATED:
        return base.State.FAILED, "Modal ended it, without a request of `atoll cancel`"
    if code == EXIT_CANCELLED:
        return base.State.CANCELLED, "it received SIGTERM, as before its time limit"
    if code == KILLED:
        return base.State.FAILED, f"it was killed (exit code {code}), as without memory"
    return base.State.FAILED, f"exit code {code}"


ENGINE = "modal"
MAX_LIMIT_S = 24 * 3600.0
"""Of a sandbox. Modal's default is 300 s, which would end a training early."""

MIB = 2**20


@dataclass(frozen=True)
class ModalOptions:
    """The options of `--option`."""

    app: str = "atoll"
    """The app of the sandboxes; it is created if it does not exist."""

    region: str | None = None
    cloud: str | None = None
    python: str = "3.12"
    """The version for which `--requirement` is installed, without `--image`."""


def sandbox_name(launch: str, index: int) -> str:
    """Return the name of an island's sandbox, which is the only one of its app."""
    return f"{launch}-{index}"


def sandbox_calls(
    order: base.LaunchOrder, options: ModalOptions
) -> list[dict[str, Any]]:
    """Return every island's argv and keywords, with names instead of objects.

    Raises:
        UsageError: a sandbox cannot fulfil the spec.
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


def _secrets(order: base.LaunchOrder) -> dict[str, Any]:
    """Return the variables given by value, and the secrets that Modal stores."""
    stored: dict[str, list[str]] = {}
    for variable, reference in in_engine(order.spec.secrets).items():
        named, _, key = reference.partition("/")
        if key not in ("", variable):
            raise UsageError(
                f"The secret {variable} is to be {key} of Modal's {named!r}, which "
                f"sets its variables under their own names. Give {key}=engine:{named}."
            )
        stored.setdefault(named, []).append(variable)
    return {"given": sorted(order.values), "kept": stored}


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
    memory_bytes = resources.memory_bytes
    return None if memory_bytes is None else math.ceil(memory_bytes / MIB)


CANCELLED = "atoll-cancelled"
"""The tag of a cancelled sandbox."""

LOOKED_THROUGH = timedelta(days=34)
"""Modal's SDK reads the log of 35 days at most; a sandbox runs in the first two."""

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


def create_sandbox(call: Mapping[str, Any], values: Mapping[str, Secret]) -> str:
    """Start a sandbox, and return its id."""
    with sdk_errors(f"start {call['name']}"):
        arguments = {key: value for key, value in call.items() if key != "args"}
        arguments["app"] = modal.App.lookup(call["app"], create_if_missing=True)
        arguments["image"] = modal_image(call["image"])
        arguments["secrets"] = modal_secrets(call["secrets"], values)
        return str(modal.Sandbox.create(*call["args"], **arguments).object_id)


def modal_image(image: Mapping[str, Any]) -> modal.Image:
    """Return the image of a call."""
    if "registry" in image:
        return modal.Image.from_registry(image["registry"])
    slim = modal.Image.debian_slim(python_version=image["python"])
    return slim.pip_install(*image["pip"])


def modal_secrets(
    secrets: Mapping[str, Any], values: Mapping[str, Secret]
) -> list[modal.Secret]:
    """Return Modal's secrets: one with the given values, and those that it stores."""
    values_by_name: dict[str, str | None] = {
        name: value.reveal() for name, value in values.items()
    }
    stored = [
        modal.Secret.from_name(named, required_keys=list(variables))
        for named, variables in secrets["kept"].items()
    ]
    return (
        [modal.Secret.from_dict(values_by_name), *stored] if values_by_name else stored
    )


def find_sandbox(sandbox_id: str | None, *, app: str, name: str) -> Any:
    """Return a sandbox by its id, or else by its name; None if there is none.

    Raises:
        UsageError: no user is logged in.
    """
    if not any(config.get(setting) for setting in _LOGINS):
        raise UsageError(
            "No user is logged in at Modal. Run `modal setup`, or set MODAL_TOKEN_ID "
            "and MODAL_TOKEN_SECRET."
        )
    with sdk_errors(f"find {name}", absent_is_fine=True):
        if sandbox_id is not None:
            return modal.Sandbox.from_id(sandbox_id)
        return modal.Sandbox.from_name(app, name, include_terminated=True)
    return None


def exit_code(sandbox: Any) -> int | None:
    """Return the exit code of a sandbox; None while it runs."""
    with sdk_errors("ask for a sandbox"):
        code = sandbox.poll()
        return None if code is None else int(code)
    return None


def was_cancelled(sandbox: Any) -> bool:
    """Return whether `end_sandbox` was called for it, by any process."""
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
    """Return the log lines of a sandbox, without an incomplete last one."""
    is_live = exit_code(sandbox) is None
    with sdk_errors("read a log", absent_is_fine=True):
        since = datetime.fromtimestamp(since_s, UTC)
        until = min(datetime.now(UTC), since + LOOKED_THROUGH)
        entries = sandbox.logs.fetch(since=since, until=until)
        lines = "".join(entry.message for entry in entries).splitlines(keepends=True)
        if lines and is_live and not lines[-1].endswith("\n"):
            del lines[-1]
        return [line.rstrip("\r\n") for line in lines]
    return []


def end_sandbox(sandbox: Any) -> None:
    """Tag a sandbox as cancelled, and end it; one that is over does not change."""
    with sdk_errors("end a sandbox", absent_is_fine=True):
        # Before it ends: otherwise a poll in between would report it as killed.
        sandbox.set_tags({**sandbox.get_tags(), CANCELLED: "1"})
        sandbox.terminate()


@contextmanager
def sdk_errors(action: str, *, absent_is_fine: bool = False) -> Iterator[None]:
    """Translate errors of the SDK."""
    try:
        yield
    except faults.NotFoundError as exc:
        if not absent_is_fine:
            raise UsageError(f"Modal cannot {action}: {exc}.") from exc
    except _MAY_NOT as exc:
        raise Refused(
            f"Modal does not let you {action}: {exc}. Run `modal setup`, or get that "
            "permission in its workspace."
        ) from exc
    except _WRONG as exc:
        raise UsageError(f"Modal cannot {action}: {exc}.") from exc
    except Exception as exc:
        if not (isinstance(exc, faults.Error | OSError) or _is_of_grpc(exc)):
            raise
        raise Unreachable(f"Modal did not answer to {action}: {exc}.") from exc


def _is_of_grpc(exc: Exception) -> bool:
    """Return whether an error comes from the SDK's library for gRPC."""
    return type(exc).__module__.startswith("grpclib")
