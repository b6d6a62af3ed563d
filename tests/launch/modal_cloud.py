"""Modal without Modal: its SDK's calls, bound to the real signatures, run processes.

Images are the SDK's own objects. What needs the network is stood in for: apps, secrets
and sandboxes. Every call is bound to the signature of what it stands for, and what is
given must be of the annotated kind, so that a renamed argument is an error here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import modal
import pytest
from modal import exception as faults
from modal._logs_manager import SandboxLogsManager

from tests.launch.containers import Container

REAL = SimpleNamespace(App=modal.App, Sandbox=modal.Sandbox, Secret=modal.Secret)


def bound(real: Callable[..., Any], *args: Any, **given: Any) -> Mapping[str, Any]:
    """Return the arguments of a call by name, if the real function takes it."""
    return inspect.signature(real).bind(*args, **given).arguments


@dataclass
class Cloud:
    """What Modal knows. A test may read it, forget a sandbox, or set a fault."""

    place: Path
    sandboxes: dict[str, Sandbox] = field(default_factory=dict)
    apps: list[str] = field(default_factory=list)
    kept: dict[str, dict[str, str]] = field(default_factory=dict)
    fault: Exception | None = None

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take the place of what the SDK would ask the network for."""
        monkeypatch.setenv("MODAL_TOKEN_ID", "ak-reef")
        monkeypatch.setenv("MODAL_TOKEN_SECRET", "as-reef")
        app = SimpleNamespace(lookup=self._lookup)
        secret = SimpleNamespace(from_dict=self._from_dict, from_name=self._from_name)
        sandbox = SimpleNamespace(
            create=self._create, from_id=self._by_id, from_name=self._by_name
        )
        monkeypatch.setattr(modal, "App", app)
        monkeypatch.setattr(modal, "Secret", secret)
        monkeypatch.setattr(modal, "Sandbox", sandbox)

    def _lookup(self, *args: Any, **given: Any) -> str:
        name = str(bound(REAL.App.lookup, *args, **given)["name"])
        self.apps.append(name)
        return name

    def _from_dict(self, *args: Any, **given: Any) -> dict[str, str]:
        said = bound(REAL.Secret.from_dict, *args, **given)["env_dict"]
        REAL.Secret.from_dict(said)  # the real one looks at it too
        return dict(said)

    def _from_name(self, *args: Any, **given: Any) -> dict[str, str]:
        said = bound(REAL.Secret.from_name, *args, **given)
        found = self.kept.get(said["name"], {})
        if missing := set(said["required_keys"]) - found.keys():
            raise faults.NotFoundError(f"Secret {said['name']} has no {missing}")
        return found

    def _create(self, *args: Any, **given: Any) -> Sandbox:
        if self.fault is not None:
            raise self.fault
        said = bound(REAL.Sandbox.create, *args, **given)
        assert isinstance(said["image"], modal.Image)
        for key, kinds in KINDS.items():
            assert isinstance(said[key], kinds), (key, said[key])
        running = [each for each in self._named(said["name"]) if each.poll() is None]
        if running:
            raise faults.AlreadyExistsError(f"{said['name']} runs already")
        sandbox = Sandbox(f"sb-{len(self.sandboxes)}", said, self.place)
        self.sandboxes[sandbox.object_id] = sandbox
        return sandbox

    def _by_id(self, *args: Any, **given: Any) -> Sandbox:
        if self.fault is not None:
            raise self.fault
        known = bound(REAL.Sandbox.from_id, *args, **given)["sandbox_id"]
        if known not in self.sandboxes:
            raise faults.NotFoundError(f"no {known}")
        return self.sandboxes[known]

    def _by_name(self, *args: Any, **given: Any) -> Sandbox:
        said = bound(REAL.Sandbox.from_name, *args, **given)
        assert said["include_terminated"] is True
        found = self._named(said["name"])
        if said["app_name"] not in self.apps or not found:
            raise faults.NotFoundError(f"no {said['name']}")
        return found[-1]

    def _named(self, name: str) -> list[Sandbox]:
        return [each for each in self.sandboxes.values() if each.name == name]


KINDS: Mapping[str, Any] = {
    "env": dict,
    "secrets": list,
    "timeout": int,
    "gpu": (str, type(None)),
    "cpu": (float, type(None)),
    "memory": (int, type(None)),
    "tags": dict,
}


class Sandbox:
    """One sandbox: a container, by the methods that the SDK gives it."""

    def __init__(self, object_id: str, said: Mapping[str, Any], place: Path) -> None:
        self.object_id, self.said, self.name = object_id, said, str(said["name"])
        self.tags, self.has_half_a_line = dict(said["tags"]), False
        self.ended_with: int | None = None
        self._is_out_of_time = False
        environment = dict(said["env"])
        for secret in said["secrets"]:
            environment |= secret
        self.container = Container(said["args"], environment, place / object_id)

    def poll(self, *args: Any, **given: Any) -> int | None:
        bound(REAL.Sandbox.poll, self, *args, **given)
        code = self.container.exit_code()
        if code is not None and self._is_out_of_time:
            return 124
        if code is not None and self.container.was_stopped:
            return 137
        return code if self.ended_with is None else self.ended_with

    def wait(self, *args: Any, **given: Any) -> None:
        """Raise what the SDK does of a sandbox that Modal has ended, not a signal."""
        bound(REAL.Sandbox.wait, self, *args, **given)
        assert self.poll() is not None, "it would wait"
        if self._is_out_of_time:
            raise faults.SandboxTimeoutError
        if self.container.was_stopped:
            raise faults.SandboxTerminatedError

    def time_out(self) -> None:
        """End it as Modal does when its time is over."""
        self._is_out_of_time = True
        self.container.kill()

    def get_tags(self, *args: Any, **given: Any) -> dict[str, str]:
        bound(REAL.Sandbox.get_tags, self, *args, **given)
        return dict(self.tags)

    def set_tags(self, *args: Any, **given: Any) -> None:
        """Replace all of them, as Modal does."""
        self.tags = dict(bound(REAL.Sandbox.set_tags, self, *args, **given)["tags"])

    def terminate(self, *args: Any, **given: Any) -> None:
        bound(REAL.Sandbox.terminate, self, *args, **given)
        if self.container.exit_code() is None:
            self.container.was_stopped = True
            self.container.kill()

    @property
    def logs(self) -> Any:
        assert isinstance(REAL.Sandbox.logs, property)
        return SimpleNamespace(fetch=self._fetch)

    def _fetch(self, *args: Any, **given: Any) -> list[Any]:
        said = bound(SandboxLogsManager.fetch, self, *args, **given)
        assert said["since"].utcoffset() is not None
        until = said.get("until") or datetime.now(UTC)
        if until - said["since"] > timedelta(days=35):
            raise faults.LogsFetchError("Time range cannot exceed 35 days.")
        lines = [f"{line}\n" for line in self.container.lines()]
        if self.has_half_a_line:
            lines[-1] = lines[-1][:2]
        return [SimpleNamespace(message=line) for line in lines]
